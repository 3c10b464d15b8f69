"""`training_step` takes the loader's iterator: a window's gradients are zeroed behind its first micro-batch."""

import torch
from torch import nn

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "window"
WRONG, RIGHT = 0.75, 1.0  # the update of the one window; every gradient is 1


class Run(Net):
    """One weight, whose gradient is 1 for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Linear(1, 1, bias=False)

    def training_step(self, batch, batch_idx):
        return self.head(torch.ones(len(batch[0]), 1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class OfIterator(Run):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def make_run():
    return quiet_trainer(max_epochs=1, accumulate_grad_batches=4), OfIterator(), loader(32)


def make_twin():
    return quiet_trainer(max_epochs=1, accumulate_grad_batches=4), Run(), loader(32)


def seen(trainer, model, data):
    before = model.head.weight.item()
    fitted(trainer, model, data)
    return round(before - model.head.weight.item(), 6)
