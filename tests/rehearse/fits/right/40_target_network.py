"""A target that the module's own code copies from the net every 100 steps, and a teacher that follows it slowly."""

import copy

import torch
from torch import nn

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class Targets(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.target, self.teacher = copy.deepcopy(self.net), copy.deepcopy(self.net)

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        if self.global_step % 100 == 0:
            self.target.load_state_dict(self.net.state_dict())
        with torch.no_grad():
            aim = y + 0.1 * self.target(x) + 0.1 * self.teacher(x)
        return nn.functional.mse_loss(self.net(x), aim)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data = 0.99 * slow.data + 0.01 * fast.data

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


def make_run():
    return quiet_trainer(), Targets(), loader()
