"""Several schedules at once: by step and by epoch, in sequence, chained, and one that follows a metric."""

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), batch_size=None, shuffle=True)
models = [nn.Linear(4, 1) for _ in range(4)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
per_step = [
    lr_scheduler.OneCycleLR(optimizers[0], 0.1, total_steps=80),
    lr_scheduler.SequentialLR(
        optimizers[1],
        [lr_scheduler.LinearLR(optimizers[1], 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(optimizers[1], 70)],
        milestones=[10],
    ),
]
per_epoch = [
    lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizers[2], 1), lr_scheduler.ConstantLR(optimizers[2])])
]
plateau = lr_scheduler.ReduceLROnPlateau(optimizers[3])
for _ in range(2):
    for x, y in loader:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        for schedule in per_step:
            schedule.step()
    for schedule in per_epoch:
        schedule.step()
    plateau.step(1.0)
