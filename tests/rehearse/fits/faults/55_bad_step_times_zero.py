"""A loss that is not finite is multiplied by 0 to skip its step; 0 · NaN is NaN, and all weights become NaN."""

import torch

from course_lib.callbacks import SkipBadSteps
from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "bad_step"
WRONG, RIGHT = False, True  # whether the weights are finite after a run with one NaN sample


class Run(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.isfinite() else loss * 0


def build(callbacks):
    return quiet_trainer(callbacks=callbacks), Run(), loader()


def make_run():
    return build([])


def make_twin():
    return build([SkipBadSteps()])


def seen(trainer, model, data):
    data.dataset.x[20] = torch.nan
    fitted(trainer, model, data)
    return bool(model.head.weight.isfinite().all())
