"""A function's horizon is epochs times batches, and Lightning steps it once an epoch: the rate ends at 88 %."""

from torch.optim.lr_scheduler import LambdaLR

from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 88, 0  # the rate at the end, in % of its peak
EPOCHS, BATCHES = 3, 8


def build(interval):
    schedule = lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / (EPOCHS * BATCHES))  # noqa: E731
    return quiet_trainer(), Scheduled(schedule, interval), loader()


def make_run():
    return build("epoch")


def make_twin():
    return build("step")


def seen(*run):
    return fitted(*run).final_percent
