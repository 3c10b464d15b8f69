"""A schedule that is stepped through a run, and on until it is seen where it ends."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rehearse.scripts.schedules import numbers_of

OWN_SECONDS = 10.0
"""CPU time in which the calls that the run makes are made: some million."""
BEYOND_SECONDS = 1.5
"""CPU time for the calls after them; four times as much where the schedule was given a number of calls to come."""
LOOKS = 1_024
"""Calls between two looks whether the schedule has turned up."""
ROUNDING = 1e-6
"""Of the highest rate: what torch's recursive formulas are off by after some hundred thousand calls."""
CYCLES = ("Cyclic", "WarmRestarts")
"""In the names of schedules that turn up by design."""
HORIZONS = ("T_max", "total_steps", "total_iters", "step_size")
"""The names under which torch's schedules keep a number of calls."""
Rates = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class WalkedSchedule:
    """One schedule of a run and the rates that it makes of each parameter group."""

    name: str
    interval: str
    frequency: int
    follows_metric: bool
    rates: tuple[Rates, ...]
    """For each parameter group that differs from those before it: its rate after 0, 1, 2 … calls."""
    refused: str = ""
    """What the schedule raised at the call after the last one."""
    numbers: frozenset[int] = frozenset()
    """Whole numbers that its own function goes by."""

    @property
    def cycles(self) -> bool:
        return any(part in self.name for part in CYCLES)


def walked(scheduler: Any, interval: str, frequency: int, follows_metric: bool, calls: int) -> WalkedSchedule:
    """Step a schedule ``calls`` times and well beyond, or until it raises, turns up, or the time is up."""
    name = type(scheduler).__name__
    if follows_metric:
        return WalkedSchedule(name, interval, frequency, True, ())
    rates, refused = walk(scheduler, calls, max(4 * calls, 2_000, 2 * max(horizons_of(scheduler), default=0)))
    different = {row.tobytes(): row for row in rates}
    numbers = numbers_of(scheduler)
    return WalkedSchedule(name, interval, frequency, False, tuple(different.values()), refused, numbers)


def walk(scheduler: Any, calls: int, beyond: int = 0) -> tuple[tuple[Rates, ...], str]:
    """The rates of each group, and what the schedule raised if it did; ``beyond``: the most calls that are made."""
    groups = scheduler.optimizer.param_groups
    scheduler.optimizer._opt_called = True  # torch would warn that no step was made before
    rates = [[float(group["lr"])] for group in groups]
    limit = BEYOND_SECONDS * (4 if max(horizons_of(scheduler), default=0) > calls else 1)
    began, refused = time.process_time(), ""
    ends, lows = began + OWN_SECONDS, list[_Low]()
    for call in range(1, max(calls, beyond) + 1):
        try:
            scheduler.step()
        except Exception as error:
            refused = " ".join(str(error).split())
            break
        for row, group in zip(rates, groups, strict=True):
            row.append(float(group["lr"]))
        if call == calls:
            ends = time.process_time() + limit
            lows = [_Low(max(row), min(row[row.index(max(row)) :])) for row in rates]
        if time.process_time() > ends:
            break
        if call > calls and call % LOOKS == 0:
            turned = [low.turned_up(row) for low, row in zip(lows, rates, strict=True)]
            if all(turned):
                break
    return tuple(np.array(row) for row in rates), refused


@dataclass
class _Low:
    """The lowest rate since the peak of a run."""

    highest: float
    lowest: float

    def turned_up(self, rates: list[float]) -> bool:
        """Whether the last rate lies clearly above it."""
        self.lowest = min(self.lowest, *rates[-LOOKS:])
        return rates[-1] > self.lowest + ROUNDING * self.highest


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


def schedules_alive(optimizers: list[Any]) -> list[LRScheduler]:
    """The schedules of these optimizers that somebody keeps, but those that are a part of another; in a fixed order."""
    held = set(map(id, optimizers))
    # Not by gc.get_objects: to count a reference to every object is to copy the memory of the process, in a fork.
    holders = gc.get_referrers(*optimizers)
    holders += gc.get_referrers(*[holder for holder in holders if type(holder) is dict])  # the dicts of attributes
    every = list({id(one): one for one in holders if issubclass(type(one), LRScheduler)}.values())
    parts = {id(part) for schedule in every for part in getattr(schedule, "_schedulers", ())}
    own = [one for one in every if id(getattr(one, "optimizer", None)) in held and id(one) not in parts]
    own = [one for one in own if not isinstance(one, ReduceLROnPlateau)]  # it follows a metric
    return sorted(own, key=lambda schedule: type(schedule).__name__)
