"""DDP with windows of two under no_sync, a DistributedSampler and its set_epoch; started as torchrun starts it."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
data = TensorDataset(torch.randn(90, 4), torch.randn(90, 1))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=6, sampler=sampler)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader, 1):
        steps = number % 2 == 0 or number == len(loader)
        with contextlib.nullcontext() if steps else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / 2
            loss.backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    total = torch.tensor(float(loss))
    dist.all_reduce(total)
    parts = [None] * world_size
    dist.all_gather_object(parts, {"rank": rank})
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()
dist.destroy_process_group()
