"""Faults that are planted in the library, one at a time: the hunt finds each of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import effort

ROOT = Path(__file__).parents[2]


class Planted(NamedTuple):
    file: str
    right: str
    wrong: str


PLANTED = {
    "the generator's state is forgotten": Planted(
        "callbacks/exact_resume.py", 'self._seed = state_dict["seed"]', "pass"
    ),
    "one rank's position alone is restored": Planted(
        "samplers/epoch.py",
        'self._position = int_of_at_least(0, "position", state["position"])',
        'self._position = state["position"] if self._world()[1] == 0 else 0',
    ),
    "the average is saved for the weights": Planted(
        "callbacks/_averages.py",
        'checkpoint.get("current_model_state", checkpoint["state_dict"])',
        'checkpoint["state_dict"]',
    ),
    "a window's tail is dropped": Planted("accumulation.py", "if not window:", "if len(window) < k:"),
}
SEEDS = range(1, 6)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [*PLANTED][: effort.cases(1, 4)])
def test_the_hunt_finds_it_in_two_minutes(name, seed, tmp_path):
    if seed > effort.cases(1, 5):
        return
    file, right, wrong = PLANTED[name]
    for folder in ("course_lib", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "course_lib" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(right) == 1, f"{file} has not {right!r} once: plant the fault where it belongs now"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.hunt", "--minutes", "2", "--seed", str(seed), "--shrink", "0"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "found a run that is wrong" in done.stdout, done.stdout + done.stderr
