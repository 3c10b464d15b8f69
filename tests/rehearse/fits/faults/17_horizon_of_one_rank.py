"""The horizon is that of one device, and two ranks make half as many updates: the rate ends at 50 % and not at 0."""

from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
RANKS = 2
WRONG, RIGHT = 50, 0  # the rate at the end, in % of its peak


def build(ranks):
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 3 * 64 // (8 * ranks)))
    return quiet_trainer(strategy="ddp", devices=2), model, loader()


def make_run():
    return build(1)


def make_twin():
    return build(2)


def seen(*run):
    return fitted(*run).final_percent
