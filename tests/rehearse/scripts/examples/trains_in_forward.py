"""A module that trains its network in its own forward, as meta-learners do."""

import torch
from torch import nn


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def forward(self, inputs, passes=2):
        for _ in range(passes):
            self.optimizer.zero_grad()
            loss = self.net(inputs).pow(2).mean()
            loss.backward()
            self.optimizer.step()
        return loss.item()


torch.manual_seed(0)
learner = Learner()
for _ in range(25):
    learner(torch.randn(8, 3))
