"""Samplers that deal an epoch by the arithmetic of its steps: where each one begins, and who gets how much of it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from course_lib._arguments import int_of_at_least
from course_lib.samplers.epoch import EpochBatchSampler


class StepsLeft(Protocol):
    """What is left of an epoch from a position on, in steps: a step is one batch on every rank."""

    count: int
    size: int
    """Positions in the whole epoch."""

    def start(self, step: int) -> int:
        """The position where a step begins."""

    def sizes(self, step: int) -> list[int]:
        """What each rank gets in a step."""


class StepsSampler(EpochBatchSampler):
    """A sampler that says of each position in which steps the rest of the epoch is dealt."""

    @abstractmethod
    def _steps(self, position: int, world_size: int) -> StepsLeft:
        """What is left from a position on."""

    def loss_weight(self, batch: int) -> float:
        """This rank's weight for the mean loss of a batch, so that DDP's average over ranks is the mean over samples.

        Under ``tail="spread"`` the ranks' batches may differ in size. DDP averages gradients over ranks; the loss times
        ``samples here · ranks / samples of the step`` makes that average exact.

        In a ``TwoStreamBatchSampler`` it is for the mean over the *primary* samples. Where it is 0, the batch has none,
        and their mean is NaN, also times 0: take ``0 * outputs.sum()`` in its place.

        Args:
            batch: Its number in the current iteration, from 0.
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

    def _check(self, position: int, world_size: int) -> None:
        check_position(position, self._steps(0, world_size).size)


def check_position(position: int, size: int) -> None:
    if position > size:
        raise ValueError(f"the state stands at position {position} of an epoch of {size}: start one with set_epoch")
