"""The batch sampler has more batches in each epoch and the Trainer counted the first one's: 32 of 64 are unread."""

import torch
from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "changes"
WRONG, RIGHT = 32, 64  # samples of the second epoch


class Smaller:
    """Batches of 16 in the first epoch, of 8 from then on."""

    def __init__(self):
        self.epoch = 0

    @property
    def sampler(self):
        return self

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.view(-1, self.size()).tolist())

    def __len__(self):
        return 64 // self.size()

    def size(self):
        return 8 if self.epoch else 16


class Run(Net):
    def __init__(self):
        super().__init__()
        self.loader = DataLoader(Points(), batch_sampler=Smaller())

    def train_dataloader(self):
        self.loader.batch_sampler.set_epoch(self.trainer.current_epoch)
        return self.loader


def build(reload):
    return quiet_trainer(reload_dataloaders_every_n_epochs=reload), Run(), None


def make_run():
    return build(0)


def make_twin():
    return build(1)


def seen(*run):
    return len(fitted(*run).samples[1])
