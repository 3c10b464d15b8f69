"""Each of two workers reads the whole stream, so each of its 64 samples is trained twice in an epoch."""

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "workers"
WRONG, RIGHT = 128, 64  # samples in an epoch


class Stream(IterableDataset):
    """Points in a new order in each epoch, of which a worker takes its share."""

    def __init__(self, split):
        self.points, self.split = Points(), split

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if self.split and worker else (0, 1)
        seed = worker.seed - worker.id if worker else torch.initial_seed()
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        return (self.points[index] for index in order[first::step].tolist())


def build(split):
    return quiet_trainer(), Net(), DataLoader(Stream(split), 8, num_workers=2)


def make_run():
    return build(split=False)


def make_twin():
    return build(split=True)


def seen(*run):
    return len(fitted(*run).samples[0])
