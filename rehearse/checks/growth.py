"""growth: what is alive after each of some steps, and was not before."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from course_lib._words import counted
from course_lib.leaks.census import Census, Count
from course_lib.leaks.culprits import Culprit, find_culprits
from course_lib.leaks.naming import holder_of
from course_lib.leaks.trend import growth
from rehearse.report import Judgement, not_applicable
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.run import Enough

WARMUP = 3
STEPS = 12
FILLED = 50_000
"""Entries that a list gets: more than most buffers keep."""


def growth_over_steps(run: LightningRun) -> Callable[[Path], Judgement]:
    """A trial: watch some steps, as :func:`course_lib.leaks.watch_growth` does.

    What grows may have an end, as a buffer of the last thousand losses has. So the lists that grow are filled up and
    watched once more: those with an end grow no more then.
    """

    def trial(folder: Path) -> Judgement:
        found: list[Culprit] = []
        watching, ended = _watched(found), False
        next(watching)

        def after_step() -> None:
            nonlocal ended
            ended = next(watching, DONE) is DONE
            if ended:
                raise Enough

        def begin(trainer: Any, *_: Any) -> None:  # to train beyond the run's end
            trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
            for config in trainer.lr_scheduler_configs:
                config.scheduler.step = _as_far_as_it_goes(config.scheduler.step)

        run.start(folder, on_train_start=begin, on_train_batch_end=lambda *_: after_step())
        if not ended:
            return not_applicable("growth", f"the run has fewer than {WARMUP + STEPS} steps")
        return _growing(list(map(str, found))) if found else Judgement()

    return trial


def _as_far_as_it_goes(step: Callable[..., None]) -> Callable[..., None]:
    """``step`` of a schedule that may have an end and raise after it, as OneCycleLR does."""

    def stepped(*arguments: Any, **options: Any) -> None:
        with contextlib.suppress(ValueError):
            step(*arguments, **options)

    return stepped


DONE = object()


def _watched(found: list[Culprit]) -> Generator[None]:
    """Is sent on after each step, and ends when enough have been seen: then ``found`` has who holds what grows.

    What it keeps would be seen as a holder, so it knows containers by their ids alone.
    """
    with Census() as census:
        for _ in range(WARMUP):
            yield
        census.begin()
        counts: list[Count] = []  # a list from before would be seen to grow
        while len(counts) < STEPS:
            yield
            counts.append(census.count())
        grown = {id(container) for container, _ in census.growing(counts)}
        found += find_culprits(census, counts)
    filled = _filled(grown, {culprit.holder for culprit in found})
    lengths: list[dict[str, int]] = []
    while filled and len(lengths) < STEPS:
        yield
        lengths.append(_lengths(filled))
    with_end = {holder for holder in filled.values() if not growth([one.get(holder, 0) for one in lengths])}
    found[:] = [culprit for culprit in found if culprit.holder not in with_end]


def _filled(grown: set[int], culprits: set[str]) -> dict[int, str]:
    """Fill up the lists among them, and give their names by their ids."""
    filled: dict[int, str] = {}
    for one in gc.get_objects():
        if id(one) in grown and isinstance(one, list | deque) and (holder := holder_of(one)) in culprits:
            one.extend([one[-1]] * FILLED)
            filled[id(one)] = holder
    return filled


def _lengths(filled: dict[int, str]) -> dict[str, int]:
    lists = [one for one in gc.get_objects() if id(one) in filled and isinstance(one, list | deque)]
    return {filled[id(one)]: len(one) for one in lists}


def _growing(culprits: list[str]) -> Judgement:
    first = " ".join(culprits[0].split()).rstrip(".")
    more = f" ({counted(len(culprits) - 1, 'more thing')} with it)" if len(culprits) > 1 else ""
    return Judgement().find(
        "growth",
        f"In {STEPS} steps, something grows: {first}{more}.",
        "The run holds a little of every step, and runs out of memory after some hours.",
        "Keep numbers in place of tensors with a graph (loss.item(), detach()), and empty what is collected.",
    )
