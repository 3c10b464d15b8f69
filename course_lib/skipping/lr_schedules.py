"""What a schedule of the learning rate counts: updates; or attempts, where it is the rate that goes with the size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from course_lib.schedules.lr_factor import LrFactor


def is_lr_factor(scheduler: Any) -> bool:
    """Whether it is a ``LambdaLR`` of ``lr_factor(...)`` and nothing else, in each parameter group."""
    return isinstance(scheduler, LambdaLR) and all(isinstance(f, LrFactor) for f in scheduler.lr_lambdas)


def goes_by_lr_factor(scheduler: Any) -> bool:
    """Whether a factor of ``lr_factor(...)`` goes into its rate, and follows the scheduler's own count."""
    parts = getattr(scheduler, "_schedulers", None)  # of a SequentialLR or a ChainedScheduler
    if parts is not None:
        return any(map(goes_by_lr_factor, parts))
    if not isinstance(scheduler, LambdaLR):
        return False
    now = scheduler.last_epoch
    other = now - 1 if now > 0 else now + 1
    return any(_times(f, now) != _times(f, other) for f in scheduler.lr_lambdas if f is not None)


def follow_skip(scheduler: Any) -> None:
    """What a schedule of updates does after a skip: it stays, but where its rate goes by attempts."""
    if not isinstance(scheduler, LambdaLR):
        return
    steps = scheduler._step_count
    scheduler._step_count = 0  # at 1, torch warns of a step ahead of the optimizer's first
    if is_lr_factor(scheduler):
        steps += 1
    else:  # not one further; but a factor that reads the attempts follows them
        scheduler.last_epoch -= 1
    scheduler.step()
    scheduler._step_count = steps


def _times(function: Callable[[int], float], count: int) -> list[int]:
    """The times that a function asks of an ``lr_factor(...)`` when a schedule calls it with its count."""
    with _recorded() as times, suppress(Exception):  # what it raises, it raises where the schedule calls it
        function(count)
    return times


@contextmanager
def _recorded() -> Iterator[list[int]]:
    times: list[int] = []
    original = LrFactor.__call__

    def recorded(factor: LrFactor, time: int) -> float:
        times.append(time)
        return original(factor, time)

    LrFactor.__call__ = recorded  # type: ignore[method-assign, assignment]
    try:
        yield times
    finally:
        LrFactor.__call__ = original  # type: ignore[method-assign]
