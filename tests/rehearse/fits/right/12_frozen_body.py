"""A frozen body, and an optimizer that holds the head alone."""

import torch

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class Run(Net):
    def __init__(self):
        super().__init__()
        self.body.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.05)


def make_run():
    return quiet_trainer(), Run(), loader()
