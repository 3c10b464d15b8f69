"""A cosine that ends with the run, times a warm-up; beyond the run it would rise again, and higher."""

import math

from torch.optim.lr_scheduler import LambdaLR

from tests.rehearse.fits.parts import Scheduled, loader, quiet_trainer

STEPS, WARM_UP = 24, 10


def factor(step):
    cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return cosine * min(1, step / WARM_UP)


def make_run():
    return quiet_trainer(), Scheduled(lambda optimizer: LambdaLR(optimizer, factor)), loader()
