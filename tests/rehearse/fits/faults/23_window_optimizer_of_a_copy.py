"""A plain loop trains a copy of the model, and its optimizer was made before: it steps on the other's parameters."""

import copy

import torch

from tests.rehearse.fits.parts import loader, looped, mean_squared_error, plain_net

CHECK = "window"
LOOP = True
WRONG, RIGHT = True, False  # whether the model is as it was


def build(wrap):
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return dict(model=wrap(model), loader=loader(), loss_fn=mean_squared_error, optimizer=optimizer, max_epochs=3)


def make_run():
    return build(copy.deepcopy)


def make_twin():
    return build(lambda model: model)


def seen(**run):
    before = run["model"][0].weight.clone()
    looped(**run)
    return run["model"][0].weight.equal(before)
