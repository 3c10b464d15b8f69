"""Two nets against each other, each with its optimizer; two backward passes make one step of the discriminator."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(100, 6)), batch_size=16, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.999))
criterion = nn.BCELoss()
for epoch in range(3):
    for (real,) in loader:
        discriminator.zero_grad()
        label = torch.full((len(real),), 1.0)
        output = discriminator(real).view(-1)
        loss_real = criterion(output, label)
        loss_real.backward()
        fake = generator(torch.randn(len(real), 4))
        label.fill_(0.0)
        output = discriminator(fake.detach()).view(-1)
        loss_fake = criterion(output, label)
        loss_fake.backward()
        of_discriminator.step()
        generator.zero_grad()
        label.fill_(1.0)
        output = discriminator(fake).view(-1)
        loss = criterion(output, label)
        loss.backward()
        of_generator.step()
    with torch.no_grad():
        generator(torch.randn(2, 4))
    torch.save(generator.state_dict(), f"generator_{epoch}.pth")
