"""A generator and a discriminator, an optimizer and a step each for every batch; the run is counted in epochs."""

import torch
from lightning.pytorch import LightningModule
from torch import nn

from tests.rehearse.fits.parts import loader, quiet_trainer


class Game(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        real = batch[0]
        of_generator, of_discriminator = self.optimizers()
        made = self.generator(torch.randn(len(real), 2, device=self.device))

        self.toggle_optimizer(of_discriminator)
        of_discriminator.zero_grad()
        logits = torch.cat([self.discriminator(real), self.discriminator(made.detach())])
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        self.manual_backward(nn.functional.binary_cross_entropy_with_logits(logits, truth))
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)

        self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        logits = self.discriminator(made)
        self.manual_backward(nn.functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)))
        of_generator.step()
        self.untoggle_optimizer(of_generator)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.generator, self.discriminator)]


def make_run():
    return quiet_trainer(), Game(), loader()
