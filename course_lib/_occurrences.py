"""Which time it is, in an epoch's order over all ranks, that an index comes.

A sample that comes twice in an epoch is to be augmented in two ways, and the same two on any number of ranks. So a
sampler, which knows where in the whole order it stands, says it with the batch; a batch in which each index comes for
the first time is the plain list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RepeatedIndices(list[Any]):
    """A batch's indices, some of which the epoch has had before: ``occurrences`` says how often, for each."""

    occurrences: list[int]


def with_occurrences(indices: list[Any], occurrences: Sequence[int]) -> list[Any]:
    """The batch that carries its occurrences, 0 for a first time; the list itself where there are no others."""
    if not any(occurrences):
        return indices
    batch = RepeatedIndices(indices)
    batch.occurrences = list(occurrences)
    return batch


class Repeats:
    """Which elements of an order are equal, so that it can be said which time an element comes in cycles of it."""

    def __init__(self, indices: NDArray[np.int64]) -> None:
        _, group, counts = np.unique(indices, return_inverse=True, return_counts=True)
        self.all_differ = len(counts) == len(indices)
        if not self.all_differ:
            self.count = counts[group]
            """Of each element: how many are equal to it, itself included."""
            self.before = np.empty_like(group)
            """Of each: how many of them come before it."""
            firsts = np.cumsum(counts) - counts
            self.before[np.argsort(group, kind="stable")] = np.arange(len(group)) - np.repeat(firsts, counts)

    def occurrences(self, rounds: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the elements at some places, when the order has been gone through so often before."""
        return rounds if self.all_differ else self.before[places] + rounds * self.count[places]
