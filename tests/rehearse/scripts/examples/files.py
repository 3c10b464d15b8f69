"""Reads and writes files in many ways, next to what is there already."""

import os
import shutil
import sqlite3
import sys
from pathlib import Path

import torch
from torch import nn

root = Path(sys.argv[1])
os.chdir(root)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).mean().backward()
    optimizer.step()
with open("log.txt", "a") as file:
    file.write("more\n")
assert Path("log.txt").read_text() == "there\nmore\n"
os.makedirs("results/deep", exist_ok=True)
torch.save(model.state_dict(), "results/deep/model.pt")
assert set(torch.load("results/deep/model.pt")) == {"weight", "bias"}
assert os.path.exists("results/deep/model.pt") and Path("results/deep/model.pt").stat().st_size > 0
assert sorted(os.listdir(".")) == ["kept", "log.txt", "old.txt", "results"], os.listdir(".")
assert [path.name for path in root.glob("kept/*")] == ["a.txt"]
os.replace("old.txt", "new.txt")
assert not os.path.exists("old.txt") and (root / "new.txt").read_text() == "old\n"
shutil.rmtree("kept")
assert not os.path.exists("kept/a.txt") and "kept" not in os.listdir(root)
shutil.copy("new.txt", root / "copy.txt")
os.remove("new.txt")
with sqlite3.connect("runs.db") as base:
    base.execute("create table runs (name text)")
assert {name for _, _, names in os.walk(root) for name in names} == {"log.txt", "model.pt", "copy.txt", "runs.db"}
Path.home().joinpath(".rehearse_test").write_text("own")
print("all is as it says")
