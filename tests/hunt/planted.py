"""Faults that are planted in the library, one at a time, for the hunt to find: ``python -m tests.hunt.planted``.

It prints, for each fault and each of five seeds, after how many seconds the hunt found a run that is wrong.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

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


def plant(name: str, folder: Path) -> None:
    """Put a copy of the library with the fault, and of the tests, into a folder.

    Raises:
        ValueError: The text that is to be changed is not there once.
    """
    file, right, wrong = PLANTED[name]
    for part in ("course_lib", "tests", "data"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "course_lib" / file
    text = path.read_text(encoding="utf-8")
    if text.count(right) != 1:
        raise ValueError(f"{file} has not {right!r} once: plant {name!r} where it belongs now")
    path.write_text(text.replace(right, wrong), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of each hunt (2)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    arguments = parser.parse_args()
    missed = 0
    for name in PLANTED:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                plant(name, Path(folder))
                command = [sys.executable, "-m", "tests.hunt", "--shrink", "0"]
                command += ["--minutes", str(arguments.minutes), "--seed", str(seed)]
                began = time.monotonic()
                done = subprocess.run(
                    command, cwd=folder, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True
                )
            found = done.returncode == 1 and "found a run that is wrong" in done.stdout
            missed += not found
            print(
                f"{name}, seed {seed}: {'found' if found else 'missed'}, {time.monotonic() - began:.0f} s", flush=True
            )
    return missed


if __name__ == "__main__":
    sys.exit(main())
