"""An epoch's last batch holds one sample, of which BatchNorm has no variance: the fit dies there."""

import contextlib

from torch import nn

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "setup"
WRONG, RIGHT = 0, 3  # epochs that were trained


class Run(Net):
    def __init__(self):
        super().__init__()
        self.body.append(nn.BatchNorm1d(8))


def make_run():
    return quiet_trainer(), Run(), loader(65)


def make_twin():
    return quiet_trainer(), Run(), loader(65, drop_last=True)


def seen(trainer, model, data):
    with contextlib.suppress(ValueError):
        fitted(trainer, model, data)
    return trainer.current_epoch
