"""What a module's own code does beside its optimizer: a run that is stopped anywhere ends as one that was not."""

import copy
import functools
import itertools
import os
import random
import signal
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from course_lib.callbacks import CheckpointError, ExactResume
from course_lib.callbacks._unstepped import Unstepped
from course_lib.loader import MiniDataLoader
from course_lib.resume import ResumableDataLoader
from course_lib.samplers import ShardedBatchSampler
from tests import effort
from tests.callbacks.whole_run import SAVES, Dies, Killed, newest, same
from tests.trainer_oracle import quiet_trainer


class Samples(Dataset):
    def __init__(self, n=11):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(n, 3, generator=generator), torch.randn(n, 1, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.trained = []

    def loss(self, x, y):
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch):
        x, y, indices = batch
        self.trained.append(indices.tolist())
        for callback in self.trainer.callbacks:
            if isinstance(callback, Dies):
                callback.at("forward")
        return self.loss(x, y)

    def validation_step(self, batch):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=0.05)


class AsksHowLongItIs(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class MomentumEncoder(Plain):
    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, x, y):
        return super().loss(x, y) + nn.functional.mse_loss(self.net(x), self.target(x))

    def move(self):
        for mine, its in zip(self.net.parameters(), self.target.parameters(), strict=True):
            with torch.no_grad():
                its.lerp_(mine, 0.1)

    def on_train_batch_start(self, batch, batch_idx):
        self.move()


class MovedThroughItsData(MomentumEncoder):
    def on_train_batch_start(self, batch, batch_idx): ...

    def on_before_zero_grad(self, optimizer):
        self.move()

    def move(self):
        for mine, its in zip(self.net.parameters(), self.target.parameters(), strict=True):
            its.data = its.data * 0.9 + mine.data * 0.1


class Weighted(Plain):
    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("weight", torch.ones(()), persistent=persistent)

    def loss(self, x, y):
        return super().loss(x, y) * self.weight


class MovesABufferAtAnEpochsEnd(Weighted):
    def on_train_epoch_end(self):
        self.weight.mul_(0.5)


class KeepsABufferToItself(Weighted):
    def __init__(self):
        super().__init__(persistent=False)

    def loss(self, x, y):
        loss = super().loss(x, y)
        if self.training:
            self.weight = 0.9 * self.weight + 0.1 * loss.detach()
        return loss


class KeepsABufferAtOnePlace(Weighted):
    """Each new buffer is where the one before was, as an allocator may have it."""

    def __init__(self):
        super().__init__(persistent=False)
        numbers = np.ones(())
        self.new_weight = lambda: torch.from_numpy(numbers)
        self.weight = self.new_weight()

    def loss(self, x, y):
        loss = super().loss(x, y)
        if self.training:
            weight = 0.9 * self.weight + 0.1 * loss.detach()
            self.weight = self.new_weight()
            self.weight.numpy()[...] = weight
        return loss


class AveragesAtABatchsEnd(Plain):
    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.net)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.net)
        self.optimizers().param_groups[0]["lr"] *= 0.95


