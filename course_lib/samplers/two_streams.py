"""Two sets of indices in each batch: one seen once an epoch, the other cycled beside it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from course_lib._occurrences import Repeats, with_occurrences
from course_lib._words import int_of_at_least
from course_lib.samplers.dealing_evenly import Steps
from course_lib.samplers.epoch import SamplerTail
from course_lib.samplers.in_steps import StepsSampler
from course_lib.samplers.permutation import IndexPermutation, Ints


class TwoStreamBatchSampler(StepsSampler):
    """Each batch has indices of two sets: the primary is seen once an epoch, the secondary is cycled beside it.

    For labelled and unlabelled data, rare and frequent classes, a new task and a replay buffer. A batch is the
    primary's indices, then the secondary's, which is cycled in passes, each in a random order of its own: within an
    epoch its indices are used equally often, give or take one.

    >>> list(TwoStreamBatchSampler(range(6), [100, 101], primary_batch_size=2, secondary_batch_size=1, shuffle=False))
    [[0, 1, 100], [2, 3, 101], [4, 5, 100]]

    Args:
        primary_indices, secondary_indices: Indices into the dataset. They may overlap; a warning says so.
        primary_batch_size: Largest number of primary indices in a batch of one rank.
        secondary_batch_size: Number of secondary indices in a batch of one rank; of a smaller set, some come more than
            once.
        shuffle: Whether each epoch has a random order; else the order given.
        seed: Of the order, together with the epoch.
        tail: What becomes of a primary that does not divide, see ``ShuffledBatchSampler``. With ``"spread"`` a
            batch may be without a primary index, if there are too few for all ranks.
        num_replicas, rank: Default: the process group's, or 1 and 0 without one, read when iterated.

    Raises:
        ValueError: A set is empty or holds what is no index, or an argument is out of its range.
    """

    def __init__(
        self,
        primary_indices: Sequence[int],
        secondary_indices: Sequence[int],
        primary_batch_size: int,
        secondary_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: SamplerTail = "spread",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(shuffle=shuffle, seed=seed, tail=tail, num_replicas=num_replicas, rank=rank)
        self.primary_indices = _indices("primary_indices", primary_indices)
        self.secondary_indices = _indices("secondary_indices", secondary_indices)
        self.primary_batch_size = int_of_at_least(1, "primary_batch_size", primary_batch_size)
        self.secondary_batch_size = int_of_at_least(1, "secondary_batch_size", secondary_batch_size)
        self._primary_repeats, self._secondary_repeats = map(Repeats, (self.primary_indices, self.secondary_indices))
        self.batch_size = self.primary_batch_size + self.secondary_batch_size
        self.max_index = int(max(self.primary_indices.max(), self.secondary_indices.max()))
        in_both = np.isin(self.secondary_indices, self.primary_indices)
        self._in_both = in_both * np.int64(2**32)
        """What the count of a secondary index begins with, so that it never meets that of the primary."""
        if in_both.any():
            warnings.warn(
                f"{in_both.sum()} indices are in both streams ({self.secondary_indices[in_both][:3].tolist()}…): each "
                "is seen as primary once an epoch, and as secondary besides",
                stacklevel=2,
            )

    def _steps(self, position: int, world_size: int) -> Steps:
        # An epoch covers the primary; a batch's samples are those of both streams.
        size, beside = self.primary_batch_size, self.secondary_batch_size
        return Steps(len(self.primary_indices), size, self.tail, position, world_size, beside=beside)

    def _identity(self) -> dict[str, Any]:
        sizes = {"num_primary": len(self.primary_indices), "num_secondary": len(self.secondary_indices)}
        names = ("primary_batch_size", "secondary_batch_size", "seed", "shuffle", "tail")
        return sizes | {name: getattr(self, name) for name in names}

    def _batches(self, position: int, batches_before: int, world_size: int, rank: int) -> Iterator[list[int]]:
        num_primary, size = len(self.primary_indices), self.secondary_batch_size
        order = IndexPermutation(num_primary, (self.seed, 0, self.epoch)) if self.shuffle else None
        secondary = _Cycle(len(self.secondary_indices), size, (self.seed, 1, self.epoch) if self.shuffle else None)
        # The batches of all ranks are numbered through the epoch: of those left, rank r of G has r, r + G, r + 2G …
        number = batches_before + rank
        for positions, sizes in self._steps(position, world_size).of_rank(rank):
            rounds, places = np.divmod(positions, num_primary)
            places = order(places) if order else places
            primary = self.primary_indices[places].tolist()
            primary_times = self._primary_repeats.occurrences(rounds, places).tolist()
            begin = 0
            for end in np.cumsum(sizes).tolist():
                passes, places = secondary.batch(number)
                secondary_times = self._secondary_repeats.occurrences(passes, places) + self._in_both[places]
                yield with_occurrences(
                    primary[begin:end] + self.secondary_indices[places].tolist(),
                    primary_times[begin:end] + secondary_times.tolist(),
                )
                begin, number = end, number + world_size


class _Cycle:
    """A set cycled without end, cut into batches of ``size``: any batch by its number, none with an index twice.

    A batch is the pass that each element is of, and its place in the set.
    """

    def __init__(self, n: int, size: int, seed: tuple[int, ...] | None) -> None:
        self.n, self.size, self.seed = n, size, seed
        # A set of less than two batches keeps one order: a new one could not be mended where two passes meet.
        self.one_order = seed is None or n < 2 * size
        self._orders: dict[int, Ints] = {}

    def batch(self, number: int) -> tuple[Ints, Ints]:
        positions = np.arange(number * self.size, (number + 1) * self.size)
        passes, offsets = np.divmod(positions, self.n)
        parts = [self._order(p)[offsets[passes == p]] for p in range(passes[0], passes[-1] + 1)]
        return passes, np.concatenate(parts)

    def _order(self, number: int) -> Ints:
        number = 0 if self.one_order else number
        if number not in self._orders:
            order = self._drawn(number)
            before = number * self.n % self.size  # indices of the batch that straddles into this pass
            if before and number:
                # The last indices of the pass before must not come again in the same batch: they wait a little.
                head = order[: self.size]
                clash = np.isin(head, self._drawn(number - 1)[-before:])
                order[: self.size] = np.concatenate([head[~clash], head[clash]])
            self._orders = {p: o for p, o in self._orders.items() if p == number - 1} | {number: order}
        return self._orders[number]

    def _drawn(self, number: int) -> Ints:
        if self.seed is None:
            return np.arange(self.n)
        return np.random.default_rng(np.random.SeedSequence((*self.seed, number))).permutation(self.n)


def _indices(name: str, indices: Sequence[int]) -> Ints:
    array = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a sequence of at least one index, got {indices!r}")
    if array.dtype.kind not in "iu" or array.min() < 0:
        raise ValueError(f"{name} must hold integers of at least 0, got {indices!r:.200}")
    return array.astype(np.int64)
