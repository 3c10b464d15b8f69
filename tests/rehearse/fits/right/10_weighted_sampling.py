"""Samples are drawn with replacement, by weight: some come twice in an epoch and some never."""

import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.rehearse.fits.parts import Net, Points, quiet_trainer


def make_run():
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1.0, 64), num_samples=64)
    return quiet_trainer(), Net(), DataLoader(Points(), 8, sampler=sampler)
