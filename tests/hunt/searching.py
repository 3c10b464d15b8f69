"""``python -m tests.hunt --minutes 10 --seed 1``: search for a run that breaks a promise.

Runs are drawn from the seed. The first that is wrong is shrunk to the fewest pieces and printed as a script of its
own. The exit code is 0 where none was found, and 1 where one was.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from tests.hunt.judging import Verdict, judge
from tests.hunt.pieces import DrawnRun, drawn_runs
from tests.hunt.script import script_of

AT_ONCE = 25
"""Runs that are drawn from one seed, before the time is looked at again."""
SHRINK_SECONDS = 120.0


class Found(AssertionError):
    """A run that is wrong."""


def hunt(
    seed: int, minutes: float, runs: int | None = None, shrink_seconds: float = SHRINK_SECONDS
) -> tuple[Counter[str], DrawnRun | None, str]:
    """How many runs had which outcome, and the smallest that is wrong, with why."""
    outcomes: Counter[str] = Counter()
    ends, number = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < ends and (runs is None or sum(outcomes.values()) < runs):
        found, why = _some_runs(seed, number, outcomes, ends, min(AT_ONCE, runs or AT_ONCE), shrink_seconds)
        if found is not None:
            return outcomes, found, why
        number += 1
    return outcomes, None, ""


def _some_runs(
    seed: int, number: int, outcomes: Counter[str], ends: float, runs: int, shrink_seconds: float
) -> tuple[DrawnRun | None, str]:
    smallest: list[tuple[DrawnRun, str]] = []
    first_found = [0.0]

    @hypothesis_seed(seed * 1_000_003 + number)
    @settings(
        max_examples=runs,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(drawn_runs())
    def try_one(run: DrawnRun) -> None:
        if smallest and time.monotonic() - first_found[0] > shrink_seconds:
            return
        if not smallest and time.monotonic() > ends:
            return
        verdict: Verdict = judge(run)
        if not smallest:
            outcomes[verdict.outcome] += 1
        if verdict.outcome == "wrong":
            if not smallest:
                first_found[0] = time.monotonic()
            smallest[:] = [(run, verdict.why)]
            raise Found(verdict.why)

    try:
        try_one()
    except BaseException as error:
        if not smallest:
            raise error
    return smallest[0] if smallest else (None, "")


def _hunt_in_its_process(seed: int, minutes: float, runs: int | None, shrink_seconds: float, answers: Any) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # a spawned process would spawn the workers of its runs, too
    outcomes, found, why = hunt(seed, minutes, runs, shrink_seconds)
    answers.put((seed, outcomes, found, why))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description="Search for a run that breaks a promise.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to search (10)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other runs (1)")
    parser.add_argument("--runs", type=int, help="how many runs at most, in each process")
    parser.add_argument(
        "--processes", type=int, default=2, help="how many search at once, each by seeds of its own (2)"
    )
    parser.add_argument("--shrink", type=float, default=SHRINK_SECONDS, help="seconds to shrink what is found (120)")
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    seeds = [arguments.seed * 1000 + process for process in range(arguments.processes)]
    hunters = [
        context.Process(
            target=_hunt_in_its_process, args=(seed, arguments.minutes, arguments.runs, arguments.shrink, answers)
        )
        for seed in seeds
    ]
    for hunter in hunters:
        hunter.start()
    total: Counter[str] = Counter()
    found_any = False
    for _ in hunters:
        seed, outcomes, found, why = answers.get()
        total += outcomes
        if found is not None:
            found_any = True
            print(f"# Seed {seed} found a run that is wrong: {why}\n\n{script_of(found)}\n")
    for hunter in hunters:
        hunter.join()
    counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(total.items()))
    print(f"hunt: {sum(total.values())} runs: {counts}")
    return 1 if found_any else 0
