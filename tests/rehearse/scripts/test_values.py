"""Lines that go by the value of a loss: NumPy's, those of a run that stops early, and what is computed of one."""

import subprocess
import sys
from pathlib import Path

import pytest

from rehearse.report import RehearsalReport
from rehearse.script import rehearse_script
from tests.effort import cases

HEAD = """
import collections
import numpy as np
import torch
from numpy import average, less
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(96, 8), torch.randint(0, 2, (96,))
loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
held_out = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,))), 8)
by_another_name, mean_of = less, np.mean
net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def loss_of(inputs, labels):
    return nn.functional.cross_entropy(net(inputs), labels)

"""
LOSSES = """
for epoch in range(8):
    losses, right, left = [], [], []
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = loss_of(inputs, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        right.append((net(inputs).argmax(1) == labels).sum().item())
        left.append(loss.detach().cpu().numpy())
"""
STOPS_EARLY = """
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20 * len(loader))
best, bad = np.inf, 0
for epoch in range(20):
    net.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss_of(inputs, labels).backward()
        optimizer.step()
        schedule.step()
    net.eval()
    with torch.no_grad():
        losses = [loss_of(inputs, labels).item() for inputs, labels in held_out]
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


@pytest.mark.thorough
def test_what_is_computed_of_a_held_number_is_what_it_would_be_without():
    command = [sys.executable, "-m", "tests.rehearse.scripts.held_search", str(cases(quick=300, thorough=20_000)), "7"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "all as they are without held numbers" in run.stdout, run.stdout + run.stderr


@pytest.mark.thorough
def test_a_line_that_goes_by_losses_is_named_where_numpy_has_put_them_together(tmp_path: Path):
    asked = [
        *("np.mean(losses) < -1.5", "average(losses) < -1.5", "np.array(losses).mean() < -1.5", "np.sum(right) < -1"),
        *("np.isnan(losses).any()", "not np.isfinite(losses[-1])", "np.allclose(losses, 9)", "left[-1] < -1.5"),
        *("np.mean(left) < -1.5", "np.min([losses, losses]) < -1.5", "np.float64(2.0) * losses[0] < -1.5"),
        *("np.argmin(losses) > 99", "max(np.array(losses)) < -1.5", "np.round(np.mean(losses), 3) < -1.5"),
        *("loss_of(x, y).detach().repeat(2).numpy()[0] < -1.5", "np.mean(collections.deque(losses)) < -1.5"),
        *("(loss.detach().repeat(3) > -1.5).numpy().sum() < 3",),
        *("np.linalg.norm(np.array(losses) - 1) < -1.5", "np.float32(losses[0]) + 1 < -1.5"),
        *("by_another_name(losses[0], -1.5)", "dict(op=np.less)['op'](losses[0], -1.5)", "mean_of(losses) < -1.5"),
    ]
    notes = " ".join(report_of(tmp_path, LOSSES + "".join(f"    if {one}: break\n" for one in asked)).notes)
    first = (HEAD + LOSSES).count("\n") + 1
    for line in range(first, first + len(asked)):
        assert f"train.py:{line}" in notes, (asked[line - first], notes)


@pytest.mark.thorough
@pytest.mark.parametrize("score", ["sum(losses) / len(losses)", "np.mean(losses)", "np.array(losses).mean()"])
def test_a_run_that_stops_early_has_a_schedule_for_all_of_its_epochs(score: str, tmp_path: Path):
    report = report_of(tmp_path, STOPS_EARLY.replace("SCORE", score))
    assert report.ok and not report.findings, str(report)
    line = (HEAD + STOPS_EARLY.partition("    if score")[0]).count("\n") + 1
    says = f"how long the run is hangs on a value, by train.py:{line}: 48 optimizer steps, or 240 with the other answer"
    assert report.not_judged["horizon"] == says
    with_it = "answering False (3 times) and True (1 time); with True each time: 240 micro-batches in place of 48"
    assert any(with_it in note for note in report.notes), report.notes


ALL_KINDS_OF_NAMES = """
import copy
import pickle
from dataclasses import dataclass


@dataclass
class EarlyStopping:
    is_better: object = np.less
    best: float = np.inf
    kind: np.dtype = np.float32
    patience: int = 1
    waited: int = 0

    def ends(self, score: np.ndarray, least: float = np.finfo(np.float32).eps) -> np.bool_:
        match self.kind:
            case np.float32:
                ...
            case _:
                raise TypeError(self.kind)
        if self.is_better == np.greater:
            least = -least
        if self.is_better(score + least, self.best):
            self.best, self.waited = score, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


