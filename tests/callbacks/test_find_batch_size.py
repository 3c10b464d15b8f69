"""FindBatchSize in real fits."""

import logging

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from course_lib.callbacks import ExactAccumulation, StepAudit
from course_lib.callbacks.find_batch_size import FindBatchSize
from course_lib.launch import RankError, run_ranks
from course_lib.memory import find_batch_size
from tests.trainer_oracle import quiet_trainer

DATA = TensorDataset(torch.ones(500, 20), torch.zeros(500, dtype=torch.long))


class Classifier(LightningModule):
    def __init__(self, batch_size=1, asks=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 5), nn.Dropout())
        self.batch_size, self.asks, self.losses, self.sizes = batch_size, asks, [], []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if self.asks:
            assert self.trainer.current_epoch < 2
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.sizes.append(len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self):
        return DataLoader(DATA, self.batch_size)


class Data(LightningDataModule):
    batch_size = 1

    def train_dataloader(self):
        return DataLoader(DATA, self.batch_size)


@pytest.mark.parametrize("asks", [False, True])
def test_the_run_trains_with_what_was_found_and_is_otherwise_the_same(asks):
    finder = FindBatchSize(limit_bytes=30_000)
    found = Classifier(asks=asks)
    quiet_trainer(max_epochs=2, callbacks=[finder]).fit(found)
    size = finder.fitted.batch_size
    assert 0.95 * 30_000 < finder.fitted.measured_bytes <= 30_000
    assert len(finder.fitted.trials) == 1  # a module that asks its Trainer is predicted as well
    assert found.batch_size == size and found.sizes[:2] == [size, size] and found.sizes[-1] == 500 % size
    known = Classifier(size)
    quiet_trainer(max_epochs=2).fit(known)
    assert found.losses == known.losses
    assert "log" not in vars(found)


