"""What a script does that hangs on its losses: they stand still once, and move against each other in two more."""

from pathlib import Path

import pytest

from rehearse.report import RehearsalReport
from rehearse.script import rehearse_script

HEAD = """
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(96, 8), torch.randint(0, 2, (96,))
loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
held_out = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,))), 8)
net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def loss_of(inputs, labels):
    return nn.functional.cross_entropy(net(inputs), labels)

best = np.inf
"""
LOSSES = """
for epoch in range(8):
    losses = []
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = loss_of(inputs, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
STOPS_EARLY = """
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20 * len(loader))
bad = 0
for epoch in range(20):
    net.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss_of(inputs, labels).backward()
        optimizer.step()
        schedule.step()
    net.eval()
    with torch.no_grad():
        losses = [loss_of(inputs, labels) for inputs, labels in held_out]
        wrong = sum((net(inputs).argmax(1) != labels).sum().item() for inputs, labels in held_out)
    score = SCORE
    if score < best:
        best, bad = score, 0
    else:
        bad += 1
    if bad == 3:
        break
"""


def report_of(folder: Path, text: str) -> RehearsalReport:
    script = folder / "train.py"
    script.write_text(HEAD + text)
    return rehearse_script(script)


def line_of(text: str, part: str) -> str:
    return f"train.py:{(HEAD + text).partition(part)[0].count(chr(10)) + 1}"


SCORES = ["wrong", "torch.stack(losses).mean()", "np.mean([loss.item() for loss in losses])"]


@pytest.mark.thorough
@pytest.mark.parametrize("score", SCORES)
def test_a_run_that_stops_early_leaves_its_horizon_open(score: str, tmp_path: Path):
    """As the losses stand still it ends after four epochs; one of the two ways improves on the first epoch."""
    report = report_of(tmp_path, STOPS_EARLY.replace("SCORE", score))
    assert report.ok is None and not report.findings and report.open == ("horizon",), str(report)
    assert str(report).startswith("Ready, but nobody judged: horizon. ("), str(report)
    why = report.not_judged["horizon"]
    assert why.startswith("how long the run is hangs on a value (train.py:") and "48 optimizer steps, or " in why
    assert any("hangs on its losses" in note and "in place of 48" in note for note in report.notes), report.notes


@pytest.mark.thorough
def test_the_line_at_which_two_rehearsals_part_is_named(tmp_path: Path):
    saves = "    if losses[-1] < best:\n        best = losses[-1]\n        torch.save(net.state_dict(), 'best.pt')\n"
    report = report_of(tmp_path, LOSSES + saves)
    [note] = [note for note in report.notes if "hangs on its losses" in note]
    assert line_of(LOSSES + saves, "        torch.save") in note and "saves in place of" in note, note
    lowers = "    if losses[-1] > best:\n        optimizer.param_groups[0]['lr'] /= 2\n    best = losses[-1]\n"
    report = report_of(tmp_path, LOSSES + lowers)
    assert any("has a rate of 0.05 in place of 0.1" in note for note in report.notes), report.notes


@pytest.mark.thorough
def test_what_hangs_on_no_loss_is_not_named(tmp_path: Path):
    report = report_of(tmp_path, LOSSES + "    print('low' if losses[-1] < 0.5 else 'high', np.mean(losses))\n")
    assert report.ok and not any("hangs on its losses" in note for note in report.notes), str(report)


@pytest.mark.thorough
def test_a_script_that_does_something_else_each_time_is_said_to(tmp_path: Path):
    at_random = "    if random.SystemRandom().random() < 0.5:\n        torch.save(1, 'one')\n"
    report = report_of(tmp_path, LOSSES + at_random)
    assert any("does something else each time that it is run" in note for note in report.notes), str(report)


@pytest.mark.thorough
def test_what_fails_where_losses_stand_still_is_judged_by_others(tmp_path: Path):
    stands_still = LOSSES.replace(
        "        losses.append", "        assert loss.item() not in losses\n        losses.append"
    )
    report = report_of(tmp_path, stands_still)
    assert report.facts["optimizer steps"] == 96 and not report.findings, str(report)
