"""The batch size that goes with a size: the largest that a budget holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NamedTuple

from course_lib._words import int_of_at_least
from course_lib.schedules.sized import Size, size_text


class Fitted(NamedTuple):
    batch_size: int
    budget_used: float


def fit_budget(
    sizes: Iterable[Size], budget: float, cost: Callable[[Any], float], multiple_of: int
) -> dict[Size, Fitted]:
    """The largest batch of each size that a budget holds, see ``SizeSchedule.with_budget``."""
    if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 < budget < math.inf:
        raise ValueError(f"budget must be a finite number above 0, got {budget!r}")
    multiple_of = int_of_at_least(1, "multiple_of", multiple_of)
    costs = {size: cost(size) for size in sizes}
    if not all(isinstance(each, Real) and 0 < each < math.inf for each in costs.values()):
        raise ValueError(f"the cost of every size must be above 0 and finite, got {costs!r}")
    too_large = {size: each for size, each in costs.items() if each * multiple_of > budget}
    if too_large:
        told = ", ".join(f"size {size_text(size)} costs {each:,}" for size, each in too_large.items())
        raise ValueError(
            f"a budget of {budget:,} holds no batch of {multiple_of}: {told} a sample. Give a budget of at least "
            f"{max(too_large.values()) * multiple_of:,}, or leave these sizes out"
        )
    fitted = {}
    for size, each in costs.items():
        batch_size = _held(budget, each) // multiple_of * multiple_of
        fitted[size] = Fitted(batch_size, batch_size * each / budget)
    return fitted


def pixels(size: Size) -> int:
    """Of a square image of that side, or of all that a tuple spans."""
    return math.prod(size) if isinstance(size, tuple) else size**2


def _held(budget: float, cost: float) -> int:
    """How many of a cost a budget holds. A division of floats may be one short: 1.0 // 0.1 is 9."""
    held = int(budget // cost)
    if (held + 1) * cost <= budget:
        return held + 1
    return held
