"""The dataset keeps each sample that it has read, and each of two workers fills a cache of its own: twice the data."""

import torch
from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, quiet_trainer

CHECK = "workers"
WRONG, RIGHT = True, False  # whether the two caches hold more samples than there are


class Cached(Points):
    """A sample's third value is how many images the worker holds; an image has 256 KiB."""

    def __init__(self, cached):
        super().__init__()
        self.cached = cached
        self.cache = {}

    def __getitem__(self, index):
        image = self.cache.get(index)
        if image is None:
            image = torch.full((256, 256), float(index))
        if self.cached:
            self.cache[index] = image
        x, y, _ = super().__getitem__(index)
        return x + 0 * image.mean(), y, len(self.cache)


def build(cached):
    data = DataLoader(Cached(cached), 8, shuffle=True, num_workers=2, persistent_workers=True)
    return quiet_trainer(max_epochs=6), Net(), data


def make_run():
    return build(cached=True)


def make_twin():
    return build(cached=False)


def seen(trainer, model, data):
    for _ in range(6):
        batches = [held.max().item() for _, _, held in data]
    return batches[-1] + batches[-2] > 64
