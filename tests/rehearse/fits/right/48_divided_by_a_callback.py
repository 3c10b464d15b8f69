"""Sums over the labels; a callback divides what they add up to by the window's labels, just before its step."""

import torch
from lightning.pytorch import Callback

from tests.rehearse.fits.parts import SummedOverLabels, loader, quiet_trainer


class DividedByTheLabels(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.grad /= pl_module.labels
        pl_module.labels = 0


def make_run():
    return quiet_trainer(accumulate_grad_batches=4, callbacks=[DividedByTheLabels()]), SummedOverLabels(), loader(44)
