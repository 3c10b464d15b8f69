"""Sharpness-aware steps: a first gradient moves the weights away, a second one, from there, is the update."""

import torch
from torch import nn

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class Run(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y, _ = batch
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(x), y))
        with torch.no_grad():
            away = [0.05 * weight.grad for weight in self.parameters()]
            torch._foreach_add_(list(self.parameters()), away)
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(x), y))
        with torch.no_grad():
            torch._foreach_sub_(list(self.parameters()), away)
        optimizer.step()


def make_run():
    return quiet_trainer(), Run(), loader()
