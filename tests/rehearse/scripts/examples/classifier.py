"""A classifier with accumulation, a tail, a validation, a schedule by steps, checkpoints and a way to resume."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def evaluate(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--resume")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(380, 8), torch.randint(0, 3, (380,)))
    loader = DataLoader(Subset(data, range(330)), batch_size=16, shuffle=True, num_workers=2)
    test_loader = DataLoader(Subset(data, range(330, 380)), batch_size=25)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))
    model[-1] = nn.Linear(16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    windows = -(-len(loader) // arguments.accumulate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=windows * arguments.epochs)
    start, best = 0, 0.0
    if arguments.resume:
        checkpoint = torch.load(arguments.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        start = checkpoint["epoch"]
    for epoch in range(start, arguments.epochs):
        model.train()
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
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        state["schedule"] = schedule.state_dict()
        torch.save(state, "last.pt")


if __name__ == "__main__":
    main()
