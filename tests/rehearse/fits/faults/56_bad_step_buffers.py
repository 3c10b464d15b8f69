"""``training_step`` returns ``None`` for a bad batch, and its forward has already put NaN into BatchNorm's buffers."""

import torch
from torch import nn

from course_lib.callbacks import SkipBadSteps
from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "bad_step"
WRONG, RIGHT = False, True  # whether the running mean is finite after a run with one NaN sample


class Run(Net):
    def __init__(self):
        super().__init__()
        self.body.append(nn.BatchNorm1d(8))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.isfinite() else None


def build(callbacks):
    return quiet_trainer(callbacks=callbacks), Run(), loader()


def make_run():
    return build([])


def make_twin():
    return build([SkipBadSteps()])


def seen(trainer, model, data):
    data.dataset.x[20] = torch.nan
    fitted(trainer, model, data)
    return bool(model.body[2].running_mean.isfinite().all())
