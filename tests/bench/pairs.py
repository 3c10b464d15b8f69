"""The ratio of two ways that were timed in pairs, with the interval of its median."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """The median of the pairs' ratios, and the order statistics between which it lies with 95 % of confidence."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} (95 %: {self.low:.3f} … {self.high:.3f}, {self.pairs} pairs)"


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of ours over theirs, pair by pair; distribution-free, by the binomial of a fair coin."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    n, below, left_out = len(ratios), 0.0, 0
    while (below := below + math.comb(n, left_out) / 2**n) <= 0.025:
        left_out += 1
    low = max(left_out - 1, 0)
    return Ratio(statistics.median(ratios), ratios[low], ratios[n - 1 - low], n)
