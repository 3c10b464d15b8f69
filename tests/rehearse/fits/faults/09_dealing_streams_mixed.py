"""The batch sampler takes a ``sampler``, as the message asks; the Trainer puts its own in, and the streams are mixed.

Batches are meant to hold 3 of the samples below 48 and 1 of the others.
"""

import torch
from torch.utils.data import BatchSampler, DataLoader

from course_lib.samplers import ShardedBatchSampler
from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "dealing"
RANKS = 2
WRONG, RIGHT = True, False  # whether a rank has batches with another mixture


class TwoStreams(BatchSampler):
    def __init__(self, sampler=None, batch_size=4, drop_last=False):
        super().__init__(range(64) if sampler is None else sampler, batch_size, drop_last)

    def __iter__(self):
        indices = torch.tensor(list(self.sampler))
        first = indices[: len(indices) * 3 // 4].tolist()
        second = indices[len(indices) * 3 // 4 :].tolist()
        for i in range(len(second)):
            yield first[3 * i : 3 * i + 3] + second[i : i + 1]

    def __len__(self):
        return len(self.sampler) // 4


def build(batch_sampler):
    data = DataLoader(Points(), batch_sampler=batch_sampler)
    return quiet_trainer(strategy="ddp", devices=2), Net(), data


def make_run():
    return build(TwoStreams())


def make_twin():
    return build(ShardedBatchSampler(TwoStreams()))


def seen(*run):
    samples = fitted(*run).samples[0]
    batches = [samples[i : i + 4] for i in range(0, len(samples), 4)]
    return any(sum(index < 48 for index in batch) != 3 for batch in batches)