class EndsAnEpochEarly(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 1 and batch_idx == 4 else None


class GetsNoneNowAndThen(Plain):
    """Its loader's ``collate_fn`` returns None for a batch that cannot be used."""


class TrainsInFloat64(Plain): ...


class LearnsMoreLater(Plain):
    """Its loader is made again in every other epoch, with more samples from epoch 2 on."""


class HasExtraState(Plain):
    """A part of it has a state that is no tensor."""

    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            self.net[0] = self.Counting(3, 4)

    def loss(self, x, y):
        self.net[0].seen += self.training
        return super().loss(x, y)


class DrawsAtABatchsEnd(Plain):
    """And where the next batch arrives."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return (batch[0] + 0.1 * torch.randn_like(batch[0]), *batch[1:]) if self.trainer.training else batch

    def on_train_batch_end(self, outputs, batch, batch_idx):
        torch.rand(())


class LogsAtABatchsEnd(Plain):
    """A schedule goes by what it logs there."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("own", batch[0].square().sum(), on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0)
        return {"optimizer": optimizer, "lr_scheduler": dict(scheduler=schedule, monitor="own")}


class IsShaken(Plain):
    """What arrives is augmented, by numbers that are drawn behind all hooks."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return (batch[0] + 0.1 * torch.randn_like(batch[0]), *batch[1:]) if self.trainer.training else batch


class DrawsWhereItStarts(IsShaken):
    def on_train_start(self):
        torch.rand(())


class DrawsEverywhere(Callback):
    def on_train_start(self, *_):
        torch.rand(())

    on_train_epoch_start = on_train_batch_end = on_validation_end = on_train_start


class HasACallbackThatDraws(IsShaken):
    def configure_callbacks(self):  # they come behind those of the Trainer
        return [DrawsEverywhere()]


class WarmsUp(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.weight += 0.1
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.97


class WarmsUpByACallback(Weighted):
    ahead = (WarmsUp(),)


class StepsItsScheduleItself(LogsAtABatchsEnd):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(-metric)


class KeepsPlainAttributes(Plain):
    """A number, a tensor and a schedule that no state has, and a setting that is another one in each life."""

    weight, carried, norm = 0.0, None, 1.0
    lives = itertools.count()

    def __init__(self):
        super().__init__()
        self.life = next(self.lives)
        self.dropout = nn.Dropout(0.0)

    def loss(self, x, y):
        self.weight += 0.1
        output = self.dropout(self.net(x)) + (0 if self.carried is None else 0.3 * self.carried)
        if self.training:
            self.carried = output.detach().mean()
        return self.weight * nn.functional.mse_loss(output, y)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.norm = 0.9 * self.norm + 0.1 * float(nn.utils.clip_grad_norm_(self.net.parameters(), self.norm))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedule = CosineAnnealingLR(optimizer, 30)
        return optimizer

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.schedule.step()
        self.dropout.p = 0.01 * (self.global_step + 1)


class HasSparseBuffers(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("mixes", torch.eye(3).roll(1, 0).to_sparse())
        self.register_buffer("swaps", torch.eye(3).roll(2, 0).to_sparse_csr(), persistent=False)
        self.copied = torch.eye(3).to_sparse()
        self.another_name = self.net[0].weight.data

    def loss(self, x, y):
        x = sum(torch.sparse.mm(by, x.T).T for by in (self.mixes, self.swaps, self.copied))
        return super().loss(x, y) * (1 + 0.1 * self.another_name.sum().clamp(0, 1))


class Grows:
    """Four batches in epoch 0, six in epoch 1, and so on."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4 + 2 * self.epoch

    def __iter__(self):
        order = torch.randperm(2 * len(self)).tolist()
        return iter([order[i : i + 2] for i in range(0, len(order), 2)])


class HasEpochsThatGrow(Plain): ...


class Curriculum(LightningDataModule):
    def train_dataloader(self):
        return loader(Samples(11 if self.trainer.current_epoch < 2 else 15))

    def val_dataloader(self):
        return held_out()


def usable(samples):
    return None if samples[0][2] % 5 == 0 else default_collate(samples)


def loader(samples=None, collate_fn=None):
    return ResumableDataLoader(samples or Samples(), batch_size=2, shuffle=True, seed=3, collate_fn=collate_fn)


def held_out():
    return DataLoader(Samples(4), 2)


def life(kind, folder, saves, k=1, dies=None, checkpoint=None, callbacks=(), **flags):
    """The module behind its training; a life that is killed comes back as None."""
    torch.manual_seed(0)
    module = kind()
    data = dict(train_dataloaders=loader(), val_dataloaders=held_out())
    if kind is GetsNoneNowAndThen:
        data["train_dataloaders"] = loader(collate_fn=usable)
    if kind is HasEpochsThatGrow:
        data["train_dataloaders"] = ResumableDataLoader(Samples(16), batch_sampler=ShardedBatchSampler(Grows()))
    if kind is TrainsInFloat64:
        flags["precision"] = "64-true"
    if kind is LearnsMoreLater:
        data, flags["reload_dataloaders_every_n_epochs"] = dict(datamodule=Curriculum()), 2
    saver = ModelCheckpoint(folder, save_top_k=-1, **SAVES[saves])
    ahead = getattr(kind, "ahead", ())
    ahead = ahead() if callable(ahead) else ahead
    callbacks = [*ahead, *callbacks, ExactResume(), *([dies] if dies else []), saver]
    flags = dict(max_epochs=3, accumulate_grad_batches=k, val_check_interval=2) | flags
    trainer = quiet_trainer(callbacks=callbacks, enable_checkpointing=True, **flags)
    try:
        trainer.fit(module, ckpt_path=checkpoint, weights_only=False, **data)
    except Killed:
        return None
    return module


KINDS = [
    AsksHowLongItIs,
    MomentumEncoder,
    MovedThroughItsData,
    MovesABufferAtAnEpochsEnd,
    KeepsABufferToItself,
    KeepsABufferAtOnePlace,
    AveragesAtABatchsEnd,
    EndsAnEpochEarly,
    GetsNoneNowAndThen,
    TrainsInFloat64,
    LearnsMoreLater,
    HasExtraState,
    DrawsAtABatchsEnd,
    LogsAtABatchsEnd,
    DrawsWhereItStarts,
    HasACallbackThatDraws,
    WarmsUpByACallback,
    StepsItsScheduleItself,
    HasEpochsThatGrow,
    KeepsPlainAttributes,
    HasSparseBuffers,
]
TOLD = [
    "ignore:.*does not call DrawsEverywhere.on_train_epoch_start again",
    "ignore:the loaders of epoch",
    "ignore:train_dataloader yielded None",
    "ignore:Checkpoint directory",
    "ignore:The dirpath has changed",
]


def state_of(module):
    state = (one for one in module.state_dict().values() if isinstance(one, torch.Tensor))
    return [one.to_dense() for one in (*state, *module.buffers())]


def from_the_newest(kind, folder, refused, *case, **arguments):
    """A life that goes on from the newest checkpoint that is neither refused nor warned of."""
    while path := newest(folder):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="this checkpoint was saved at a batch's end, ahead of")
            try:
                return life(kind, folder, *case, checkpoint=path, **arguments)
            except (CheckpointError, UserWarning) as error:
                refused.append(str(error))
                path.unlink()
    return life(kind, folder, *case, **arguments)


