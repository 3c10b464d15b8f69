"""What counts as a spike of the gradients' norm."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from course_lib._words import int_of_at_least

SIGMA = 1.4826
"""A normal distribution's standard deviation is this many median absolute deviations."""
LEAST_SPREAD = 0.1
"""The spread is taken as at least this part of the median: a history of equal norms rejects no rounding."""


class SpikeDetector:
    """Judge a norm against those that were accepted before it: robustly, and never fed what it rejected.

    A mean and a standard deviation are moved by the very values that they should find. The median and the median
    absolute deviation (MAD) stay within the range of the good norms until half of the history is bad. The limit is
    ``median + factor · max(1.4826 · MAD, 0.1 · median)``: with a factor of 10 at least twice the median. A jump that
    lasts is rejected as well, until ``max_consecutive_skips`` ends the run.

    Args:
        factor: How many robust standard deviations above the median are still accepted; None accepts all finite norms.
        history: How many accepted norms are remembered.
        min_history: How many there must be before one is judged.
    """

    def __init__(self, factor: float | None = None, *, history: int = 128, min_history: int = 16) -> None:
        if factor is not None and not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise ValueError(f"spike_factor must be a positive number or None, got {factor!r}")
        self.factor = factor
        self.min_history = int_of_at_least(1, "min_history", min_history)
        history = int_of_at_least(1, "history", history)
        if self.min_history > history:
            raise ValueError(f"min_history must be at most history, {history}, got {min_history}")
        self.accepted: deque[float] = deque(maxlen=history)

    @property
    def limit(self) -> float:
        """The largest norm that would be accepted now; infinity while nothing is judged."""
        if self.factor is None or len(self.accepted) < self.min_history:
            return math.inf
        ordered = sorted(self.accepted)  # its deviations fall and then rise: to sort them costs next to nothing
        median = statistics.median(ordered)
        if median == 0:  # no scale yet to judge by
            return math.inf
        deviation = statistics.median([abs(norm - median) for norm in ordered])
        return median + self.factor * max(SIGMA * deviation, LEAST_SPREAD * median)

    def accept(self, norm: float) -> None:
        """Remember a norm whose step was made."""
        if self.factor is not None:
            self.accepted.append(norm)

    def restore(self, norms: Iterable[float]) -> None:
        """Remember these in place of what it has accepted."""
        self.accepted.clear()
        self.accepted.extend(norms)
