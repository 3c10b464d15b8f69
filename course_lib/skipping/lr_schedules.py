"""What a schedule of the learning rate does after a skip: it stays where it is, as it counts updates."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from course_lib.schedules.schedule_plan import LrFactor


def goes_by_lr_factor(scheduler: Any) -> bool:
    """Whether it is a ``LambdaLR`` of ``lr_factor(...)``: the sizes go by attempts, and it would go by updates."""
    return isinstance(scheduler, LambdaLR) and any(isinstance(f, LrFactor) for f in scheduler.lr_lambdas)


def follow_skip(scheduler: Any) -> None:
    """Let a ``LambdaLR`` ask for its factor again, at the same count: it may read the attempts, as sizes do."""
    if not isinstance(scheduler, LambdaLR):
        return
    steps = scheduler._step_count
    scheduler._step_count = 0  # at 1, torch warns of a step ahead of the optimizer's first
    scheduler.last_epoch -= 1
    scheduler.step()
    scheduler._step_count = steps
