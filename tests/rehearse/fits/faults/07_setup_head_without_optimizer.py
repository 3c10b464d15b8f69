"""The optimizer was given the body alone, so the head keeps its first, random weights for the whole run."""

import torch

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "setup"
WRONG, RIGHT = True, False  # whether the head is as it was


class Run(Net):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def configure_optimizers(self):
        return torch.optim.SGD(self.get_submodule(self.part).parameters(), lr=0.05)


def make_run():
    return quiet_trainer(), Run("body"), loader()


def make_twin():
    return quiet_trainer(), Run(""), loader()


def seen(trainer, model, data):
    before = model.head.weight.clone()
    fitted(trainer, model, data)
    return model.head.weight.equal(before)
