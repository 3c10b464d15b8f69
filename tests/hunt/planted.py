"""Faults that are planted in the library, one at a time, for the hunt to find: ``python -m tests.hunt.planted``.

It prints, for each fault and each of five seeds, how many seconds the hunt took, and what was wrong with what it found.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import hypothesis  # noqa: F401 - what takes seconds to load, and is not the library's
import lightning.pytorch  # noqa: F401
import torch._dynamo  # noqa: F401

ROOT = Path(__file__).parents[2]
FOUND = "found a run that is wrong: "


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
        "callbacks/_clean_point.py",
        'checkpoint.get("current_model_state", checkpoint["state_dict"])',
        'checkpoint["state_dict"]',
    ),
    "buffers stay as they were within a window": Planted(
        "callbacks/_clean_point.py", "for name, value in self.module.items() if name in state", "for name, value in ()"
    ),
    "a validation that waits is passed over": Planted(
        "callbacks/exact_resume.py",
        "validation_waits=_clean_point.validation_is_due(trainer)",
        "validation_waits=False",
    ),
    "batches are counted once": Planted(
        "callbacks/exact_resume.py",
        "_clean_point.count_batches_again(trainer)  # one epoch may be longer",
        "pass  # one epoch",
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
    for seed, name in itertools.product(arguments.seeds, PLANTED):
        with tempfile.TemporaryDirectory() as folder:
            plant(name, Path(folder))
            told = Path(folder, "told")
            began = time.monotonic()
            hunter = multiprocessing.get_context("fork").Process(
                target=_hunt, args=(folder, told, ["--minutes", f"{arguments.minutes}", "--seed", f"{seed}"])
            )
            hunter.start()
            hunter.join()
            text = told.read_text() if told.exists() else "the hunt itself did not start"
        found = hunter.exitcode == 1 and FOUND in text
        missed += not found
        how = f"found: {text.partition(FOUND)[2].splitlines()[0][:120]}" if found else "missed"
        print(f"{name}, seed {seed}, {time.monotonic() - began:.0f} s: {how}; {text.splitlines()[-1]}", flush=True)
    return missed


def _hunt(folder: str, told: Path, options: list[str]) -> None:
    """In a fork of this process, which has loaded all but the library."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("course_lib", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    os.chdir(folder)
    from tests.hunt.searching import main as hunt

    with told.open("w") as file, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(file):
        os.dup2(nowhere.fileno(), 2)  # a server that still loads when the folder goes complains of it
        code = hunt([*options, "--shrink", "0"])
    sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
