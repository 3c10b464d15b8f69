"""A loop over a stream that has no end, loaded by a worker."""

import torch
from torch.utils.data import DataLoader, IterableDataset


class Ones(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(2)


model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Ones(), batch_size=4, num_workers=1):
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
