"""growth: what is alive after each of some steps, and was not before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from course_lib._words import counted
from course_lib.leaks.census import Census, Count
from course_lib.leaks.culprits import find_culprits
from course_lib.preflight.report import Judgement, not_applicable
from course_lib.preflight.runs.run import Enough, TrainingRun

WARMUP = 3
STEPS = 12


def growth_over_steps(run: TrainingRun) -> Callable[[Path], Judgement]:
    """A trial: watch some steps, as :func:`course_lib.leaks.watch_growth` does."""

    def trial(folder: Path) -> Judgement:
        culprits = _culprits(run, folder)
        if culprits is None:
            return not_applicable("growth", f"the run has fewer than {WARMUP + STEPS} steps")
        return _growing(culprits) if culprits else Judgement()

    return trial


def _culprits(run: TrainingRun, folder: Path) -> list[str] | None:
    """Who holds what grows; None where the run ended before it was seen."""
    done = 0
    counts: list[Count] = []
    culprits: list[str] | None = None
    with Census() as census:

        def after_step() -> None:
            nonlocal done, counts, culprits
            done += 1
            if done == WARMUP:
                census.begin()
                counts = []  # a list from before would be seen to grow
            elif done > WARMUP:
                counts.append(census.count())
            if done == WARMUP + STEPS:
                series = {f.name: [getattr(c, f.name) for c in counts] for f in fields(Count) if f.name != "lengths"}
                culprits = [str(culprit) for culprit in find_culprits(census, counts, series)]
                raise Enough

        run.train_on(folder, after_step)
    return culprits


def _growing(culprits: list[str]) -> Judgement:
    first = " ".join(culprits[0].split()).rstrip(".")
    more = f" ({counted(len(culprits) - 1, 'more thing')} with it)" if len(culprits) > 1 else ""
    return Judgement().find(
        "growth",
        f"In {STEPS} steps, something grows: {first}{more}.",
        "The run holds a little of every step, and runs out of memory after some hours.",
        "Keep numbers in place of tensors with a graph (loss.item(), detach()), and empty what is collected.",
    )
