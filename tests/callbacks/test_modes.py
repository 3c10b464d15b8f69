"""What no checkpoint of Lightning holds: which parameters are trained, in which mode a part is, what was found."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelCheckpoint,
)

from course_lib.callbacks import CheckpointError, ExactAccumulation, ExactResume, SkipBadSteps
from course_lib.resume import ResumableDataLoader
from tests import effort
from tests.callbacks.whole_run import SAVES, Dies, Everything, Killed, resume, same, state_of
from tests.trainer_oracle import quiet_trainer


class Thaws(Callback):
    """Trains the first two parts, and leaves dropout out, from an epoch on."""

    def setup(self, trainer, pl_module, stage):
        pl_module.net[:2].requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.net[:2].requires_grad_(True)
            pl_module.net[2].eval()


class FineTunes(BaseFinetuning):
    """Lightning's own, which adds a group of parameters."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[:2], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:2], optimizer, lr=0.01)


@pytest.mark.thorough(but=1)
@pytest.mark.filterwarnings("ignore:.*had been frozen or unfrozen")
@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("kind", [Thaws, FineTunes])
def test_what_is_unfrozen_during_a_run_stays_so(kind, saves, monkeypatch, tmp_path):
    def life(folder, **arguments):
        callbacks = [ExactAccumulation(), SkipBadSteps(), ExactResume(), kind()]
        return state_of(resume(folder, refused, saves=saves, callbacks=callbacks, **arguments)[0])

    def of_what_is_trained(self):
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.05)

    if kind is FineTunes:
        monkeypatch.setattr(Everything, "configure_optimizers", of_what_is_trained)
    refused = []
    whole = life(tmp_path / "whole")
    for kill in ((38, "validation"), (20, "forward"), (33, "start"))[: effort.cases(1, 3)]:
        folder = tmp_path / f"{kill}"
        for dies in (Dies(*kill), Dies(3, "end")):
            with pytest.raises(Killed):
                life(folder, dies=dies, seed=1)
        assert same(life(folder, seed=2), whole), kill
    assert all("in the middle of an update" in one or "ahead of the first step" in one for one in refused)


def test_a_parameter_that_is_frozen_otherwise_is_told_of(tmp_path):
    class Saves(Checkpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    class Freezes(Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.net.bias.requires_grad_(False)

    fit(Tuned(), ExactResume(), Saves())
    with pytest.warns(UserWarning, match=r"^net\.bias had been frozen or unfrozen"):
        resumed = fit(Tuned(), ExactResume(), Freezes(), ckpt_path=tmp_path / "0.ckpt")
    assert resumed.net.bias.requires_grad


class Tuned(LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.lr, self.batch_size = torch.nn.Linear(3, 2), lr, 2

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return ResumableDataLoader(torch.arange(36.0).view(12, 3), batch_size=self.batch_size, shuffle=True, seed=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def fit(module, *callbacks, ckpt_path=None, **flags):
    quiet_trainer(max_epochs=2, callbacks=[*callbacks], **flags).fit(module, ckpt_path=ckpt_path, weights_only=False)
    return module


@pytest.mark.thorough
@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_finder_finds_once(finder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where it keeps what was before
    tries = dict(num_training_steps=11) if finder is LearningRateFinder else dict(max_trials=1)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(Tuned(), ExactResume(), finder(**tries), saves)
    plain = Tuned(whole.lr)
    plain.batch_size = whole.batch_size
    assert same(state_of(fit(plain, ExactResume())), state_of(whole))  # it left nothing behind
    path = tmp_path / "step=2.ckpt"
    with pytest.raises(CheckpointError, match="a finder of batch sizes or rates would train ahead"):
        fit(Tuned(), ExactResume(), finder(), ckpt_path=path)
    resumed = Tuned(0.5)
    resumed.batch_size = whole.batch_size
    assert same(state_of(fit(resumed, ExactResume(), ckpt_path=path)), state_of(whole))
