"""Layers that are trained one after the other, each by its own optimizer and by a method that is not ``__call__``."""

import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Linear(4, 4), nn.Linear(4, 1)]
optimizers = [torch.optim.Adam(layer.parameters(), lr=0.01) for layer in layers]
x = torch.randn(32, 4)

for layer, optimizer in zip(layers, optimizers, strict=True):
    for _ in range(10):
        loss = layer.forward(x).relu().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = layer.forward(x).detach()
