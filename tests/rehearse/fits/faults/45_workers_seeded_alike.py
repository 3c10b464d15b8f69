"""A ``worker_init_fn`` seeds NumPy with a constant, so both workers draw the same noise, and so does each epoch."""

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, quiet_trainer

CHECK = "workers"
WRONG, RIGHT = 32, 128  # different draws for 2 × 64 samples


class Noisy(Points):
    """The first number of a sample is drawn on NumPy's global generator, as many augmentations do."""

    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        noise = torch.tensor([np.random.rand()], dtype=torch.float32)  # noqa: NPY002
        return torch.cat([noise, x[1:]]), y, index


def seed(worker_id):
    np.random.seed(0)  # noqa: NPY002


def build(worker_init_fn):
    data = DataLoader(Noisy(), 8, shuffle=True, num_workers=2, worker_init_fn=worker_init_fn)
    return quiet_trainer(max_epochs=2), Net(), data


def make_run():
    return build(seed)


def make_twin():
    return build(None)


def seen(trainer, model, data):
    return len({value for _ in range(2) for x, _, _ in data for value in x[:, 0].tolist()})
