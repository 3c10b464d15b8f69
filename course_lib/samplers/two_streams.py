"""Two sets of indices in each batch: one seen once an epoch, the other cycled beside it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from course_lib._arguments import int_of_at_least
from course_lib._occurrences import Repeats, with_occurrences
from course_lib.samplers.epoch import SamplerTail
from course_lib.samplers.equal_steps import Steps
from course_lib.samplers.in_steps import StepsSampler
from course_lib.samplers.permutation import IndexPermutation, Ints
from course_lib.steps.dealt import Dealing


class TwoStreamBatchSampler(StepsSampler):
    """Each batch has indices of two sets: the primary is seen once an epoch, the secondary is cycled beside it.

    For labelled and unlabelled data, rare and frequent classes, a new task and a replay buffer. A batch is the
    primary's indices, then the secondary's. The secondary is cycled in passes, each in a random order of its own;
    within an epoch its indices are used equally often, give or take one.

    >>> list(TwoStreamBatchSampler(range(6), [100, 101], primary_batch_size=2, secondary_batch_size=1, shuffle=False))
    [[0, 1, 100], [2, 3, 101], [4, 5, 100]]

    Works with a Trainer's default flags, with ``use_distributed_sampler=False``, with Fabric and with plain DDP, and
    yields the same batches in all four; see :class:`~course_lib.samplers.EpochBatchSampler`.

    Args:
        primary_indices, secondary_indices: Indices into the dataset. They may overlap; a warning says so.
        primary_batch_size: Largest number of primary indices in a batch of one rank.
        secondary_batch_size: Number of secondary indices in a batch of one rank.
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
        self._warn_of_odd_streams()

    epochs_alike = True

    @property
    def batch_size(self) -> int:
        """Largest number of indices in a batch of one rank."""
        return self.primary_batch_size + self.secondary_batch_size

    @property
    def max_index(self) -> int:
        """The largest index that it can yield."""
        return int(max(self.primary_indices.max(), self.secondary_indices.max()))

    def _warn_of_odd_streams(self) -> None:
        both = np.intersect1d(self.primary_indices, self.secondary_indices)
        if both.size:
            warnings.warn(
                f"{both.size} indices are in both streams ({both[:3].tolist()}…): each is seen as primary once an "
                "epoch, and as secondary besides",
                stacklevel=3,
            )
        if len(self.secondary_indices) < self.secondary_batch_size:
            warnings.warn(
                f"the secondary has {len(self.secondary_indices)} indices, fewer than the {self.secondary_batch_size} "
                "of a batch: every batch holds some of them more than once. Lower secondary_batch_size to avoid it",
                stacklevel=3,
            )

    def _steps(self, position: int, world_size: int) -> Steps:
        return Steps(len(self.primary_indices), self.primary_batch_size, self.tail, position, world_size)

    def _identity(self) -> dict[str, Any]:
        sizes = {"num_primary": len(self.primary_indices), "num_secondary": len(self.secondary_indices)}
        names = ("primary_batch_size", "secondary_batch_size", "seed", "shuffle", "tail")
        return sizes | {name: getattr(self, name) for name in names}

    def _dealing(self, position: int, world_size: int) -> Dealing:
        # An epoch covers the primary; a batch's samples are those of both streams.
        steps = self._steps(position, world_size)
        return Dealing(len(self.primary_indices) - position, steps.equal(beside=self.secondary_batch_size))

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

    @cached_property
    def _primary_repeats(self) -> Repeats:
        return Repeats(self.primary_indices)

    @cached_property
    def _secondary_repeats(self) -> Repeats:
        return Repeats(self.secondary_indices)

    @cached_property
    def _in_both(self) -> Ints:
        """What the count of a secondary index begins with, so that it never meets that of the primary."""
        return np.isin(self.secondary_indices, self.primary_indices) * np.int64(2**32)


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
