"""The loader is made again in each epoch, with a generator of the same seed: from the second on, one order."""

import torch
from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "order"
WRONG, RIGHT = 2, 4  # different orders in four epochs; a Trainer asks the first loader for two


class Run(Net):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(7 + self.factor * self.trainer.current_epoch)
        return DataLoader(Points(), 8, shuffle=True, generator=generator)


def build(factor):
    return quiet_trainer(max_epochs=4, reload_dataloaders_every_n_epochs=1), Run(factor), None


def make_run():
    return build(0)


def make_twin():
    return build(1)


def seen(*run):
    return len(set(map(tuple, fitted(*run).samples)))
