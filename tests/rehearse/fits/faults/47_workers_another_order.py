"""The batch sampler draws its order when ``iter`` is called, which a loader with workers does twice: another order."""

import copy

import torch
from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "workers"
WRONG, RIGHT = False, True  # whether the order with workers is that without


class Drawn:
    """Batches of 8 of 64, in an order of its own generator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def draw(self):
        return torch.randperm(64, generator=self.generator).view(-1, 8).tolist()

    def __iter__(self):
        return iter(self.draw())

    def __len__(self):
        return 8


class DrawnLate(Drawn):
    def __iter__(self):
        yield from self.draw()


def build(batch_sampler):
    return quiet_trainer(), Net(), DataLoader(Points(), batch_sampler=batch_sampler, num_workers=1)


def make_run():
    return build(Drawn())


def make_twin():
    return build(DrawnLate())


def seen(trainer, model, data):
    without = [index for batch in copy.deepcopy(data.batch_sampler) for index in batch]
    return fitted(trainer, model, data).samples[0] == without
