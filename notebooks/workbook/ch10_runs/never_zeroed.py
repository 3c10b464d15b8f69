"""A run that steps by hand and never zeroes its gradients: each update applies those of all batches so far."""

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from workbook.ch10_runs.parts import Points
from workbook.trainers import quiet_trainer


class NeverZeroed(LightningModule):
    """One number, and a loss whose gradient is 1 for every batch."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.number + 0 * batch[0].sum())
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def make_run():
    trainer = quiet_trainer(max_epochs=3, accelerator="cpu")
    return trainer, NeverZeroed(), DataLoader(Points(64), 8, shuffle=True)
