"""Two optimizers both count in ``global_step``, so ``max_steps=24`` ends a run of 24 batches after 12."""

import torch
from torch import nn

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "setup"
WRONG, RIGHT = 12, 24  # batches


class Run(Net):
    """Its two optimizers step on each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        body, head = self.optimizers()
        body.zero_grad()
        head.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(x), y))
        body.step()
        head.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.body, self.head)]


def build(max_steps):
    return quiet_trainer(max_epochs=3, max_steps=max_steps), Run(), loader()


def make_run():
    return build(3 * 8)


def make_twin():
    return build(3 * 8 * 2)


def seen(*run):
    return sum(fitted(*run).batches)
