"""Sharpness-aware minimisation as it is usually written: two passes and two steps, the first of them by hand."""

import sys

import torch
from torch import nn


class TwoSteps(torch.optim.Optimizer):
    def __init__(self, parameters, base, **options):
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.clone()
                parameter.add_(parameter.grad, alpha=0.01)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["before"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = TwoSteps(model.parameters(), torch.optim.SGD, lr=0.1)


def backward(x):
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


for _ in range(20):
    x = torch.randn(8, 4)
    backward(x)
    if sys.argv[1] == "step":
        optimizer.step(lambda x=x: backward(x))
    else:
        optimizer.first_step()
        backward(x)
        optimizer.second_step()
