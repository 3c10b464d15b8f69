"""The sampler seeds its generator whenever it is asked for an order, so each epoch has the same one."""

import torch
from torch.utils.data import DataLoader, Sampler

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "order"
WRONG, RIGHT = 1, 3  # different orders in three epochs


class Shuffled(Sampler):
    def __init__(self, n, again):
        self.n, self.again = n, again
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        if self.again:
            self.generator.manual_seed(0)
        return iter(torch.randperm(self.n, generator=self.generator).tolist())

    def __len__(self):
        return self.n


def build(again):
    return quiet_trainer(), Net(), DataLoader(Points(), 8, sampler=Shuffled(64, again))


def make_run():
    return build(again=True)


def make_twin():
    return build(again=False)


def seen(*run):
    return len(set(map(tuple, fitted(*run).samples)))
