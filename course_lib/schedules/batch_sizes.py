"""The batch size that goes with a size: by a budget, by a table of what was measured, or for an effective batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from course_lib._arguments import int_of_at_least
from course_lib.schedules.sized import Size, checked_size, size_text


class Fitted(NamedTuple):
    batch_size: int
    budget_used: float


def fit_budget(
    sizes: Iterable[Size],
    budget: float,
    dims: int,
    cost: Callable[[Any], float] | None,
    multiple_of: int,
    max_batch_size: int | None,
) -> dict[Size, Fitted]:
    """The largest batch of each size that a budget holds, see ``SizeSchedule.with_budget``."""
    if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 < budget < math.inf:
        raise ValueError(f"budget must be a finite number above 0, got {budget!r}")
    multiple_of = int_of_at_least(1, "multiple_of", multiple_of)
    most = math.inf if max_batch_size is None else int_of_at_least(multiple_of, "max_batch_size", max_batch_size)
    costs = {size: cost(size) if cost else _cost(size, dims) for size in sizes}
    if not all(isinstance(each, Real) and 0 < each < math.inf for each in costs.values()):
        raise ValueError(f"the cost of every size must be above 0 and finite, got {costs!r}")
    too_large = {size: each for size, each in costs.items() if each * multiple_of > budget}
    if too_large:
        told = ", ".join(f"size {size_text(size)} costs {each:,}" for size, each in too_large.items())
        raise ValueError(
            f"a budget of {budget:,} holds no batch of {multiple_of}: {told} a sample. Give a budget of at least "
            f"{max(too_large.values()) * multiple_of:,}, or leave these sizes out"
        )
    if max_batch_size is None and budget / min(costs.values(), default=budget) >= 2**31:
        raise ValueError(
            f"a budget of {budget:,} holds {budget / min(costs.values()):.0e} samples: are the costs {costs!r} in "
            "another unit than the budget? Give max_batch_size where they are meant so"
        )
    fitted = {}
    for size, each in costs.items():
        batch_size = int(min(_held(budget, each), most)) // multiple_of * multiple_of
        fitted[size] = Fitted(batch_size, batch_size * each / budget)
    return fitted


def _cost(size: Size, dims: int) -> int:
    return math.prod(size) if isinstance(size, tuple) else size ** int_of_at_least(1, "dims", dims)


def _held(budget: float, cost: float) -> int:
    """How many of a cost a budget holds. A division of floats may be one short: 1.0 // 0.1 is 9."""
    held = int(budget // cost)
    if (held + 1) * cost <= budget:
        return held + 1
    return held


def batch_size_in(table: Mapping[Any, Any], size: Size) -> int:
    """The batch size of a size, or of the shapes that end with it; see ``SizeSchedule.from_batch_sizes``."""
    size = checked_size("size", size)
    image = (size, size) if isinstance(size, int) else size
    keys = [key for key in table if key in (size, (size,))]
    if not keys:
        keys = [key for key in table if isinstance(key, tuple) and key[-len(image) :] == image]
    name = f"the batch size of size {size!r} in the table"
    batch_sizes = {int_of_at_least(1, name, getattr(table[key], "batch_size", table[key])) for key in keys}
    if len(batch_sizes) != 1:
        what = f"several batch sizes {sorted(batch_sizes)}" if batch_sizes else "no batch size"
        raise ValueError(f"the table has {what} for size {size!r}: give {size!r} itself as a key, got {list(table)!r}")
    return batch_sizes.pop()
