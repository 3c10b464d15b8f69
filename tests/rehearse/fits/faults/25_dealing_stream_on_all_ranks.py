"""A stream is not shared out by a sampler, so each of two ranks trains on all of its 64 samples."""

import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer, rank_and_world

CHECK = "dealing"
RANKS = 2
WRONG, RIGHT = 64, 32  # samples of a rank in an epoch


class Stream(IterableDataset):
    """Points in a new order in each epoch."""

    def __init__(self, split):
        self.points, self.split, self.epoch = Points(), split, 0

    def __iter__(self):
        rank, world = rank_and_world() if self.split else (0, 1)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += 1
        return (self.points[index] for index in order[rank::world].tolist())


def build(split):
    return quiet_trainer(strategy="ddp", devices=2), Net(), DataLoader(Stream(split), 8)


def make_run():
    return build(split=False)


def make_twin():
    return build(split=True)


def seen(*run):
    return len(fitted(*run).samples[0])
