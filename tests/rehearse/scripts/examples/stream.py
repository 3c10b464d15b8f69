"""A stream with two workers that share it out, and a last batch that is short."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, 67, every):
            yield torch.full((4,), float(number)) / 67, torch.tensor([number / 67])


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Numbers(), batch_size=8, num_workers=2)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.l1_loss(model(x), y).backward()
            optimizer.step()
