"""A loader that nobody here wrote, with a state of its own, as torchdata's StatefulDataLoader keeps one."""

import random

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from course_lib.callbacks import CheckpointError, ExactAccumulation, ExactResume, SkipBadSteps
from tests import effort
from tests.callbacks.whole_run import SAVES, Dies, Killed, newest, same, state_of
from tests.trainer_oracle import quiet_trainer


class Stateful:
    """Its orders follow from a generator that is seeded when it is made; a state goes on with the next iteration."""

    def __init__(self, samples, batch_size):
        self.samples, self.batch_size, self.num_workers = samples, batch_size, 0
        self.generator = torch.Generator().manual_seed(int(torch.randint(2**40, ())))
        self.begun_with, self.given, self.to_pass_over = self.generator.get_state(), 0, 0

    def __len__(self):
        return len(self.samples) // self.batch_size

    def __iter__(self):
        passed_over, self.to_pass_over = self.to_pass_over, 0
        self.begun_with, self.given = self.generator.get_state(), passed_over
        order = torch.randperm(len(self.samples), generator=self.generator)
        return self.batches(order, passed_over)

    def batches(self, order, passed_over):
        for indices in order.split(self.batch_size)[passed_over : len(self)]:
            self.given += 1
            yield self.samples[indices]

    def state_dict(self):
        return {"generator": self.begun_with, "given": self.given}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.to_pass_over = state["given"]


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))

    def training_step(self, batch):
        loss_sum = self.net(batch).square().sum()
        for callback in self.trainer.callbacks:
            if isinstance(callback, Dies):
                callback.at("forward")
        return loss_sum, len(batch)

    def validation_step(self, batch):
        self.log("val", self.net(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


def life(folder, saves, dies=None, seed=0, **flags):
    module = Small()
    torch.manual_seed(seed if newest(folder) else 0)  # each process has its own, but for one that begins anew
    samples = torch.arange(60.0).view(20, 3) / 60
    kept = ModelCheckpoint(folder, save_top_k=-1, **SAVES[saves])
    callbacks = [*([dies] if dies else []), ExactAccumulation(), SkipBadSteps(), ExactResume(), kept]
    trainer = quiet_trainer(max_epochs=3, callbacks=callbacks, **flags)
    trainer.fit(module, Stateful(samples, 2), DataLoader(samples, 5), ckpt_path=newest(folder), weights_only=False)
    return state_of(module)


def resumed(folder, *arguments, **flags):
    """From the newest checkpoint that is not refused; None where it is killed."""
    while True:
        try:
            return life(folder, *arguments, **flags)
        except CheckpointError:
            newest(folder).unlink()
        except Killed:
            return None


@pytest.mark.thorough(but=1)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:this checkpoint was saved ahead of an epoch's validation")  # of the last epoch
@pytest.mark.parametrize("saves", SAVES)
def test_a_loader_of_others_goes_on_where_it_was(saves, tmp_path):
    rng = random.Random(f"others {saves}")
    for case in range(effort.cases(2, 40)):
        flags = dict(accumulate_grad_batches=rng.choice([1, 2, 3]), limit_train_batches=rng.choice([1.0, 1.0, 4]))
        flags |= dict(val_check_interval=rng.choice([1.0, 2]))
        whole = life(tmp_path / f"whole {case}", saves, **flags)
        kills = [Dies(rng.randint(1, 28), rng.choice(("start", "forward", "end", "validation"))) for _ in range(2)]
        for seed, dies in enumerate([*kills, None]):
            ended = resumed(tmp_path / f"{case}", saves, dies, 1 + seed, **flags)
            if ended:
                break
        assert same(ended, whole), (flags, [(dies.micro_batch, dies.place) for dies in kills])
