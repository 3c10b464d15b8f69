"""A Trainer calls ``set_epoch`` on samplers and never on a batch sampler, so each epoch here has the same order."""

import torch
from torch.utils.data import BatchSampler, DataLoader

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "order"
WRONG, RIGHT = 1, 3  # different orders in three epochs


class ShuffledBatches(BatchSampler):
    def __init__(self, n, batch_size):
        self.n, self.batch_size, self.drop_last = n, batch_size, False
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.n, generator=generator).view(-1, self.batch_size).tolist()

    def __len__(self):
        return self.n // self.batch_size


class Found(ShuffledBatches):
    @property
    def sampler(self):
        return self


def build(batch_sampler):
    return quiet_trainer(), Net(), DataLoader(Points(), batch_sampler=batch_sampler)


def make_run():
    return build(ShuffledBatches(64, 8))


def make_twin():
    return build(Found(64, 8))


def seen(*run):
    return len(set(map(tuple, fitted(*run).samples)))
