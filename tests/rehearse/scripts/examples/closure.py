"""LBFGS, whose step takes a closure and calls it as often as it likes."""

import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(64, 4).double(), torch.randn(64, 1).double()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=4, tolerance_grad=0, tolerance_change=0)
for step in range(12):

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        print(step, nn.functional.mse_loss(model(x), y).item())
