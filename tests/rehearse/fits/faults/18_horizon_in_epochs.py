"""The horizon counts epochs and the schedule is stepped at each update: the cosine goes down and up four times."""

from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 100, 0  # the rate at the end, in % of its peak


def build(interval):
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 3), interval)
    return quiet_trainer(), model, loader()


def make_run():
    return build("step")


def make_twin():
    return build("epoch")


def seen(*run):
    return fitted(*run).final_percent
