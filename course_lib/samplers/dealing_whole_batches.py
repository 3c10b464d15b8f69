"""The arithmetic of dealing batches of any size to the ranks: whole ones in turn, and what becomes of the last."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby, pairwise

from course_lib.samplers.epoch import SamplerTail
from course_lib.steps.counting import EqualBatches

Part = tuple[int, int]
"""Begin and end in the epoch's order of what a rank has in a step; behind the order's end it begins again."""


class WholeBatchSteps:
    """How the batches between ``edges`` are dealt from ``position`` on: step by step, in each a batch to every rank.

    The batches that fill no step are left out (``"drop"``), or followed by the epoch's first (``"pad"``), or shared out
    evenly (``"spread"``): if they have fewer indices than there are ranks, what lacks is taken from the step before.
    So what is left after any step is what dealing the rest again would give.
    """

    def __init__(self, edges: list[int], tail: SamplerTail, position: int, world_size: int) -> None:
        self.edges, self.position, self.world_size = edges, position, world_size
        self.size = edges[-1]
        self.first = bisect_right(edges, position) - 1  # the batch that the position is in
        self.whole, short = divmod(len(edges) - 1 - self.first, world_size)
        self.cut: list[list[Part]] = []
        """The steps behind the whole ones, in which batches are cut; of each, every rank's part."""
        if short and tail == "pad":
            self.whole += 1
        elif short and tail == "spread":
            self._share_out(self._batch(self.whole * world_size)[0])
        self.count = self.whole + len(self.cut)

    def _share_out(self, rest: int) -> None:
        enough = self.size - self.world_size  # an index for every rank comes from here on
        if rest > enough:
            before = self._batch((self.whole - 1) * self.world_size)[0] if self.whole else rest
            if enough - before < self.world_size:
                raise ValueError(
                    f'tail="spread" cannot share {self.size - rest} indices out to {self.world_size} ranks without an '
                    'empty batch: use tail="drop" or tail="pad"'
                )
            self.whole -= 1
            self.cut, rest = [self._shared(before, enough)], enough
        self.cut.append(self._shared(rest, self.size))

    def _shared(self, begin: int, end: int) -> list[Part]:
        edges = [begin + (end - begin) * rank // self.world_size for rank in range(self.world_size + 1)]
        return list(pairwise(edges))

    def _batch(self, number: int) -> Part:
        """A batch from the position on; behind the last one follows the first, a round later."""
        rounds, batch = divmod(self.first + number, len(self.edges) - 1)
        begin, end = self.edges[batch] + rounds * self.size, self.edges[batch + 1] + rounds * self.size
        return max(self.position, begin), end

    def part(self, step: int, rank: int) -> Part:
        """What a rank has in a step."""
        if step < self.whole:
            return self._batch(step * self.world_size + rank)
        return self.cut[step - self.whole][rank]

    def sizes(self, step: int) -> list[int]:
        """What each rank gets in a step."""
        return [end - begin for begin, end in (self.part(step, rank) for rank in range(self.world_size))]

    @property
    def dealt(self) -> tuple[EqualBatches, ...]:
        """The steps one after the other, those that are alike together."""
        steps = ((max(sizes), sum(sizes)) for sizes in map(self.sizes, range(self.count)))
        return tuple(EqualBatches(len(list(alike)), *of_each) for of_each, alike in groupby(steps))

    def start(self, step: int) -> int:
        """The position where a step begins, or where the last one has ended."""
        if step == 0:
            return self.position
        return min(self.size, self.part(step - 1, self.world_size - 1)[1])
