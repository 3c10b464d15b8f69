"""A plain loop's loss function keeps the losses for a curve, each with its graph and activations."""

import torch

from tests.rehearse.fits.parts import loader, looped, mean_squared_error, plain_net

CHECK = "growth"
LOOP = True
WRONG, RIGHT = 24, 0  # graphs that the history holds


class Kept:
    """The loss, with or without a history."""

    def __init__(self, keep):
        self.keep = keep
        self.history = []

    def __call__(self, model, batch):
        loss = mean_squared_error(model, batch)
        self.history = [*self.history, loss] if self.keep else []
        return loss


def build(keep):
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return dict(model=model, loader=loader(), loss_fn=Kept(keep), optimizer=optimizer, max_epochs=3)


def make_run():
    return build(True)


def make_twin():
    return build(False)


def seen(**run):
    looped(**run)
    return sum(loss.grad_fn is not None for loss in run["loss_fn"].history)
