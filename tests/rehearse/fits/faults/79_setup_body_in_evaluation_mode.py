"""The body was left in evaluation mode, as ``from_pretrained`` does: it is trained, and its dropout never drops."""

import torch
from torch import nn

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "setup"
WRONG, RIGHT = 0, 24  # batches in which something was dropped


class Dropout(nn.Dropout):
    dropped = 0

    def forward(self, x):
        self.dropped += self.training
        return super().forward(x)


class Run(Net):
    def __init__(self, left):
        super().__init__()
        self.body.append(Dropout(0.5))
        self.body.train(not left)


def make_run():
    return quiet_trainer(), Run(left=True), loader()


def make_twin():
    return quiet_trainer(), Run(left=False), loader()


def seen(trainer, model, data):
    torch.manual_seed(0)
    fitted(trainer, model, data)
    return model.body[-1].dropped
