"""``limit_train_batches=1`` was meant as "all of them" and means one batch: 8 of 64 samples are trained in an epoch."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "length"
WRONG, RIGHT = 8, 64  # samples in an epoch


def build(limit):
    return quiet_trainer(limit_train_batches=limit), Net(), loader()


def make_run():
    return build(1)


def make_twin():
    return build(1.0)


def seen(*run):
    return len(fitted(*run).samples[0])
