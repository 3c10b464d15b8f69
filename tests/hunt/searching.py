"""``python -m tests.hunt --minutes 10 --seed 1``: search for a run that breaks a promise.

Runs are drawn from the seed, of each kind in turn, short ones first. The first that is wrong is shrunk to the fewest
pieces and printed as a script of its own. The exit code is 0 where none was found, and 1 where one was. The search
ends with its minutes: a run that has not ended by then is counted as unfinished.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections import Counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch._dynamo  # noqa: F401 - what a life imports is loaded once, and not in each of them
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

import course_lib.callbacks  # noqa: F401
from course_lib.launch import warm_up
from tests.hunt.draws import drawn_runs
from tests.hunt.judging import judge
from tests.hunt.pieces import KINDS, DrawnRun, pieces_of
from tests.hunt.script import script_of

AT_ONCE = 3
"""Runs of a kind, before it is the next kind's turn."""
SHRINK_SECONDS = 120.0
ANSWER_SECONDS = 60.0
"""What a process may take beyond its time to end, on a busy machine; then it is ended."""


class Found(AssertionError):
    """A run that is wrong."""


class Hunt:
    """The search of one process; ``over`` is set by the first of them that finds a run that is wrong."""

    def __init__(
        self,
        seed: int,
        minutes: float,
        runs: float = math.inf,
        shrink_seconds: float = SHRINK_SECONDS,
        over: Any = None,
        device: str = "cpu",
    ) -> None:
        self.seed, self.runs, self.shrink_seconds = seed, runs, shrink_seconds
        self.device = device
        self.kinds = [kind for kind in KINDS if device == "cpu" or kind != "ranks"]
        self.over = threading.Event() if over is None else over
        self.ends = time.monotonic() + 60 * minutes
        self.outcomes: Counter[str] = Counter()
        self.found: DrawnRun | None = None
        """The smallest run that is wrong, so far."""
        self.why = ""
        self._tried: set[DrawnRun] = set()

    def search(self) -> None:
        for number in itertools.count():
            if self.found is not None or self._is_at_its_end():
                return
            self._try_some(number)

    def _is_at_its_end(self) -> bool:
        if time.monotonic() > self.ends:
            return True
        return self.found is None and (self.over.is_set() or self.outcomes.total() >= self.runs)

    def _try_some(self, number: int) -> None:
        turn, kind = divmod(number, len(self.kinds))

        # One more than AT_ONCE: hypothesis begins with the simplest run, which is the same for all seeds.
        @hypothesis_seed(self.seed * 1_000_003 + number)
        @settings(
            max_examples=AT_ONCE + 1,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(drawn_runs(self.kinds[kind], turn, self.device))
        def try_one(run: DrawnRun) -> None:
            self._try_one(run)

        try:
            try_one()
        except Exception:  # Found; or hypothesis' own, where the time to shrink was over
            if self.found is None:
                raise

    def _try_one(self, run: DrawnRun) -> None:
        if run in self._tried or self._is_at_its_end():
            return
        verdict = judge(run, self.ends)
        if self.found is None:
            self.outcomes[verdict.outcome] += 1
        if verdict.outcome != "wrong":
            self._tried.add(run)
            return
        if self.found is None:
            self.over.set()
            self.ends = time.monotonic() + self.shrink_seconds
        self.found, self.why = run, verdict.why
        raise Found(verdict.why)


def _hunt_in_its_process(hunt: Hunt, folder: str, answers: Any) -> None:
    os.setsid()
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # which is removed with what a run leaves there
    multiprocessing.set_start_method("fork", force=True)  # of the workers of its runs, whatever Python's default is
    warm_up()  # until it is the turn of runs on several ranks
    hunt.search()
    answers.put((hunt.seed, hunt.outcomes, hunt.found, hunt.why))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description="Search for a run that breaks a promise.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to search (10)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other runs (1)")
    parser.add_argument("--runs", type=float, default=math.inf, help="how many runs at most, in each process")
    parser.add_argument(
        "--processes", type=int, default=2, help="how many search at once, each by seeds of its own (2)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where they train (cpu)")
    parser.add_argument("--shrink", type=float, default=SHRINK_SECONDS, help="seconds to shrink what is found (120)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="hunt-", ignore_cleanup_errors=True) as folder:
        return _search_in_processes(arguments, folder)


def _search_in_processes(arguments: argparse.Namespace, folder: str) -> int:
    context = multiprocessing.get_context("fork")
    answers, over = context.Queue(), context.Event()
    began, hunters = time.monotonic(), []
    for process in range(arguments.processes):
        seed = arguments.seed * 1000 + process
        hunt = Hunt(seed, arguments.minutes, arguments.runs, arguments.shrink, over, arguments.device)
        hunters.append(context.Process(target=_hunt_in_its_process, args=(hunt, folder, answers)))
        hunters[-1].start()
    ends = began + 60 * arguments.minutes + ANSWER_SECONDS
    total: Counter[str] = Counter()
    waited_for = len(hunters)
    while waited_for and time.monotonic() < ends + arguments.shrink * over.is_set():
        with contextlib.suppress(queue.Empty):
            seed, outcomes, found, why = answers.get(timeout=1.0)
            waited_for -= 1
            total += outcomes
            if found is not None:
                print(
                    f"# Seed {seed} found a run that is wrong: {why}\n# {pieces_of(found)}\n\n{script_of(found)}\n",
                    flush=True,
                )
    if waited_for:
        print(f"hunt: {waited_for} of {len(hunters)} processes were ended {ANSWER_SECONDS:.0f} s behind their time")
    for hunter in hunters:
        hunter.kill()
        hunter.join()
    counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(total.items()))
    print(f"hunt: {total.total()} runs in {time.monotonic() - began:.0f} s: {counts}")
    return int(over.is_set())
