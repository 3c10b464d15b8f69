"""A schedule's rates, call by call: what it does when it is stepped on to and beyond the end of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WALK_SECONDS = 1.5
WALK_CALLS = 200_000
"""What a walk beyond the run's end may take."""
CYCLES = ("Cyclic", "WarmRestarts")
"""In the names of schedules that turn up by design."""
HORIZONS = ("T_max", "total_steps", "total_iters", "step_size")
"""The names under which torch's schedules keep a number of calls."""


@dataclass(frozen=True)
class Schedule:
    """One schedule of a Trainer and the rates that it makes of each parameter group."""

    name: str
    interval: str
    frequency: int
    follows_metric: bool
    rates: tuple[tuple[float, ...], ...]
    """A row for each parameter group: its rate after 0, 1, 2 … calls."""
    refused: str = ""
    """What the schedule raised at the call after the last one."""

    @property
    def cycles(self) -> bool:
        return any(part in self.name for part in CYCLES)


def walked(config: Any, calls: int) -> Schedule:
    """Step a Trainer's schedule well beyond ``calls``, or until it raises or the time is up."""
    scheduler = config.scheduler
    schedule = Schedule(
        name=type(scheduler).__name__,
        interval=str(config.interval),
        frequency=int(config.frequency),
        follows_metric=bool(config.reduce_on_plateau),
        rates=(),
    )
    if schedule.follows_metric:
        return schedule
    rates, refused = walk(scheduler, max(4 * calls, 2_000, 2 * max(horizons_of(scheduler), default=0)))
    return Schedule(schedule.name, schedule.interval, schedule.frequency, False, rates, refused)


def walk(scheduler: Any, calls: int) -> tuple[tuple[tuple[float, ...], ...], str]:
    """The rates of each group, and what the schedule raised if it did."""
    groups = scheduler.optimizer.param_groups
    scheduler.optimizer._opt_called = True  # torch would warn that no step was made before
    rates = [[float(group["lr"])] for group in groups]
    ends, refused = time.monotonic() + WALK_SECONDS, ""
    for _ in range(min(calls, WALK_CALLS)):
        try:
            scheduler.step()
        except Exception as error:
            refused = " ".join(str(error).split())
            break
        for row, group in zip(rates, groups, strict=True):
            row.append(float(group["lr"]))
        if time.monotonic() > ends:
            break
    return tuple(map(tuple, rates)), refused


def horizons_of(scheduler: Any) -> Iterator[int]:
    """The numbers of calls that a schedule was made with, and those of the schedules in it."""
    attributes = vars(scheduler)
    for name in HORIZONS:
        if isinstance(attributes.get(name), int):
            yield attributes[name]
    milestones = attributes.get("milestones") or attributes.get("_milestones") or ()
    yield from (int(milestone) for milestone in milestones)
    parts = [total for part in attributes.get("_schedulers", ()) for total in horizons_of(part)]
    yield sum(parts)
