"""Two persistent workers that augment with torch's generator, which torch seeds for each worker and each epoch."""

import torch
from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, quiet_trainer


class Noisy(Points):
    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        return x + 0.1 * torch.randn(4), y, index


def make_run():
    data = DataLoader(Noisy(), 8, shuffle=True, num_workers=2, persistent_workers=True)
    return quiet_trainer(), Net(), data
