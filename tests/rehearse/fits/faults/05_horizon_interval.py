"""The horizon counts updates, but Lightning steps a schedule once an epoch unless told: the rate ends at 96 %."""

from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 96, 0  # the rate at the end, in % of its peak


def build(interval):
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 3 * 8), interval)
    return quiet_trainer(), model, loader()


def make_run():
    return build("epoch")


def make_twin():
    return build("step")


def seen(*run):
    return fitted(*run).final_percent
