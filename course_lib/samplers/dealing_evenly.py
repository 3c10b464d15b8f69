"""The arithmetic of dealing an order to the ranks: where each step begins, and who gets what of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from course_lib.samplers.epoch import SamplerTail
from course_lib.samplers.permutation import BLOCK, Ints
from course_lib.steps.counting import EqualBatches


class Steps:
    """How the positions from ``position`` to ``size`` are dealt: step by step, in each step to the ranks in turn.

    Steps are of equal size but for one position, the larger ones first. That makes what is left after any step
    exactly what dealing the rest again would give: a resume on as many ranks yields the same batches.
    """

    def __init__(
        self, size: int, batch_size: int, tail: SamplerTail, position: int, world_size: int, *, beside: int = 0
    ) -> None:
        self.position, self.world_size = position, world_size
        self.beside = beside
        """Samples of another stream in every batch."""
        self.left = size - position
        self.size = size
        full = batch_size * world_size
        self.count = self.left // full if tail == "drop" else -(-self.left // full)
        # Positions in a step of all ranks: `larger_count` steps of one more than `smaller`, then the others. "spread"
        # shares what is left out to the fewest steps that hold it; the others have full steps only.
        if tail == "spread":
            self.smaller, self.larger_count = divmod(self.left, self.count) if self.count else (0, 0)
        else:
            self.smaller, self.larger_count = full, 0

    def start(self, step: int) -> int:
        """The position where a step begins; padded positions don't count beyond the end."""
        return min(self.size, self.position + step * self.smaller + min(step, self.larger_count))

    def sizes(self, step: int) -> list[int]:
        """What each rank gets in a step."""
        total = self.smaller + (step < self.larger_count)
        return [total * (r + 1) // self.world_size - total * r // self.world_size for r in range(self.world_size)]

    @property
    def dealt(self) -> tuple[EqualBatches, ...]:
        """The larger steps, then the others."""
        counts = (self.larger_count, self.smaller + 1), (self.count - self.larger_count, self.smaller)
        return tuple(
            EqualBatches(steps, -(-total // self.world_size) + self.beside, total) for steps, total in counts if steps
        )

    def of_rank(self, rank: int) -> Iterator[tuple[Ints, Ints]]:
        """Blocks of one rank's positions, one after the other, with the sizes of the batches that they make.

        Padded positions lie beyond the end, where the order begins again.
        """
        per_block = max(1, BLOCK * self.world_size // max(1, self.smaller))
        for first in range(0, self.count, per_block):
            # Of each step of the block, where it starts, its size over all ranks, and this rank's part: rank r of G has
            # [total·r // G, total·(r + 1) // G), so that the parts meet without a gap and differ by at most one.
            steps = np.arange(first, min(first + per_block, self.count), dtype=np.int64)
            starts = self.position + steps * self.smaller + np.minimum(steps, self.larger_count)
            totals = self.smaller + (steps < self.larger_count).astype(np.int64)
            begins = totals * rank // self.world_size
            sizes = totals * (rank + 1) // self.world_size - begins
            # Counting 0, 1, 2 … through the block, minus what came before its batch, is the place in that batch.
            yield np.arange(sizes.sum()) + np.repeat(starts + begins - (np.cumsum(sizes) - sizes), sizes), sizes