def test_a_horizon_that_configure_optimizers_asks_for_is_that_of_the_size_that_was_found():
    class Decays(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    model = Decays(4)
    trainer = quiet_trainer(max_epochs=2, callbacks=[FindBatchSize(limit_bytes=30_000)])
    trainer.fit(model)
    assert model.sizes[0] == model.batch_size > 100
    (schedule,) = [config.scheduler for config in trainer.lr_scheduler_configs]
    assert schedule.T_max == trainer.global_step == 6
    assert schedule.get_last_lr() == [0]


def test_a_datamodule():
    data, finder = Data(), FindBatchSize(limit_bytes=30_000, multiple_of=8)
    model = Classifier()
    del model.batch_size
    quiet_trainer(max_epochs=1, callbacks=[finder]).fit(model, datamodule=data)
    assert data.batch_size == finder.fitted.batch_size == model.sizes[0] and data.batch_size % 8 == 0


class Manual(Classifier):
    automatic_optimization = False


class TwoOptimizers(Classifier):
    def configure_optimizers(self):
        return [super().configure_optimizers(), super().configure_optimizers()], []


@pytest.mark.parametrize(
    ("model", "loader", "message"),
    [
        (Classifier, DataLoader(DATA), "got a loader that is made already"),
        (Manual, None, "needs automatic optimization"),
        (TwoOptimizers, None, "multiple optimizers|one optimizer"),
    ],
)
def test_what_it_does_not_know(model, loader, message):
    with pytest.raises((MisconfigurationException, RuntimeError), match=message):
        quiet_trainer(max_epochs=1, callbacks=[FindBatchSize(limit_bytes=30_000)]).fit(model(), loader)


def test_no_attribute_to_set():
    with pytest.raises(MisconfigurationException, match="sets 'size', which neither module, hparams nor datamodule"):
        quiet_trainer(max_epochs=1, callbacks=[FindBatchSize("size", limit_bytes=30_000)]).fit(Classifier())


class Sums(Classifier):
    """As ExactAccumulation wants it: the sum, and a count that is a tensor."""

    def training_step(self, batch, batch_idx):
        self.sizes.append((self.trainer.current_epoch, len(batch[0])))
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum"), (batch[1] != -100).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


@pytest.mark.parametrize("finder_first", [True, False])
def test_exact_accumulation_may_count_by_a_tensor(finder_first):
    finder, audit = FindBatchSize(limit_bytes=30_000, effective_batch_size=250), StepAudit(strict=True)
    callbacks = [finder, ExactAccumulation()] if finder_first else [ExactAccumulation(), finder]
    trainer = quiet_trainer(max_epochs=2, callbacks=[*callbacks, audit])
    trainer.fit(Sums())
    assert finder.fitted.batch_size == 125
    assert finder.fitted.predicted_bytes is not None and len(finder.fitted.trials) == 1
    assert trainer.global_step == 4
    assert trainer.accumulate_grad_batches == 1  # as it was given


class Steps(Callback):
    """The samples of each optimizer step on this rank."""

    def __init__(self):
        self.samples, self.waiting = [], 0

    def on_train_start(self, trainer, pl_module):
        trainer.optimizers[0].register_step_post_hook(self.count)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.waiting += len(batch[0])

    def count(self, *_):
        self.samples.append(self.waiting)
        self.waiting = 0


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("effective", [500, 250, 100, 1, 7, 997])
def test_the_effective_batch_is_held(effective, caplog):
    # 997 is a prime: batches of 1, and windows of 997, of which the 500 samples leave one short one.
    finder, steps = FindBatchSize(limit_bytes=30_000, effective_batch_size=effective), Steps()
    model = Classifier(batch_size=3)
    trainer = quiet_trainer(max_epochs=1, callbacks=[finder, steps], accumulate_grad_batches=2)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        trainer.fit(model)
    size = finder.fitted.batch_size
    fits = [divisor for divisor in range(1, 1 + effective) if effective % divisor == 0 and divisor <= 165]
    assert size == model.batch_size == max(fits)
    assert size in [trial.batch_size for trial in finder.fitted.trials]
    assert steps.samples == [effective] * (500 // effective) + [500 % effective] * (500 % effective > 0)
    assert f"The effective batch is now {effective:,} samples (6 before): batches of {size:,}, " in caplog.text


def test_a_horizon_goes_by_the_windows_that_hold_the_effective_batch():
    class Decays(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = quiet_trainer(max_epochs=2, callbacks=[FindBatchSize(limit_bytes=30_000, effective_batch_size=250)])
    trainer.fit(Decays(125))
    (schedule,) = [config.scheduler for config in trainer.lr_scheduler_configs]
    assert schedule.T_max == trainer.global_step == 4


def test_without_it_a_line_says_what_the_effective_batch_became(caplog):
    finder = FindBatchSize(limit_bytes=30_000, max_batch_size=160)
    trainer = quiet_trainer(max_epochs=1, callbacks=[finder], accumulate_grad_batches=2)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        trainer.fit(Classifier(batch_size=4))
    assert "The effective batch is now 320 samples (8 before): batches of 160, 2 a step, on 1 rank" in caplog.text


def test_a_scheduler_of_windows_is_said_and_not_overruled(caplog):
    windows = GradientAccumulationScheduler({0: 2, 1: 3})
    finder = FindBatchSize(limit_bytes=30_000, max_batch_size=160)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        quiet_trainer(max_epochs=2, callbacks=[windows, finder]).fit(Classifier())
    assert "now 320 from epoch 0, 480 from epoch 1, in samples: batches of 160 on 1 rank, in" in caplog.text
    both = quiet_trainer(max_epochs=2, callbacks=[windows, FindBatchSize(effective_batch_size=8)])
    with pytest.raises(MisconfigurationException, match="leave one of the two out"):
        both.fit(Classifier())


@pytest.mark.thorough
def test_two_ranks_hold_the_effective_batch_together():
    def train(rank, effective):
        finder, steps = FindBatchSize(limit_bytes=30_000, effective_batch_size=effective), Steps()
        trainer = quiet_trainer(max_epochs=1, callbacks=[finder, steps], devices=2, strategy="ddp")
        trainer.fit(Classifier())
        return finder.fitted.batch_size, steps.samples

    one, other = (result.value for result in run_ranks(train, 2, args=(200,), timeout=120))
    assert one == other == (100, [100, 100, 50])
    with pytest.raises(RankError, match="effective_batch_size=201 can't be shared by 2 ranks: give a multiple of 2"):
        run_ranks(train, 2, args=(201,), timeout=120)


def test_where_no_size_makes_up_the_effective_batch_it_is_said_before_training():
    model = Classifier()
    trainer = quiet_trainer(max_epochs=1, callbacks=[FindBatchSize(effective_batch_size=12, multiple_of=8)])
    with pytest.raises(MemoryError, match="the largest batch that fits is 12, and multiple_of=8, divisor_of=12"):
        trainer.fit(model)
    assert model.sizes == []
    with pytest.raises(ValueError, match="effective_batch_size must be"):
        FindBatchSize(effective_batch_size=0)


def test_a_factory_in_the_models_place_is_named():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"model must be the nn\.Module itself.*got a function"):
        find_batch_size(lambda: model, lambda size: torch.ones(size, 2), optimizer)