@pytest.mark.thorough(but=1)
@pytest.mark.filterwarnings(*TOLD)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_ends_as_one_that_is_not(kind, tmp_path):
    rng = random.Random(kind.__name__)
    cases = list(itertools.product(SAVES, (1, 3), ("start", "forward", "end", "validation")))
    for number, (saves, k, place) in enumerate(rng.sample(cases, effort.cases(6, len(cases)))):
        whole = life(kind, tmp_path / f"whole {number}", saves, k)
        folder, refused, last = tmp_path / f"{number}", [], None
        for killed_at in (2 * rng.randint(2, 5), 2 * rng.randint(1, 2), None):
            dies = None if killed_at is None else Dies(killed_at, place)
            last = last or from_the_newest(kind, folder, refused, saves, k, dies=dies)
        case = f"{saves}, windows of {k}, killed at its {place}, refused: {refused}"
        assert whole.trained[len(whole.trained) - len(last.trained) :] == last.trained, case
        assert same(state_of(whole), state_of(last)), case


def test_epochs_that_grow_are_whole(tmp_path):
    assert len(life(HasEpochsThatGrow, tmp_path, "every epoch").trained) == 4 + 6 + 8


@pytest.mark.filterwarnings(*TOLD)
def test_a_window_that_begins_with_none_has_no_gradient_of_the_one_before(tmp_path):
    module = Plain()
    expected = copy.deepcopy(module.net)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.05)
    batches = [next(iter(DataLoader(Samples(), 1, sampler=[index]))) for index in (1, 2, 0, 3)]
    for window in ((0, 1), (3,)):
        optimizer.zero_grad()
        for number in window:
            (nn.functional.mse_loss(expected(batches[number][0]), batches[number][1]) / 2).backward()
        optimizer.step()
    data = MiniDataLoader(Samples(), 1, sampler=[1, 2, 0, 3], collate_fn=usable)
    quiet_trainer(callbacks=[ExactResume()], accumulate_grad_batches=2, max_epochs=1).fit(module, data)
    for mine, its in zip(expected.parameters(), module.net.parameters(), strict=True):
        torch.testing.assert_close(its, mine)


