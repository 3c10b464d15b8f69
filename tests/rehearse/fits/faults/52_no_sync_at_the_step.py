"""``no_sync`` is left off on a window's first batch and put on its last, so the ranks step with different gradients."""

from contextlib import nullcontext

from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

from tests.rehearse.fits.parts import Net, fitted, loader, of_all_ranks, quiet_trainer

CHECK = "no_sync"
RANKS = 2
WRONG, RIGHT = 2, 1  # different weights on two ranks


class Run(Net):
    """Windows of four, by hand; the gradients are to be averaged in the n-th batch of each."""

    def __init__(self, synced):
        super().__init__()
        self.automatic_optimization = False
        self.synced = synced

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y, _ = batch
        strategy = self.trainer.strategy
        parallel = isinstance(strategy, ParallelStrategy)
        silent = parallel and batch_idx % 4 != self.synced
        with strategy.block_backward_sync() if silent else nullcontext():
            self.manual_backward(nn.functional.mse_loss(self(x), y) / 4)
        if batch_idx % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def build(synced):
    return quiet_trainer(strategy="ddp", devices=2), Run(synced), loader()


def make_run():
    return build(0)


def make_twin():
    return build(3)


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return len(set(of_all_ranks(model.head.bias.item())))
