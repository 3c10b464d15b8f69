"""Learning-rate schedules: stepped as the script steps them, and at its end stepped on, to see where they end."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rehearse.scripts.events import ScheduleStep
from rehearse.scripts.journal import SchedulePlayed
from rehearse.scripts.lapse import Lapse, Numbered, instead_of, instead_of_own

LEAST_CALLS, MOST_CALLS = 2_000, 200_000
"""To which a schedule is stepped on."""


class RecordedSchedules:
    """Takes the place of the ``step`` of every class of schedules."""

    def __init__(self, lapse: Lapse) -> None:
        self.lapse = lapse
        self.schedules = Numbered()
        self.made: list[LRScheduler] = []

    def install(self) -> None:
        for kind in {value for value in vars(lr_scheduler).values() if inspect.isclass(value)}:
            if issubclass(kind, LRScheduler):
                instead_of_own(kind, self.step)

        @instead_of(LRScheduler)
        def __init__(make: Any, schedule: Any, *arguments: Any, **options: Any) -> None:
            instead_of_own(type(schedule), self.step)
            self.made.append(schedule)
            make(schedule, *arguments, **options)

        @instead_of(LRScheduler)
        def _initial_step(begin: Any, schedule: Any) -> None:
            with self.lapse.going_on("schedule"):
                begin(schedule)

    def step(self, real: Any, schedule: Any, *arguments: Any, **options: Any) -> None:
        """In place of a schedule's own."""
        if self.lapse.inside["schedule"]:  # made, or stepped by a schedule of schedules
            return real(schedule, *arguments, **options)
        if isinstance(schedule, ReduceLROnPlateau):
            self.lapse.note(
                "ReduceLROnPlateau goes by a metric, which a rehearsal does not compute: its rates are guessed, as is "
                "what hangs on them"
            )
        played = self._played(schedule)
        self.lapse.write(ScheduleStep(self.schedules.number(schedule)))
        with self.lapse.going_on("schedule"):
            real(schedule, *arguments, **options)
        played.rates.append(_rates_of(schedule))

    def _played(self, schedule: Any) -> SchedulePlayed:
        if schedule not in self.schedules:
            self.lapse.journal.schedules.append(self._begun(schedule))
        return self.lapse.journal.schedules[self.schedules.number(schedule)]

    def _begun(self, schedule: Any) -> SchedulePlayed:
        optimizer = schedule.optimizer
        while optimizer not in self.lapse.optimizers and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # a library's wrapper
        number = self.lapse.optimizers.number(optimizer) if optimizer in self.lapse.optimizers else -1
        follows = isinstance(schedule, ReduceLROnPlateau)
        return SchedulePlayed(type(schedule).__name__, number, follows, [_rates_of(schedule)], numbers_of(schedule))

    def see_which_were_never_stepped(self) -> None:
        parts = {id(part) for schedule in self.made for part in _parts_of(schedule)}
        never = [one for one in self.made if one not in self.schedules and id(one) not in parts]
        self.lapse.journal.never_stepped = [self._begun(schedule) for schedule in never]

    def walk_on(self, units: int) -> None:
        """Step each schedule beyond the end of the run, ``units`` and more in all; the script has ended."""
        self.lapse.inside["schedule"] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for schedule, played in zip(self.schedules.things, self.lapse.journal.schedules, strict=True):
                most = max(LEAST_CALLS, 2 * units, 2 * _horizon_of(schedule))
                while not played.follows_metric and len(played.rates) <= min(most, MOST_CALLS):
                    try:
                        schedule.step()
                        played.rates.append(_rates_of(schedule))  # (1 - step / end) ** 0.9 is complex beyond the end
                    except Exception as error:
                        played.refused = f"{type(error).__name__}: {error}"
                        break


def _parts_of(schedule: Any) -> list[LRScheduler]:
    """The schedules that it steps."""
    held = list(vars(schedule).values())
    held += [part for value in held if isinstance(value, list | tuple) for part in value]
    return [one for one in held if isinstance(one, LRScheduler)]


def numbers_of(schedule: Any) -> frozenset[int]:
    """The whole numbers that a LambdaLR's functions go by: their own, those around them, and settings."""
    found: list[Any] = []
    for function in getattr(schedule, "lr_lambdas", ()):
        while isinstance(function, functools.partial):
            found += [*function.args, *function.keywords.values()]
            function = function.func
        code = getattr(function, "__code__", None)
        if code is None:  # an object that is called
            found += getattr(function, "__dict__", {}).values()
        else:
            around = inspect.getclosurevars(function)
            values = [*around.nonlocals.values(), *around.globals.values(), *(function.__defaults__ or ())]
            settings = [one for one in values if hasattr(one, "__dict__") and not callable(one)]
            found += [
                *values,
                *code.co_consts,
                *(getattr(one, name, None) for one in settings for name in code.co_names),
            ]
    return frozenset(value for value in found if type(value) is int)


def _rates_of(schedule: Any) -> tuple[float, ...]:
    optimizer: Optimizer = schedule.optimizer
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def _horizon_of(schedule: Any) -> int:
    """The largest whole number among its settings: it may end there."""
    numbers = [value for value in vars(schedule).values() if type(value) is int]
    return min(max(numbers, default=0), MOST_CALLS // 2)
