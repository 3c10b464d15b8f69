"""Samplers that deal an epoch by the arithmetic of its steps: where each one begins, and who gets how much of it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from course_lib._ranks import world_size_of
from course_lib._words import int_of_at_least
from course_lib.samplers.epoch import EpochBatchSampler
from course_lib.steps import StepPlan
from course_lib.steps.counting import EqualBatches
from course_lib.steps.planning import Dealing, plan_dealt


class StepsLeft(Protocol):
    """What is left of an epoch from a position on, in steps: a step is one batch on every rank."""

    @property
    def count(self) -> int: ...

    @property
    def size(self) -> int:
        """Positions in the whole epoch."""

    @property
    def dealt(self) -> tuple[EqualBatches, ...]:
        """The steps one after the other, those that are alike together."""

    def start(self, step: int) -> int:
        """The position where a step begins, or where the last one has ended."""

    def sizes(self, step: int) -> list[int]:
        """What each rank gets in a step."""


class StepsSampler(EpochBatchSampler):
    """A sampler that says of each position in which steps the rest of the epoch is dealt, and so can be planned."""

    epochs_alike = True
    """Whether every epoch has batches of the same sizes: a plan then asks for one of them only."""

    @abstractmethod
    def _steps(self, position: int, world_size: int) -> StepsLeft:
        """What is left from a position on."""

    def loss_weight(self, batch: int) -> float:
        """This rank's weight for the mean loss of a batch, so that DDP's average over ranks is the mean over samples.

        ``samples here · ranks / samples of the step``, as under ``tail="spread"`` the ranks' batches may differ in
        size. ``batch``: its number in the current iteration, from 0.

        In a ``TwoStreamBatchSampler`` it is for the mean over the *primary* samples. Where it is 0, the batch has none,
        and their mean is NaN, also times 0: take ``0 * outputs.sum()`` in its place.
        """
        world_size, rank = self._world()
        steps = self._steps(self._position, world_size)
        batch = int_of_at_least(0, "batch", batch)
        if batch >= steps.count:
            raise ValueError(f"batch must be below the {steps.count} of this iteration, got {batch}")
        sizes = steps.sizes(batch)
        return sizes[rank] * world_size / sum(sizes)

    def _steps_left(self, position: int, world_size: int) -> int:
        return self._steps(position, world_size).count

    def _position_after(self, position: int, steps: int, world_size: int) -> int:
        return self._steps(position, world_size).start(steps)

    def plan_steps(self, *, world_size: int | None = None, **run: Any) -> StepPlan:
        """What ``course_lib.steps.plan_steps(sampler, …)`` calls; ``run``: its other keywords.

        Raises:
            ValueError: The sampler was made for another number of ranks, or cannot deal to so many.
        """
        ranks = self._planned_world_size(world_size)
        alone = copy.copy(self)

        def deal(epoch: int, position: int) -> Dealing:
            alone._begin(epoch)
            alone._check(position, ranks)
            steps = alone._steps(position, ranks)
            return Dealing(steps.size - position, steps.dealt)

        return plan_dealt(deal, epochs_alike=self.epochs_alike, world_size=ranks, **run)

    def _planned_world_size(self, world_size: int | None) -> int:
        if world_size is None:
            return self.num_replicas or world_size_of()
        world_size = int_of_at_least(1, "world_size", world_size)
        if world_size != (self.num_replicas or world_size):
            raise ValueError(
                f"this {type(self).__name__} deals to num_replicas={self.num_replicas} ranks wherever it runs, which "
                f"cannot be planned for world_size={world_size}: leave one of the two out"
            )
        return world_size

    def _check(self, position: int, world_size: int) -> None:
        steps = self._steps(position, world_size)
        if position > steps.size:
            raise ValueError(
                f"the state stands at position {position} of an epoch of {steps.size}: start one with set_epoch"
            )
        refuse_empty_batches(steps.dealt, steps.size - position, steps.size, world_size, self.epoch)


def refuse_empty_batches(dealt: Sequence[EqualBatches], left: int, size: int, world_size: int, epoch: int) -> None:
    """Raise a ValueError where a step leaves a rank without an index, of those that are left of an epoch."""
    # Where another stream is beside it, the largest batch has more than the one index that a rank has or has not.
    if any(equal.total < world_size and equal.largest <= 1 for equal in dealt):
        what, or_else = "samples", ""
        if left < size:
            what, or_else = "samples that are left of the epoch", ", or fewer ranks until the epoch ends"
        raise ValueError(
            f'tail="spread" cannot deal the {left} {what} to {world_size} ranks in epoch {epoch} without an empty '
            f'batch: use tail="drop" or tail="pad"{or_else}'
        )
