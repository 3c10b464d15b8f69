"""The split into training and validation is drawn twice, with two seeds: most of the validation is trained."""

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, random_split

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "dealing"
WRONG, RIGHT = 14, 0  # samples of the validation that are trained


class Run(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().training_step(batch, batch_idx))


class Data(LightningDataModule):
    def __init__(self, seeds):
        super().__init__()
        self.seeds = seeds

    def split(self, seed):
        return random_split(Points(80), [64, 16], torch.Generator().manual_seed(seed))

    def train_dataloader(self):
        return DataLoader(self.split(self.seeds[0])[0], 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.split(self.seeds[1])[1], 8)


def make_run():
    return quiet_trainer(), Run(), Data((1, 2))


def make_twin():
    return quiet_trainer(), Run(), Data((1, 1))


def seen(trainer, model, data):
    validated = {int(index) for batch in data.val_dataloader() for index in batch[2]}
    return len(validated & {index for epoch in fitted(trainer, model, data).samples for index in epoch})
