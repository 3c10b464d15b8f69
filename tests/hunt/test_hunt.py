"""The hunt itself: a fixed sample of it finds nothing, and in a library with a fault it finds that fault."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import effort
from tests.hunt.judging import judge
from tests.hunt.pieces import DrawnRun, Kill
from tests.hunt.script import script_of
from tests.hunt.searching import Hunt

ROOT = Path(__file__).parents[2]
PLAIN = DrawnRun(samples=11, accumulate_grad_batches=2, kills=(Kill(3),), callbacks=("ExactResume", "StepAudit"))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2])
def test_a_sample_of_the_hunt_finds_nothing(seed):
    hunt = Hunt(seed, minutes=60, runs=effort.cases(8, 150))
    hunt.search()
    assert hunt.found is None, f"{hunt.why}\n\n{script_of(hunt.found)}"
    assert hunt.outcomes["right"] > 0.7 * hunt.outcomes.total(), hunt.outcomes


@pytest.mark.gpu
def test_a_sample_of_the_hunt_on_a_gpu_finds_nothing():
    command = [sys.executable, "-m", "tests.hunt", "--device", "cuda", "--minutes", "60", "--processes", "1"]
    done = subprocess.run([*command, "--runs", "12"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) right", done.stdout)[0]) > 6, done.stdout


@pytest.mark.thorough
def test_what_is_played_is_what_is_printed(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(script_of(PLAIN), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ROOT}
    )
    whole, killed, stopped = done.stdout.splitlines()
    assert killed.endswith("raised: Killed") and whole.partition("tensor")[2] == stopped.partition("tensor")[2]


@pytest.mark.thorough
@pytest.mark.parametrize("changed", [dict(), dict(trainer=False), dict(ranks=(2, 1), samples=12)])
def test_a_run_is_right(changed):
    assert judge(replace(PLAIN, **changed)).outcome == "right"
