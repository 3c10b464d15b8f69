"""Batches a second: MiniDataLoader against torch's DataLoader, over the same samples in the same run."""

import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from course_lib.loader import MiniDataLoader

BATCH_SIZE, SERIES, ROUNDS = 16, 5, 8


class Light(Dataset):
    """A row of a tensor in memory."""

    def __init__(self, samples=2000, side=8):
        self.images = torch.randn(min(samples, 256), 3, side, side, generator=torch.Generator().manual_seed(0))
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return self.images[index % len(self.images)], index


class Medium(Light):
    """Two operations on an image of 64 × 64."""

    def __init__(self):
        super().__init__(samples=1000, side=64)

    def __getitem__(self, index):
        image, index = super().__getitem__(index)
        return (image * 2 + 1).roll(3, 1), index


class Heavy(Light):
    """Milliseconds of the CPU a sample."""

    def __init__(self):
        super().__init__(samples=160, side=64)

    def __getitem__(self, index):
        image, index = super().__getitem__(index)
        for _ in range(15):
            image = F.avg_pool2d(image[None], 3, 1, 1)[0]
        return image, index


def batches_per_second(loader):
    begin = time.perf_counter()
    count = sum(1 for _ in loader)
    return count / (time.perf_counter() - begin)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Light, Medium, Heavy])
def test_batches_come_as_fast_as_from_torch(kind, workers):
    options = {"batch_size": BATCH_SIZE, "num_workers": workers, "persistent_workers": workers > 0}
    loaders = [cls(kind(), **options) for cls in (MiniDataLoader, DataLoader)]
    for loader in loaders:
        batches_per_second(loader)  # starts the workers
    series = []
    while len(series) < SERIES and not any(ratio >= 0.95 for ratio, *_ in series):
        speeds = {0: [], 1: []}
        for i in range(ROUNDS):  # each is the first in turn
            for which in (0, 1) if i % 2 else (1, 0):
                speeds[which].append(batches_per_second(loaders[which]))
        ratio = statistics.median(ours / its for ours, its in zip(speeds[0], speeds[1], strict=True))
        series.append((ratio, *(statistics.median(speeds[which]) for which in (0, 1))))
    ratio, ours, its = max(series)  # what else the machine does disturbs one series more than another
    print(f"\n{kind.__name__.lower()}, {workers} workers: ours {ours:,.0f}, torch's {its:,.0f} batches/s: {ratio:.2f}")
    assert ratio >= 0.95
