"""The arguments of a plan, as a Trainer reads them: what is allowed, and what is said where it is not."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from course_lib._words import int_of_at_least

PerEpoch = int | Mapping[int, int]
"""One value for all epochs, or ``{first epoch: value}`` where it changes on the way."""
ShortWindow = Literal["step", "carry", "zero"]
"""What a short window at an epoch's end does: it steps, its gradients go on into the next epoch, or they are zeroed."""


@dataclass(frozen=True, kw_only=True)
class RunToPlan:
    """What ends a run and its epochs, what a short window does, and what was done before; see ``plan_steps``."""

    max_epochs: int = -1
    """-1: no limit."""
    max_steps: int = -1
    """-1: no limit."""
    limit_train_batches: int | float = 1.0
    short_window: ShortWindow = "step"
    steps_done: int = 0
    """Optimizer steps before those that are planned; 0 for a run from its start."""
    samples_done: int = 0
    """How far the run is in the data before that, over all ranks."""


def checked_run(**run: Any) -> RunToPlan:
    """These arguments of ``plan_steps`` as plain numbers, or a ValueError."""
    given = RunToPlan(**run)
    if given.short_window not in get_args(ShortWindow):
        raise ValueError(f'short_window must be "step", "carry" or "zero", got {given.short_window!r}')
    checked = RunToPlan(
        max_epochs=-1 if given.max_epochs is None else int_of_at_least(-1, "max_epochs", given.max_epochs),
        max_steps=int_of_at_least(-1, "max_steps", given.max_steps),
        limit_train_batches=_limit(given.limit_train_batches),
        short_window=given.short_window,
        steps_done=int_of_at_least(0, "steps_done", given.steps_done),
        samples_done=int_of_at_least(0, "samples_done", given.samples_done),
    )
    if checked.max_epochs == checked.max_steps == -1:
        raise ValueError(
            "nothing ends this run: give max_epochs, max_steps or both (got max_epochs=None, max_steps=-1)"
        )
    return checked


def refuse_within_an_epoch(position: int, num_samples: int, run: RunToPlan) -> None:
    if position and (run.short_window == "carry" or run.limit_train_batches != 1.0):
        raise ValueError(
            f"within an epoch ({position} of {num_samples} samples are done), what is left can be planned without "
            f'limit_train_batches and short_window="carry" alone, got {run.limit_train_batches!r} and '
            f"{run.short_window!r}"
        )


def by_epoch(name: str, value: PerEpoch, *, before_first: int | None) -> dict[int, int]:
    """The values by the first epoch that has each."""
    if not isinstance(value, Mapping):
        return {0: int_of_at_least(1, name, value)}
    if not value:
        raise ValueError(f"{name} must be an int or {{epoch: int}} with at least one epoch, got {{}}")
    values = {
        int_of_at_least(0, f"an epoch of {name}", epoch): int_of_at_least(1, f"{name}[{epoch!r}]", size)
        for epoch, size in value.items()
    }
    if before_first is not None:
        values.setdefault(0, before_first)
    if 0 not in values:
        raise ValueError(f"{name} must say its value for epoch 0, got {dict(value)!r}")
    return values


def at_epoch(values: Mapping[int, int], epoch: int) -> int:
    return values[max(first for first in values if first <= epoch)]


def limited(batches: int, limit: int | float) -> int:
    """The batches of an epoch that ``limit_train_batches`` leaves, by a Trainer's own arithmetic."""
    if not isinstance(limit, float):
        return min(batches, limit)
    return batches if limit == 1.0 else int(batches * limit)  # 1.0 is no share, and a float has 53 bits


def _limit(limit: object) -> int | float:
    # As a Trainer reads it: the type decides, 1 is one batch and 1.0 all of them.
    if isinstance(limit, numbers.Integral) and not isinstance(limit, bool) and int(limit) >= 0:
        return int(limit)
    if isinstance(limit, numbers.Real) and not isinstance(limit, numbers.Integral) and 0.0 <= float(limit) <= 1.0:
        return float(limit)
    raise ValueError(
        "limit_train_batches must be a number of batches (int of at least 0) or a share (float from 0.0 to 1.0), "
        f"got {limit!r}"
    )
