"""A plain loop with windows of four plans its one-cycle schedule for the batches, and ends while the rate rises."""

import torch
from torch.optim.lr_scheduler import OneCycleLR

from tests.rehearse.fits.parts import loader, looped, mean_squared_error, plain_net

CHECK = "horizon"
LOOP = True
WRONG, RIGHT = 100, 0  # the rate at the end, in % of its peak


def build(horizon):
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return dict(
        model=model,
        loader=loader(),
        loss_fn=mean_squared_error,
        optimizer=optimizer,
        scheduler=OneCycleLR(optimizer, max_lr=0.05, total_steps=horizon),
        accumulate_grad_batches=4,
        max_epochs=3,
    )


def make_run():
    return build(3 * 8)


def make_twin():
    return build(3 * 8 // 4 + 1)  # torch counts the state before the first update as a step


def seen(**run):
    return looped(**run).final_percent
