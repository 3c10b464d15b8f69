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
        self.before: NDArray[np.int64] | None = None
        """Of each element: how many before it are equal to it. None: all differ."""
        self.count: NDArray[np.int64] | None = None
        """Of each: how many are, itself included."""
        by_value = np.argsort(indices, kind="stable")
        ordered = indices[by_value]
        new = np.append(True, ordered[1:] != ordered[:-1])
        if not new.all():
            firsts = np.flatnonzero(new)
            counts = np.diff(np.append(firsts, len(indices)))
            self.before, self.count = np.empty_like(by_value), np.empty_like(by_value)
            self.before[by_value] = np.arange(len(indices)) - np.repeat(firsts, counts)
            self.count[by_value] = np.repeat(counts, counts)

    def occurrences(self, rounds: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the elements at some places, when the order has been gone through so often before."""
        if self.before is None or self.count is None:
            return rounds
        times: NDArray[np.int64] = self.before[places] + rounds * self.count[places]
        return times
