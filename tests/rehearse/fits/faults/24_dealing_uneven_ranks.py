"""Nine batches are dealt to two ranks, five and four: the rank with one more waits for the other, and hangs."""

from torch.utils.data import BatchSampler, DataLoader

from course_lib.samplers import ShardedBatchSampler
from tests.rehearse.fits.parts import Net, Points, of_all_ranks, quiet_trainer, rank_and_world

CHECK = "dealing"
RANKS = 2
WRONG, RIGHT = [5, 4], [5, 5]  # batches of each rank


class Dealt:
    """Each rank takes every second batch."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        rank, world = rank_and_world()
        return iter(list(self.batch_sampler)[rank::world])

    def __len__(self):
        rank, world = rank_and_world()
        return len(range(rank, len(self.batch_sampler), world))


def build(deal):
    data = DataLoader(Points(36), batch_sampler=deal(BatchSampler(range(36), 4, drop_last=False)))
    return quiet_trainer(strategy="ddp", devices=2, use_distributed_sampler=False), Net(), data


def make_run():
    return build(Dealt)


def make_twin():
    return build(ShardedBatchSampler)


def seen(trainer, model, data):
    return of_all_ranks(len(list(data)))  # a fit would hang
