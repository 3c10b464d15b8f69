"""Whether a series of numbers, one for each step, grows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def growth(series: Sequence[float]) -> float:
    """How much a series grows per step; 0 where it does not grow throughout.

    The last third must lie above the first, and both the lows and the highs must rise to the last third by at least
    half of what they rose before. The rate is that of the end.
    """
    n = len(series)
    third = n // 3
    thirds = [series[:third], series[third : n - third], series[n - third :]]
    lows, highs = [min(part) for part in thirds], [max(part) for part in thirds]
    if lows[2] <= highs[0]:
        return 0
    for first, middle, last in (lows, highs):
        if last <= middle or last - middle < (middle - first) / 2:
            return 0
    return (lows[2] - lows[1] + highs[2] - highs[1]) / (n - third)


def slowest_third(series: Sequence[float]) -> float:
    """How much a series grows per step in the slowest of its three thirds, on average."""
    n = len(series) - 1
    edges = [0, n // 3, n - n // 3, n]
    return min((series[b] - series[a]) / (b - a) for a, b in pairwise(edges))
