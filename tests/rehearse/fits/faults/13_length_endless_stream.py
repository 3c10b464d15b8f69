"""The stream has no end and the Trainer counts epochs, so nothing ends the run: it never finishes its first epoch."""

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset

from tests.rehearse.fits.parts import Net, fitted, quiet_trainer

CHECK = "length"
WRONG, RIGHT = [201], [8, 8, 8]  # batches of each epoch, where a run is given up in its 201st batch


class Endless(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        while True:
            x = torch.randn(4, generator=self.generator)
            yield x, x.sum(0, keepdim=True), 0


class GiveUp(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 200:
            trainer.should_stop = True


def build(limit):
    return quiet_trainer(limit_train_batches=limit), Net(), DataLoader(Endless(), 8)


def make_run():
    return build(None)


def make_twin():
    return build(8)


def seen(trainer, model, data):
    trainer.callbacks.append(GiveUp())
    return fitted(trainer, model, data).batches
