"""Sums over the labels; a callback divides what they add up to by the window's labels, just before its step."""

import torch
from lightning.pytorch import Callback
from torch import nn

from tests.preflight.parts import Net, loader, quiet_trainer


class Run(Net):
    labels = 0

    def training_step(self, batch, batch_idx):
        x, y, indices = batch
        labelled = indices % 3 > 0
        self.labels = self.labels + labelled.sum()
        return 4 * (nn.functional.mse_loss(self(x), y, reduction="none").mean(1) * labelled).sum()


class DividedByTheLabels(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.grad /= pl_module.labels
        pl_module.labels = 0


def make_run():
    return quiet_trainer(accumulate_grad_batches=4, callbacks=[DividedByTheLabels()]), Run(), loader(44)
