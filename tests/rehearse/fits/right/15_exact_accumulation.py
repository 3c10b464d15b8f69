"""Ragged windows with masked labels, weighed by ``ExactAccumulation``."""

from torch import nn

from course_lib.callbacks import ExactAccumulation
from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class Run(Net):
    """Every fifth sample has no label."""

    def training_step(self, batch, batch_idx):
        x, y, indices = batch
        labelled = indices % 5 != 0
        return nn.functional.mse_loss(self(x[labelled]), y[labelled], reduction="sum"), labelled.sum()


def make_run():
    return quiet_trainer(accumulate_grad_batches=3, callbacks=[ExactAccumulation()]), Run(), loader(61)
