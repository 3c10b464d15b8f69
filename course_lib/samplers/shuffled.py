"""A shuffled dataset, dealt to the ranks: every index once, in O(1) memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from course_lib._occurrences import with_occurrences
from course_lib._words import int_of_at_least
from course_lib.samplers.dealing_evenly import Steps
from course_lib.samplers.epoch import SamplerTail
from course_lib.samplers.in_steps import StepsSampler
from course_lib.samplers.permutation import IndexPermutation


class ShuffledBatchSampler(StepsSampler):
    """Batches of a shuffled dataset, dealt to the ranks: every index once an epoch, resumable anywhere in O(1).

    >>> for rank in 0, 1:
    ...     print(list(ShuffledBatchSampler(10, batch_size=3, seed=1, num_replicas=2, rank=rank)))
    [[8, 4], [2, 5]]
    [[7, 0, 1], [9, 6, 3]]

    Args:
        num_samples: Samples in the dataset, up to 2**62.
        batch_size: Largest number of indices in a batch of one rank.
        shuffle: Whether each epoch has a random order; else that of the dataset.
        seed: Of the order, together with the epoch.
        tail: ``num_samples`` rarely divides. ``"spread"``: every index once, as many batches on every rank, their
            sizes differ by at most one. ``"drop"``: full batches only, the last indices of the order are left out.
            ``"pad"``: full batches only, the first indices of the order are repeated at its end.
        num_replicas, rank: Default: the process group's, or 1 and 0 without one, read when iterated.

    Raises:
        ValueError: An argument is out of its range; or ``tail="spread"`` would leave a rank without an index in some
            step (5 samples, 2 ranks, batches of 1): said when it is read, where the ranks are the process group's.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: SamplerTail = "spread",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(shuffle=shuffle, seed=seed, tail=tail, num_replicas=num_replicas, rank=rank)
        self.num_samples = int_of_at_least(1, "num_samples", num_samples)
        self.max_index = self.num_samples - 1
        self.batch_size = int_of_at_least(1, "batch_size", batch_size)
        if self.num_replicas is not None:
            self._check(0, self.num_replicas)

    def _steps(self, position: int, world_size: int) -> Steps:
        return Steps(self.num_samples, self.batch_size, self.tail, position, world_size)

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("num_samples", "batch_size", "seed", "shuffle", "tail")}

    def _batches(self, position: int, batches_before: int, world_size: int, rank: int) -> Iterator[list[int]]:
        order = IndexPermutation(self.num_samples, (self.seed, 0, self.epoch)) if self.shuffle else None
        for positions, sizes in self._steps(position, world_size).of_rank(rank):
            rounds: list[int] = []
            if self.tail == "pad":
                rounds = (positions // self.num_samples).tolist()
                positions = positions % self.num_samples
            indices = (order(positions) if order else positions).tolist()
            begin = 0
            for end in np.cumsum(sizes).tolist():
                yield with_occurrences(indices[begin:end], rounds[begin:end])
                begin = end