stopping, added = EarlyStopping(), np.add.reduce
assert stopping.is_better is less is np.less and less.nin == 2 and isinstance(np.zeros(2, np.float32), np.ndarray)
assert pickle.loads(pickle.dumps(less)) == copy.deepcopy(less) == less and {less: 1}[np.less] == 1
assert added([1, 2]) == 3 and list(map(np.sqrt, [4.0])) == [2.0] and np.vectorize(less)([1], 2)[0]
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for epoch in range(20):
    losses = []
    for inputs, labels in loader:
        loss = loss_of(inputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    schedule.step()
    if stopping.ends(sum(losses) / len(losses) - (epoch == 1)):
        break
"""


@pytest.mark.thorough
def test_a_function_of_numpy_by_another_name_is_seen_and_both_answers_are_played(tmp_path: Path):
    """The second score is the best here, and the third is not: with the rarer answer the run would be shorter still."""
    subprocess.run([sys.executable, "-c", HEAD + ALL_KINDS_OF_NAMES], check=True, timeout=120)
    report = report_of(tmp_path, ALL_KINDS_OF_NAMES)
    line = (HEAD + ALL_KINDS_OF_NAMES.partition("        if self.is_better(")[0]).count("\n") + 1
    told = [
        note for note in report.notes if note.startswith(f"These counts hold while train.py:{line} goes on answering")
    ]
    assert len(told) == 1, str(report)  # when the lapse begins, and so how often it has answered, is the machine's
    assert "; with True each time: 240 micro-batches in place of 36" in told[0]
    assert "; with False each time:" in told[0]
    assert report.ok and "36 optimizer steps, or 240 with the other answer" in report.not_judged["horizon"]


@pytest.mark.thorough
def test_a_line_that_ends_a_run_is_found_behind_others_that_do_not(tmp_path: Path):
    score = "sum(losses) / len(losses)"
    watched = "".join(f"    if losses[0] > {99 + bound}: print('high')\n" for bound in range(7))
    report = report_of(tmp_path, STOPS_EARLY.replace("    score = SCORE\n", f"{watched}    score = {score}\n"))
    assert report.ok and not report.findings and "240 with the other answer" in report.not_judged["horizon"]


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["losses[-1]", "np.mean(losses)"])
def test_a_line_that_lowers_the_rate_by_a_loss_is_named(loss: str, tmp_path: Path):
    lowered = f"    if {loss} < -1.5:\n        optimizer.param_groups[0]['lr'] /= 2\n"
    report = report_of(tmp_path, LOSSES + lowered)
    line = (HEAD + LOSSES).count("\n") + 1
    says = f"train.py:{line} goes on answering False (8 times); with the other answer: optimizer step 13 has a rate of"
    assert any(f"{says} 0.05 in place of 0.1" in note for note in report.notes), report.notes


@pytest.mark.thorough
def test_a_line_that_prints_by_a_loss_is_not_named(tmp_path: Path):
    report = report_of(tmp_path, LOSSES + "    if losses[-1] < -1.5:\n        print('low')\n")
    assert not any("train.py" in note for note in report.notes), report.notes


@pytest.mark.thorough
def test_what_hangs_on_no_loss_is_not_named(tmp_path: Path):
    """Sizes, what a generator asks of its probabilities, a sample's values, those of the data."""
    others = """
class Scaled(torch.utils.data.Dataset):
    mean = x.mean().numpy()

    def __len__(self):
        return 96

    def __getitem__(self, index):
        value = x[index].numpy() - self.mean
        if value[0] > 99 or x[index].max().item() > 99 or self.mean > 99:
            raise ValueError(value)
        return value, y[index]


loader, generator = DataLoader(Scaled(), 8, shuffle=True), np.random.default_rng(0)
"""
    asked = """
    assert np.size(losses) == 12 and np.ndim(losses) == 1
    if np.size(losses) > 99 or np.shape(left) == (99,) or not np.isscalar(losses[0]):
        break
    generator.choice(2, p=torch.softmax(loss.detach().repeat(2), 0).double().numpy())
"""
    report = report_of(tmp_path, others + LOSSES + asked)
    assert report.ok and report.facts["optimizer steps"] == 96, str(report)
    assert not any("train.py" in note for note in report.notes), report.notes


@pytest.mark.thorough
def test_what_numpy_computes_of_losses_can_be_written_and_read(tmp_path: Path):
    """As a log does it: in a file, as JSON, in an array's file, as a tensor."""
    written = """
import json, pickle
kept = np.array(losses)
json.dump({"mean": np.mean(losses), "all": kept.tolist()}, open("log.json", "w"))
assert set(json.load(open("log.json"))) == {"mean", "all"}
np.save("kept.npy", kept)
assert np.load("kept.npy").shape == (12,) and pickle.loads(pickle.dumps(kept)).shape == (12,)
assert torch.tensor(kept).dtype == torch.from_numpy(kept).dtype == torch.tensor(np.mean(kept)).dtype == torch.float64
assert isinstance(np.mean(losses), np.float64) and isinstance(np.sum(right), np.int64)
print(f"{np.mean(losses):.3f} {np.sum(right):d} {round(np.mean(left), 2)}", repr(kept)[:6], {np.sum(right): 1})
"""
    report = report_of(tmp_path, LOSSES + written)
    assert report.ok and report.facts["optimizer steps"] == 96, str(report)


@pytest.mark.thorough
def test_what_fails_where_a_value_stands_still_is_not_said_to_fail_by_itself(tmp_path: Path):
    """The third loss is the second one in a rehearsal, and never in a run."""
    stands_still = LOSSES.replace(
        "        losses.append", "        assert loss.item() not in losses\n        losses.append"
    )
    report = report_of(tmp_path, stands_still)
    assert report.ok is None, str(report)
    for name in ("length", "horizon"):
        assert "asks for a value that a rehearsal does not have" in report.not_judged[name], report.not_judged
