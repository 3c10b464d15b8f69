"""Lightning's fine-tuning callback: the body is frozen for an epoch, and then gets a group of the optimizer."""

import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class Run(Net):
    """Its body goes by the name that the callback looks for."""

    def __init__(self):
        super().__init__()
        self.backbone, self.body = self.body, nn.Identity()

    def forward(self, x):
        return self.head(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.05)


def make_run():
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0)
    return quiet_trainer(callbacks=[callback]), Run(), loader()
