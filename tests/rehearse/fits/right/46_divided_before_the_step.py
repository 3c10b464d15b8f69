"""Sums over the labels, and a hook that divides what they add up to by the window's labels, just before its step."""

import torch

from tests.rehearse.fits.parts import SummedOverLabels, loader, quiet_trainer


class Run(SummedOverLabels):
    def on_before_optimizer_step(self, optimizer):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.grad /= self.labels
        self.labels = 0


def make_run():
    return quiet_trainer(accumulate_grad_batches=4), Run(), loader(44)
