"""The dataset's noise is set in each epoch, and workers that persist hold a copy: they see the first only."""

import numpy as np
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, quiet_trainer

CHECK = "workers"
WRONG, RIGHT = [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]  # the last batch's level in three epochs


class Levelled(Points):
    """The first number of a sample is the level."""

    def __init__(self, level):
        super().__init__()
        self.level = level

    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        return torch.cat([torch.as_tensor(self.level, dtype=torch.float32), x[1:]]), y, index


class SetLevel(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.train_dataloader.dataset.level[0] = trainer.current_epoch + 1


class LastLevels(Callback):
    def __init__(self):
        self.levels = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.is_last_batch:
            self.levels.append(batch[0][0, 0].item())


def build(level):
    data = DataLoader(Levelled(level), 4, shuffle=True, num_workers=1, persistent_workers=True)
    return quiet_trainer(callbacks=[SetLevel()]), Net(), data


def make_run():
    return build(np.zeros(1))


def make_twin():
    return build(torch.zeros(1).share_memory_())


def seen(trainer, model, data):
    levels = LastLevels()
    trainer.callbacks.append(levels)
    trainer.fit(model, data)
    return levels.levels
