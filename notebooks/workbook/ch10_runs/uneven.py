"""A window of four micro-batches by hand: each counts a quarter, however many labels it holds."""

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from workbook.ch10_runs.parts import Points
from workbook.trainers import quiet_trainer


class Uneven(LightningModule):
    """One weight for each of 16 words, at a rate of 1: what it moves by is what its label counts in the update."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(16))

    @staticmethod
    def labelled(batch):
        """The words of a micro-batch that have a label: one of the first, two of the second, and so on."""
        words = batch[2]
        return words[words % 4 <= words // 4]

    def training_step(self, batch, batch_idx):
        loss = self.weights[self.labelled(batch)].mean()
        self.manual_backward(loss / 4)
        if batch_idx % 4 == 3:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def make_run():
    trainer = quiet_trainer(max_epochs=1, accelerator="cpu")
    return trainer, Uneven(), DataLoader(Points(16), 4)
