"""The dataset makes its generator once and each worker gets a copy: both draw the same noise, in each epoch."""

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, quiet_trainer

CHECK = "workers"
WRONG, RIGHT = 32, 128  # different draws for 2 × 64 samples


class Noisy(Points):
    """The first number of a sample is drawn."""

    def __init__(self, own):
        super().__init__()
        self.generator = np.random.default_rng(0) if own else None

    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        noise = torch.rand(1).item() if self.generator is None else self.generator.random()
        return torch.cat([torch.tensor([noise], dtype=torch.float32), x[1:]]), y, index


def build(own):
    return quiet_trainer(max_epochs=2), Net(), DataLoader(Noisy(own), 8, shuffle=True, num_workers=2)


def make_run():
    return build(own=True)


def make_twin():
    return build(own=False)


def seen(trainer, model, data):
    return len({value for _ in range(2) for x, _, _ in data for value in x[:, 0].tolist()})
