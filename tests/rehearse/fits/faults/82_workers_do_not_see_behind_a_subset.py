"""A dataset behind a ``Subset`` is told its epoch; workers that live on keep the copy of epoch 0."""

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Subset

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "workers"
WRONG, RIGHT = [0, 0, 0], [0, 1, 2]  # the epoch that each epoch's samples were made for


class Curriculum(Points):
    def __init__(self, shared):
        super().__init__(32)
        self.epoch = torch.zeros(1, dtype=torch.long).share_memory_() if shared else 0

    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        return x, y, int(self.epoch)


class Tell(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        dataset = trainer.train_dataloader.dataset.dataset
        if isinstance(dataset.epoch, torch.Tensor):
            dataset.epoch.fill_(trainer.current_epoch)
        else:
            dataset.epoch = trainer.current_epoch


def build(shared):
    data = DataLoader(
        Subset(Curriculum(shared), range(32)),
        8,
        shuffle=True,
        num_workers=1,
        prefetch_factor=1,
        persistent_workers=True,
    )
    return quiet_trainer(callbacks=[Tell()]), Net(), data


def make_run():
    return build(False)


def make_twin():
    return build(True)


def seen(*run):
    return [max(epoch) for epoch in fitted(*run).samples]