class Drawing(Samples):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + torch.rand(3), *super().__getitem__(index)[1:]


class Endless(IterableDataset):
    def __iter__(self):
        return iter([Samples()[index] for index in range(6)])


@pytest.mark.parametrize(
    ("saves", "make", "told"),
    [
        ("every step", lambda: MiniDataLoader(Drawing(), 2, num_workers=1), "a MiniDataLoader draw at random"),
        (
            "every epoch",
            lambda: DataLoader(Drawing(), 2, num_workers=1, persistent_workers=True),
            "its workers' generators",
        ),
        ("every epoch", lambda: DataLoader(Endless(), 2), "ahead of this run's seeds"),
    ],
)
def test_draws_that_are_in_no_checkpoint_are_told_of(saves, make, told, tmp_path):
    def fit(epochs, checkpoint=None):
        saver = ModelCheckpoint(tmp_path, save_top_k=-1, **SAVES[saves])
        trainer = quiet_trainer(callbacks=[ExactResume(), saver], enable_checkpointing=True, max_epochs=epochs)
        trainer.fit(Plain(), make(), ckpt_path=checkpoint, weights_only=False)

    fit(1)
    first = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)[0]
    with pytest.warns(UserWarning, match=told):
        fit(2, first)


def test_an_order_by_a_generator_of_the_loaders_own_is_refused(tmp_path):
    def fit(epochs, checkpoint=None):
        saver = ModelCheckpoint(tmp_path, save_top_k=-1, **SAVES["every epoch"])
        data = DataLoader(Samples(), 2, shuffle=True, generator=torch.Generator().manual_seed(0))
        trainer = quiet_trainer(callbacks=[ExactResume(), saver], enable_checkpointing=True, max_epochs=epochs)
        trainer.fit(Plain(), data, ckpt_path=checkpoint, weights_only=False)

    fit(1)
    with pytest.raises(CheckpointError, match="comes from a generator of its own"):
        fit(2, newest(tmp_path))


def test_the_control_of_the_harness_differs_without_the_callback(tmp_path, monkeypatch):
    monkeypatch.setitem(life.__globals__, "ExactResume", lambda: ModelCheckpoint(tmp_path / "no saves", save_top_k=0))
    whole = life(AsksHowLongItIs, tmp_path / "whole", "every step")
    assert life(AsksHowLongItIs, tmp_path / "killed", "every step", dies=Dies(9, "forward")) is None
    last = life(AsksHowLongItIs, tmp_path / "killed", "every step", checkpoint=newest(tmp_path / "killed"))
    assert not same(state_of(whole), state_of(last))


class StepsAPlateauByBatches(Plain):
    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": dict(scheduler=schedule, interval="step", monitor="loss")}


def test_a_checkpoint_ahead_of_a_plateaus_step_is_refused(tmp_path):
    assert life(StepsAPlateauByBatches, tmp_path, "every step", dies=Dies(9, "forward")) is None
    with pytest.raises(CheckpointError, match="ahead of the step of a ReduceLROnPlateau"):
        life(StepsAPlateauByBatches, tmp_path, "every step", checkpoint=newest(tmp_path))
    at_epochs_ends = functools.partial(life, StepsAPlateauByBatches, saves="every epoch", limit_val_batches=0)
    whole = at_epochs_ends(tmp_path / "whole")
    assert at_epochs_ends(tmp_path / "epochs", dies=Dies(9, "forward")) is None
    last = at_epochs_ends(tmp_path / "epochs", checkpoint=newest(tmp_path / "epochs"))
    assert same(state_of(whole), state_of(last))


class AlsoSaves(Dies):
    """A reader's own callback, which saves in one of its hooks."""

    def __init__(self, path, *place):
        super().__init__(*place, how=lambda: self.trainer.save_checkpoint(path))

    def setup(self, trainer, pl_module, stage):
        self.trainer = trainer


def test_what_moves_in_the_first_window_of_a_life_is_refused(tmp_path):
    path = tmp_path / "within.ckpt"
    life(MomentumEncoder, tmp_path, "every epoch", 3, AlsoSaves(path, 2, "forward"))
    with pytest.raises(CheckpointError, match=r"the module itself has moved target\.0\.bias: no optimizer has it"):
        life(MomentumEncoder, tmp_path, "every epoch", 3, checkpoint=path)


