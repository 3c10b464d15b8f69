"""A Trainer divides by 4 whatever a window holds: the last two batches are a window, with half of their weight."""

import torch
from torch import nn

from course_lib.callbacks import ExactAccumulation
from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "window"
WRONG, RIGHT = 0.5, 1.0  # the last update of an epoch, as a share of the right one; every gradient is 1


class Run(Net):
    """One weight, whose gradient is 1 for each sample."""

    def __init__(self, exact):
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Linear(1, 1, bias=False)
        self.exact = exact

    def training_step(self, batch, batch_idx):
        loss_sum = self.head(torch.ones(len(batch[0]), 1)).sum()
        return (loss_sum, len(batch[0])) if self.exact else loss_sum / len(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def build(exact):
    callbacks = [ExactAccumulation()] if exact else []
    return quiet_trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=callbacks), Run(exact), loader(48)


def make_run():
    return build(False)


def make_twin():
    return build(True)


def seen(trainer, model, data):
    before = model.head.weight.item()
    fitted(trainer, model, data)
    return round(before - model.head.weight.item() - 1, 6)  # the first window's update is 1
