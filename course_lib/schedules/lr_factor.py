"""The learning rate beside a batch that changes: linear, by the square root, or not at all.

A larger batch averages over more samples, so its gradient is less noisy and admits a larger step. How much larger is
a choice that a run should name. The rule: *the factor follows the samples of an update, on all ranks and in all its
micro-batches together*; where accumulation holds them constant, it is 1.

    >>> from course_lib.schedules import SizeSchedule
    >>> schedule = SizeSchedule({0: (32, 64), 5: (64, 16)})
    >>> factor = schedule.lr_factor("linear")
    >>> factor(4), factor(5)
    (1.0, 0.25)

``"linear"``: Goyal et al., *Accurate, Large Minibatch SGD*, 2017. ``"sqrt"``: Krizhevsky, *One weird trick*, 2014.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

LrRule = Literal["linear", "sqrt", "none"]
"""How the learning rate follows the samples of an update: in proportion, by the square root, or not."""

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda ratio: 1.0}


@dataclass(frozen=True)
class LrFactor:
    """A step function for torch's ``LambdaLR``: the factor of the learning rate at a time."""

    starts: tuple[int, ...]
    factors: tuple[float, ...]

    def __call__(self, time: int) -> float:
        return self.factors[max(0, bisect_right(self.starts, time) - 1)]


def lr_factor(rule: LrRule, starts: list[int], samples_per_step: list[float]) -> LrFactor:
    """The factor from each start on, relative to the first number of samples."""
    if rule not in RULES:
        raise ValueError(f'rule must be "linear", "sqrt" or "none", got {rule!r}')
    factors = (RULES[rule](samples / samples_per_step[0]) for samples in samples_per_step)
    return LrFactor(tuple(starts), tuple(factors))