def test_two_averages_are_refused(tmp_path):
    averages = [EMAWeightAveraging(), WeightAveraging()]
    with pytest.raises(MisconfigurationException, match="EMAWeightAveraging and WeightAveraging in one run"):
        life(Plain, tmp_path, "every step", callbacks=averages)


def test_a_callback_that_saves_ahead_of_the_modules_hook_is_told_of(tmp_path):
    path = tmp_path / "by hand.ckpt"
    life(AveragesAtABatchsEnd, tmp_path / "own", "every epoch", dies=AlsoSaves(path, 3, "end"))
    with pytest.warns(UserWarning, match="ahead of AveragesAtABatchsEnd.on_train_batch_end"):
        life(AveragesAtABatchsEnd, tmp_path / "again", "every epoch", checkpoint=path)


class SetsAtAnEpochsStart(Plain):
    def on_train_epoch_start(self):
        self.share = 0.1 * self.current_epoch


class MovesAtAValidationsEnd(Weighted):
    def on_validation_end(self):
        self.weight.mul_(0.9)


class HalvesTheRate(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("kind", "saves", "callbacks", "flags", "told"),
    [
        (SetsAtAnEpochsStart, "every step", [], {}, "does not call SetsAtAnEpochsStart.on_train_epoch_start again"),
        (Plain, "every step", [DrawsEverywhere()], {}, "does not call DrawsEverywhere.on_train_epoch_start again"),
        (
            MovesAtAValidationsEnd,
            "validation",
            [],
            {},
            "saved at a validation's end, ahead of MovesAtAValidationsEnd.on_validation_end",
        ),
        (
            Plain,
            "every step",
            [HalvesTheRate()],
            dict(limit_val_batches=0, max_epochs=1),
            "saved at a batch's end, ahead of HalvesTheRate.on_train_epoch_end",
        ),
    ],
    ids=["an epoch's start", "an epoch's start of a callback", "a validation's end", "an epoch's end of a callback"],
)
def test_a_hook_that_does_not_run_again_is_told_of(kind, saves, callbacks, flags, told, tmp_path):
    dies = None if flags else Dies(5, "end")  # or at the epoch's end
    life(kind, tmp_path, saves, callbacks=callbacks, dies=dies, **flags)
    with pytest.warns(UserWarning, match=told):
        life(kind, tmp_path, saves, callbacks=callbacks, checkpoint=newest(tmp_path), **(flags | dict(max_epochs=2)))


class CountsMicroBatches(Callback):
    micro_batches = 0

    def on_train_batch_end(self, *_):
        self.micro_batches += 1

    def state_dict(self):
        return {"micro_batches": self.micro_batches}


class CountsForwards(Plain):
    forwards = 0

    def loss(self, x, y):
        self.forwards += 1
        return super().loss(x, y)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["forwards"] = self.forwards


def test_what_is_saved_as_it_was_within_a_window_is_told_of(tmp_path):
    path = tmp_path / "within.ckpt"
    run = functools.partial(life, CountsForwards, tmp_path, "every epoch", 3, callbacks=[CountsMicroBatches()])
    run(dies=AlsoSaves(path, 5, "forward"))
    told = r"but not what CountsMicroBatches\.state_dict and CountsForwards\.on_save_checkpoint put into it"
    with pytest.warns(UserWarning, match=told):
        run(checkpoint=path)


class IsToldToEnd(Callback):
    """By SIGTERM, which Lightning answers behind the epoch's end."""

    def on_train_epoch_end(self, trainer, pl_module):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("flags", [dict(max_epochs=3), dict(max_epochs=3, max_steps=100)])
def test_an_epoch_behind_whose_end_the_run_was_told_to_end_is_not_counted_twice(flags, tmp_path):
    run = functools.partial(life, Plain, saves="every epoch", limit_val_batches=0, **flags)
    whole = run(tmp_path / "whole")
    saver = OnExceptionCheckpoint(tmp_path, "told")
    with pytest.raises(SIGTERMException):
        run(tmp_path / "killed", callbacks=[IsToldToEnd(), saver])
    last = run(tmp_path / "last", checkpoint=tmp_path / "told.ckpt")
    assert whole.trained[-len(last.trained) :] == last.trained and len(last.trained) == 12
    assert same(state_of(whole), state_of(last))


