"""The module gives each of two ranks its half, and the Trainer's sampler halves it again: 32 of 64 are unread."""

from torch.utils.data import DataLoader, Subset

from tests.rehearse.fits.parts import Net, Points, fitted, of_all_ranks, quiet_trainer

CHECK = "dealing"
RANKS = 2
WRONG, RIGHT = 32, 64  # different samples in an epoch, on all ranks


class Run(Net):
    def train_dataloader(self):
        own = range(self.trainer.global_rank, 64, self.trainer.world_size)
        return DataLoader(Subset(Points(), own), 8, shuffle=True)


def build(use_distributed_sampler):
    trainer = quiet_trainer(strategy="ddp", devices=2, use_distributed_sampler=use_distributed_sampler)
    return trainer, Run(), None


def make_run():
    return build(True)


def make_twin():
    return build(False)


def seen(*run):
    return len(set().union(*of_all_ranks(fitted(*run).samples[0])))
