"""The rate follows 7/16 of a cosine, and ends with the run at a fifth of its peak, as FixMatch's does."""

import math

from torch.optim.lr_scheduler import LambdaLR

from tests.rehearse.fits.parts import Scheduled, loader, quiet_trainer


def part_of_a_cosine(optimizer, total=24):
    return LambdaLR(optimizer, lambda step: max(0.0, math.cos(math.pi * 7 / 16 * step / total)))


def make_run():
    return quiet_trainer(), Scheduled(part_of_a_cosine, "step"), loader()
