"""Models that show what a sample, or a window, weighs in an update."""

import torch
from lightning.pytorch import Callback
from torch import nn

from tests.rehearse.fits.parts import Net, fitted


class WeighedSamples(Net):
    """One weight for each sample, and a rate of 1: what a weight changes by is what its sample counts in the update."""

    def __init__(self, n, exact):
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Identity()
        self.weights = nn.Parameter(torch.zeros(n))
        self.exact = exact

    def labelled(self, indices):
        return indices

    def training_step(self, batch, batch_idx):
        indices = self.labelled(batch[2])
        loss_sum = self.weights[indices].sum()
        return (loss_sum, len(indices)) if self.exact else loss_sum / len(indices)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def heaviest_to_lightest(self):
        weights = -self.weights.detach()
        weights = weights[weights > 0]
        return round((weights.max() / weights.min()).item(), 4)


class ByHand(Net):
    """Manual optimization of one weight, whose gradient is 1 for each sample, at a rate of 1."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.body, self.head = nn.Identity(), nn.Linear(1, 1, bias=False)

    def mean_loss(self, batch):
        return self.head(torch.ones(len(batch[0]), 1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Updates(Callback):
    """By how much each update lowers the weight of a ByHand."""

    def __init__(self, model):
        self.weight = model.head.weight
        self.before = self.weight.item()
        self.sizes = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.weight.item() != self.before:
            self.sizes.append(round(self.before - self.weight.item(), 4))
            self.before = self.weight.item()


def updates(trainer, model, data):
    """What each update of a fit takes from the weight."""
    callback = Updates(model)
    trainer.callbacks.append(callback)
    fitted(trainer, model, data)
    return callback.sizes
