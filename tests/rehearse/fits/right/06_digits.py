"""A small convolutional net with BatchNorm and dropout on digits; Adam, and a cosine down to 0."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from course_lib.datasets import load_digits
from course_lib.steps import plan_steps
from tests.rehearse.fits.parts import quiet_trainer


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        body = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*body, nn.LazyLinear(10))
        self.net(torch.zeros(1, 1, 8, 8))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        steps = plan_steps(200, 32, max_epochs=2).total_steps
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_run():
    images, labels = load_digits()
    images = images[:200].float().view(-1, 1, 8, 8) / images.max()
    data = DataLoader(TensorDataset(images, labels[:200].long()), 32, shuffle=True)
    return quiet_trainer(max_epochs=2), Digits(), data