class WithoutALength:
    """A loader that has a state."""

    def __init__(self):
        self.given, self.start = 0, 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.start = state["given"]

    def __iter__(self):
        samples = Samples()
        self.given, self.start = self.start, 0
        while self.given < len(samples):
            self.given += 1
            yield default_collate([samples[self.given - 1]])
        self.given = 0


def test_a_loader_without_a_length_that_is_read_ahead_of_is_refused_within_an_epoch(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=4)
    fit = functools.partial(
        quiet_trainer(callbacks=[ExactResume(), saver], enable_checkpointing=True, max_epochs=1).fit
    )
    with warnings.catch_warnings(action="ignore"):
        fit(Plain(), WithoutALength())
    with pytest.raises(CheckpointError, match="after 4 batches of a WithoutALength without a length"):
        fit(Plain(), WithoutALength(), ckpt_path=tmp_path / "epoch=0-step=4.ckpt", weights_only=False)


def test_the_hooks_are_the_callbacks_own_again_behind_a_fit(tmp_path):
    saver = ModelCheckpoint(tmp_path / "second", save_top_k=0)
    module = life(AveragesAtABatchsEnd, tmp_path, "every step", callbacks=[saver])
    assert "on_train_batch_end" not in vars(module) and "on_train_batch_end" not in vars(saver)
    with warnings.catch_warnings(action="ignore"):
        assert life(AveragesAtABatchsEnd, tmp_path, "every step", dies=Dies(2, "end"), callbacks=[saver]) is None
    assert "on_train_batch_end" not in vars(saver)


def test_a_frozen_backbone_is_not_copied(tmp_path):
    class Frozen(Plain):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Linear(100, 100).requires_grad_(False)

        def on_train_end(self):
            kept = next(one for one in self.trainer.callbacks if isinstance(one, ExactResume))._unstepped
            self.copied = sum(tensor.numel() for tensor in kept._kept.values())

    assert life(Frozen, tmp_path, "every step").copied == 0


def test_it_sees_every_way_of_moving_a_parameter():
    module = Plain()
    trainer = quiet_trainer()
    ways = [
        lambda weight: weight.data.mul_(0.9),
        lambda weight: setattr(weight, "data", weight.data * 0.9),
        lambda weight: weight.detach().add_(1.0),
        lambda weight: weight.data.view(-1)[-1].add_(1.0),
    ]
    for move in ways:
        unstepped = Unstepped(trainer, module, {})
        unstepped.keep()
        before = module.net[0].weight.detach().clone()
        move(module.net[0].weight)
        assert unstepped.set_back({}, []) == ["net.0.weight"]
        unstepped.keep()
        assert set(unstepped._kept) == {"net.0.weight"}
        kept = module.net[0].weight.detach().clone()
        move(module.net[0].weight)
        state = module.state_dict()
        assert unstepped.set_back(state, []) == []
        assert torch.equal(state["net.0.weight"], kept) and not torch.equal(kept, before)


def test_parameters_of_every_kind_may_lie_beside_the_optimizers(tmp_path):
    class Odd(Plain):
        def __init__(self):
            super().__init__()
            frozen = functools.partial(nn.Parameter, requires_grad=False)
            self.of_complex = frozen(torch.ones(3, dtype=torch.complex64))
            self.of_ints = frozen(torch.ones(2, 2, dtype=torch.int64))
            self.empty = frozen(torch.ones(0))
            self.of_bfloat16 = frozen(torch.ones((), dtype=torch.bfloat16))

    module = Odd()
    module.lazy, module.meta = nn.LazyLinear(3), nn.Linear(2, 2, device="meta")
    unstepped = Unstepped(quiet_trainer(), module, {})
    unstepped.keep()
    with torch.no_grad():
        for one in (module.of_complex, module.of_ints, module.of_bfloat16):
            one.add_(1)
    assert unstepped.set_back({}, []) == ["of_bfloat16", "of_complex", "of_ints"]
    assert life(Odd, tmp_path, "every step") is not None
