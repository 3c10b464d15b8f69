"""A compiled model, batches made by hand, rates set by hand, and an evaluation before the first step."""

import math

import torch
from torch import nn

torch.manual_seed(0)
tokens = torch.randint(0, 50, (2000,))
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch():
    starts = torch.randint(len(tokens) - 9, (4,))
    window = torch.stack([tokens[start : start + 9] for start in starts])
    return window[:, :-1], window[:, 1:]


@torch.no_grad()
def evaluate():
    compiled.eval()
    losses = torch.zeros(5)
    for number in range(5):
        x, y = batch()
        losses[number] = nn.functional.cross_entropy(compiled(x).flatten(0, 1), y.flatten()).item()
    compiled.train()
    return losses.mean()


best = 1e9
for step in range(41):
    rate = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 40))
    for group in optimizer.param_groups:
        group["lr"] = rate
    if step % 10 == 0:
        loss = evaluate()
        best = min(best, loss)
        torch.save({"model": model.state_dict(), "step": step}, "last.pt")
    for _ in range(3):
        x, y = batch()
        loss = nn.functional.cross_entropy(compiled(x).flatten(0, 1), y.flatten()) / 3
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
