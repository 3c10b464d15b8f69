"""Both kinds of gradient checkpointing, within a model and around a part of it in the loop."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Deep(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(60, 8), torch.randn(60, 1)), batch_size=8)
bodies = nn.ModuleList([Deep(True), Deep(False)])
head = nn.Linear(8, 1)
optimizer = torch.optim.Adam([*bodies.parameters(), *head.parameters()], lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        inner = bodies[0](x)
        inner = checkpoint(bodies[1], inner, use_reentrant=True)
        inner = checkpoint(bodies[1], inner, use_reentrant=False)
        nn.functional.mse_loss(head(inner), y).backward()
        optimizer.step()
    schedule.step()
