"""A discriminator trained on two losses of half the weight, five times for each step of the generator."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.rehearse.fits.parts import loader, quiet_trainer, script

Game = script("right", "08_two_networks").Game


class Turns(Game):
    def training_step(self, batch, batch_idx):
        real = batch[0]
        of_generator, of_discriminator = self.optimizers()
        made = self.generator(torch.randn(len(real), 2, device=self.device))
        of_discriminator.zero_grad()
        for samples, truth in ((real, torch.ones(len(real), 1)), (made.detach(), torch.zeros(len(real), 1))):
            self.manual_backward(0.5 * binary_cross_entropy_with_logits(self.discriminator(samples), truth))
        of_discriminator.step()
        if batch_idx % 5 == 0:
            of_generator.zero_grad()
            self.manual_backward(nn.functional.softplus(-self.discriminator(made)).mean())
            of_generator.step()


def make_run():
    return quiet_trainer(), Turns(), loader()
