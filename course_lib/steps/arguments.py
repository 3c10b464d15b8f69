"""The arguments of a plan, as a Trainer reads them: what is allowed, and what is said where it is not."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import get_args

from course_lib._arguments import int_of_at_least
from course_lib.steps.epochs import ShortWindow

PerEpoch = int | Mapping[int, int]
"""One value for all epochs, or ``{first epoch: value}`` where it changes on the way."""


def checked_short_window(short_window: ShortWindow) -> ShortWindow:
    if short_window not in get_args(ShortWindow):
        raise ValueError(f'short_window must be "step", "carry" or "zero", got {short_window!r}')
    return short_window


def checked_stops(max_epochs: int | None, max_steps: int, limit_train_batches: object) -> tuple[int, int, int | float]:
    """What ends a run and its epochs, or a ValueError: -1 is no limit."""
    max_epochs = -1 if max_epochs is None else int_of_at_least(-1, "max_epochs", max_epochs)
    max_steps = int_of_at_least(-1, "max_steps", max_steps)
    limit = _limit(limit_train_batches)
    if max_epochs == -1 and max_steps == -1:
        raise ValueError(
            "nothing ends this run: give max_epochs, max_steps or both (got max_epochs=None, max_steps=-1)"
        )
    return max_epochs, max_steps, limit


def refuse_within_an_epoch(position: int, num_samples: int, limit: int | float, short_window: ShortWindow) -> None:
    if position and (short_window == "carry" or limit != 1.0):
        raise ValueError(
            f"within an epoch ({position} of {num_samples} samples are done), what is left can be planned without "
            f'limit_train_batches and short_window="carry" alone, got {limit!r} and {short_window!r}'
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
