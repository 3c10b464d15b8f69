"""A critic is trained five times ahead of each step of its generator: the first real micro-batches are its own."""

import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
of_generator, of_critic = (torch.optim.RMSprop(net.parameters(), 5e-5) for net in (generator, critic))
for _ in range(12):
    for _ in range(5):
        of_critic.zero_grad()
        (critic(generator(torch.randn(16, 4)).detach()).mean() - critic(torch.randn(16, 2)).mean()).backward()
        of_critic.step()
    of_generator.zero_grad()
    (-critic(generator(torch.randn(16, 4))).mean()).backward()
    of_generator.step()
