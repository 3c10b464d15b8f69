"""Learning-rate schedules: stepped as the script steps them, and at its end stepped on, to see where they end."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from course_lib.timelapse.journal import SchedulePlayed, ScheduleStep
from course_lib.timelapse.lapse import Lapse, Numbered, take_place

LEAST_CALLS, MOST_CALLS = 2_000, 200_000
"""To which a schedule is stepped on."""


class RecordedSchedules:
    """Takes the place of the ``step`` of every class of schedules."""

    def __init__(self, lapse: Lapse) -> None:
        self.lapse = lapse
        self.schedules = Numbered()

    def install(self) -> None:
        for kind in {value for value in vars(lr_scheduler).values() if inspect.isclass(value)}:
            if issubclass(kind, LRScheduler):
                self._record_steps_of(kind)
        make, begin = LRScheduler.__init__, LRScheduler._initial_step

        @functools.wraps(make)
        def __init__(schedule: Any, *arguments: Any, **options: Any) -> None:
            for kind in type(schedule).__mro__:
                self._record_steps_of(kind)
            make(schedule, *arguments, **options)

        @functools.wraps(begin)
        def _initial_step(schedule: Any) -> None:
            self.lapse.inside["schedule"] += 1
            try:
                begin(schedule)
            finally:
                self.lapse.inside["schedule"] -= 1

        take_place(LRScheduler, __init__, _initial_step)

    def _record_steps_of(self, kind: type) -> None:
        real = vars(kind).get("step")
        if real is None or getattr(real, "is_recorded", False):
            return

        @functools.wraps(real)
        def step(schedule: Any, *arguments: Any, **options: Any) -> None:
            if self.lapse.inside["schedule"]:  # made, or stepped by a schedule of schedules
                return real(schedule, *arguments, **options)
            played = self._played(schedule)
            self.lapse.write(ScheduleStep(self.schedules.number(schedule)))
            self.lapse.inside["schedule"] += 1
            try:
                real(schedule, *arguments, **options)
            finally:
                self.lapse.inside["schedule"] -= 1
            played.rates.append(_rates_of(schedule))

        vars(step)["is_recorded"] = True
        take_place(kind, step)

    def _played(self, schedule: Any) -> SchedulePlayed:
        if schedule not in self.schedules:
            optimizer = schedule.optimizer
            while optimizer not in self.lapse.optimizers and hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer  # a library's wrapper
            number = self.lapse.optimizers.number(optimizer) if optimizer in self.lapse.optimizers else -1
            follows = isinstance(schedule, ReduceLROnPlateau)
            self.lapse.journal.schedules.append(
                SchedulePlayed(type(schedule).__name__, number, follows, [_rates_of(schedule)])
            )
        return self.lapse.journal.schedules[self.schedules.number(schedule)]

    def walk_on(self, units: int) -> None:
        """Step each schedule beyond the end of the run, ``units`` and more in all; the script has ended."""
        self.lapse.inside["schedule"] += 1
        for schedule, played in zip(self.schedules.things, self.lapse.journal.schedules, strict=True):
            optimizer: Any = schedule.optimizer
            optimizer._opt_called = True  # torch would warn that no step was made before
            most = max(LEAST_CALLS, 2 * units, 2 * _horizon_of(schedule))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                while not played.follows_metric and len(played.rates) <= min(most, MOST_CALLS):
                    try:
                        schedule.step()
                    except Exception as error:
                        played.refused = f"{type(error).__name__}: {error}"
                        break
                    played.rates.append(_rates_of(schedule))


def _rates_of(schedule: Any) -> tuple[float, ...]:
    optimizer: Optimizer = schedule.optimizer
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def _horizon_of(schedule: Any) -> int:
    """The largest whole number among its settings: it may end there."""
    numbers = [value for value in vars(schedule).values() if type(value) is int]
    return min(max(numbers, default=0), MOST_CALLS // 2)
