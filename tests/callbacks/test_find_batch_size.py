"""FindBatchSize in real fits."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from course_lib.callbacks.find_batch_size import FindBatchSize
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
    assert len(finder.fitted.trials) == (3 if asks else 1)
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
