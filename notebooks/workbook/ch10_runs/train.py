"""An ordinary loop that trains without a complaint: 2,000 points, windows of four, a cosine."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, WINDOW = 20, 4

torch.manual_seed(0)
x = torch.randn(2000, 20)
data = TensorDataset(x, x @ torch.randn(20, 1))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

for epoch in range(EPOCHS):
    for i, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets) / WINDOW
        loss.backward()
        if (i + 1) % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    print(epoch, loss.item())
