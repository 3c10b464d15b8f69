"""A data module with ``setup`` and a random split, and a run of a fixed number of steps."""

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, random_split

from tests.rehearse.fits.parts import Net, Points, quiet_trainer


class Data(LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        self.training, self.held_out = random_split(Points(80), [64, 16], generator)

    def train_dataloader(self):
        return DataLoader(self.training, 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, 8)


class Run(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx))


def make_run():
    return quiet_trainer(max_steps=20), Run(), Data()
