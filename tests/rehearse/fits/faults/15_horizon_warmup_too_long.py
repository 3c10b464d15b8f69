"""The warm-up takes 100 updates and the run has 24, so the rate never gets above 24 % of what was asked for."""

from torch.optim.lr_scheduler import LambdaLR

from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 24, 100  # the highest rate, in % of the optimizer's


def build(warmup):
    model = Scheduled(lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / warmup)))
    return quiet_trainer(), model, loader()


def make_run():
    return build(100)


def make_twin():
    return build(8)


def seen(*run):
    return round(100 * max(fitted(*run).rates) / 0.05)
