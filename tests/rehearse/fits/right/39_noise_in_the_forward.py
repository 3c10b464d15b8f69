"""A variational autoencoder, whose forward draws noise, in windows of four micro-batches."""

import torch
from torch import nn

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class Variational(Net):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)

    def training_step(self, batch, batch_idx):
        x, _, _ = batch
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return nn.functional.mse_loss(self.decoder(z), x) + 0.1 * (mean**2 + log_variance.exp() - log_variance).mean()

    def configure_optimizers(self):
        return torch.optim.SGD([*self.encoder.parameters(), *self.decoder.parameters()], lr=0.05)


def make_run():
    return quiet_trainer(accumulate_grad_batches=4), Variational(), loader()
