"""A classifier with accumulation, a tail, a validation, a schedule by steps and a checkpoint in each epoch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
    model.train()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=4)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    train = TensorDataset(torch.randn(330, 8), torch.randint(0, 3, (330,)))
    test = TensorDataset(torch.randn(50, 8), torch.randint(0, 3, (50,)))
    loader = DataLoader(train, batch_size=16, shuffle=True, num_workers=2)
    test_loader = DataLoader(test, batch_size=25)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    windows = -(-len(loader) // arguments.accumulate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=windows * arguments.epochs)
    best = 0.0
    for epoch in range(arguments.epochs):
        for number, (x, y) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(x), y) / arguments.accumulate
            loss.backward()
            if number % arguments.accumulate == 0 or number == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accuracy = evaluate(model, test_loader)
        best = max(best, accuracy)
        print(f"epoch {epoch}: {accuracy:.3f}, best {best:.3f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")


if __name__ == "__main__":
    main()
