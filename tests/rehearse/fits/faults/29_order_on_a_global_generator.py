"""Each rank takes its half of an order that it draws on the global generator, which differs between the two ranks."""

import torch
from torch.utils.data import DataLoader, Sampler

from tests.rehearse.fits.parts import Net, Points, fitted, of_all_ranks, quiet_trainer, rank_and_world

CHECK = "order"
RANKS = 2
WRONG, RIGHT = False, True  # whether all 64 samples are trained in an epoch


class Halved(Sampler):
    def __init__(self, own):
        self.own = torch.Generator() if own else None
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rank, world = rank_and_world()
        generator = self.own.manual_seed(self.epoch) if self.own else None
        return iter(torch.randperm(64, generator=generator)[rank::world].tolist())

    def __len__(self):
        return 64 // rank_and_world()[1]


def build(own):
    data = DataLoader(Points(), 8, sampler=Halved(own))
    return quiet_trainer(strategy="ddp", devices=2, use_distributed_sampler=False), Net(), data


def make_run():
    return build(own=False)


def make_twin():
    return build(own=True)


def seen(*run):
    torch.manual_seed(rank_and_world()[0])
    return len(set().union(*of_all_ranks(fitted(*run).samples[0]))) == 64
