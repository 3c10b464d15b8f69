"""A critic whose loss holds the gradient of its score with respect to its input, alone or beside another term."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for _ in range(12):
    optimizer.zero_grad()
    inputs = torch.randn(4, 6, requires_grad=True)
    [gradient] = torch.autograd.grad(critic(inputs).sum(), inputs, create_graph=True)
    loss = ((gradient.norm(dim=1) - 1) ** 2).mean()
    if sys.argv[1] == "beside":
        loss = loss + critic(torch.randn(4, 6)).mean()
    loss.backward()
    optimizer.step()
