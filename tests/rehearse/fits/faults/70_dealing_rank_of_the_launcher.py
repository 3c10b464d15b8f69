"""The ``DistributedSampler`` has the rank of the launching process, made before there were any: both get half 0."""

from torch.utils.data import DataLoader, DistributedSampler

from tests.rehearse.fits.parts import Net, Points, fitted, of_all_ranks, quiet_trainer

CHECK = "dealing"
RANKS = 2
WRONG, RIGHT = 32, 64  # different samples in an epoch, on all ranks


class Run(Net):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def train_dataloader(self):
        rank = self.trainer.global_rank if self.rank is None else self.rank
        return DataLoader(Points(), 8, sampler=DistributedSampler(range(64), 2, rank))


def build(rank):
    return quiet_trainer(strategy="ddp", devices=2, use_distributed_sampler=False), Run(rank), None


def make_run():
    return build(0)


def make_twin():
    return build(None)


def seen(*run):
    return len(set().union(*of_all_ranks(fitted(*run).samples[0])))
