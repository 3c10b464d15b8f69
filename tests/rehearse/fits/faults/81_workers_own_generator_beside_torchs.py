"""Each worker gets a copy of the dataset's NumPy generator; torch's noise beside it hides that."""

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, quiet_trainer

CHECK = "workers"
WRONG, RIGHT = 16, 32  # different shifts in an epoch of 32 samples


class Augmented(Points):
    def __init__(self, own):
        super().__init__(32)
        self.own = own
        self.generator = np.random.default_rng(1)

    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        shift = self.generator.standard_normal() if self.own else torch.randn(()).item()
        return x + 0.1 * torch.randn(4), y, torch.tensor(shift)


def build(own):
    return quiet_trainer(), Net(), DataLoader(Augmented(own), 8, shuffle=True, num_workers=2)


def make_run():
    return build(True)


def make_twin():
    return build(False)


def seen(trainer, model, data):
    return len({float(shift) for _, _, shifts in data for shift in shifts})
