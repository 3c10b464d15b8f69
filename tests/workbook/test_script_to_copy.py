"""The scripts to copy: killed twice at random in three tasks and resumed bit for bit; judged; started in silence."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from workbook import script_to_copy, script_to_copy_tokens
from workbook.ch09_lives import Kill

from course_lib.launch import RankError, run_ranks
from rehearse import rehearse
from tests import effort

ROOT = Path(__file__).parents[2]


class Rows(Dataset):
    """A table: 6 columns of which some values are missing, drawn anew each time, and a number to predict."""

    def __init__(self, first, last):
        self.x = torch.randn(last, 6, generator=torch.Generator().manual_seed(0))[first:]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        row = self.x[index]
        return torch.where(torch.rand(6) < 0.2, 0.0, row), row.sum().sin()


class Table(script_to_copy.Task):
    epochs, batch_size = 2, 24

    @staticmethod
    def datasets():
        return Rows(0, 500), Rows(500, 600)

    @staticmethod
    def net():
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    @staticmethod
    def loss_sum_and_count(net, batch):
        x, y = batch
        return F.mse_loss(net(x)[:, 0], y, reduction="sum"), torch.tensor(len(y))


class Images(script_to_copy.Task):
    epochs = 2


TASKS = {"images": Images, "tokens": script_to_copy_tokens.Tokens, "a table": Table}


def weights_of_a_life(rank, folder, task, kill_after):
    trainer, model, data = script_to_copy.make_run(folder, task, [Kill(kill_after)])
    last = folder / "checkpoints" / "last.ckpt"
    trainer.fit(model, datamodule=data, ckpt_path=last if last.exists() else None)
    return [tensor.cpu().numpy() for tensor in model.state_dict().values()]


def live(folder, task, kill_after=None, ranks=1):
    try:
        return run_ranks(weights_of_a_life, ranks, args=(folder, task, kill_after), timeout=120)[0].value
    except RankError as error:
        if kill_after is None or "SIGKILL" not in str(error):
            raise
        return None


RUNS = [("images", 1), ("tokens", 2), ("a table", 1), ("images", 2), ("tokens", 1), ("a table", 2)]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ranks"), RUNS[: effort.cases(2, 6)])
def test_two_kills_leave_no_bit_of_the_weights_different(name, ranks, tmp_path):
    rng = random.Random(f"{name} {ranks}")
    task = TASKS[name]
    half = task.epochs * len(task.datasets()[0]) // (task.batch_size * ranks) // 2  # of a rank's micro-batches
    whole = live(tmp_path / "whole", task, ranks=ranks)
    for case in range(effort.cases(1, 6)):
        folder, kills = tmp_path / f"{case}", (rng.randint(2, half), rng.randint(1, half - 1))
        assert [live(folder, task, kill, ranks) for kill in kills] == [None, None]
        resumed = live(folder, task, ranks=ranks)
        differing = sum(int((a != b).sum()) for a, b in zip(resumed, whole, strict=True))
        assert differing == 0, kills


@pytest.mark.thorough
@pytest.mark.parametrize("make_run", [script_to_copy.make_run, script_to_copy_tokens.make_run])
def test_rehearse_finds_nothing(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = rehearse(*make_run())
    assert report.ok, str(report)


@pytest.mark.thorough
def test_a_copy_starts_without_a_warning_and_is_short(tmp_path):
    assert len(Path(script_to_copy.__file__).read_text(encoding="utf-8").splitlines()) < 150
    copied = shutil.copy(script_to_copy.__file__, tmp_path / "train.py")
    done = subprocess.run(
        [sys.executable, copied, "run"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert "125 optimizer steps planned; 125 updates counted" in done.stdout + done.stderr
    assert "arn" not in (done.stdout + done.stderr).replace("learning", ""), done.stderr
    assert (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()
