"""A cosine that jumps back to its peak twice, as transformers' schedule with hard restarts does."""

import math

from torch.optim.lr_scheduler import LambdaLR

from tests.rehearse.fits.parts import Scheduled, loader, quiet_trainer

STEPS, CYCLES = 24, 3


def factor(step):
    return 0.5 * (1 + math.cos(math.pi * (CYCLES * step / STEPS % 1))) if step < STEPS else 0.0


def make_run():
    return quiet_trainer(), Scheduled(lambda optimizer: LambdaLR(optimizer, factor)), loader()
