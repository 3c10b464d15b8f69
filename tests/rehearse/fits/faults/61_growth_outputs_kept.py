"""A callback keeps the outputs of every batch and nobody empties the list: it grows until the run ends."""

import torch
from lightning.pytorch import Callback

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "growth"
WRONG, RIGHT = 24, 1  # batches of which the outputs are held


class Outputs(Callback):
    def __init__(self, keep_all):
        self.keep_all = keep_all
        self.held = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            prediction = pl_module(batch[0])
        self.held = [*self.held, prediction] if self.keep_all else [prediction]


def build(keep_all):
    return quiet_trainer(callbacks=[Outputs(keep_all)]), Net(), loader()


def make_run():
    return build(keep_all=True)


def make_twin():
    return build(keep_all=False)


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return len(trainer.callbacks[0].held)
