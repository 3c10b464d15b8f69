"""The stages of a schedule as data: which size and batch from when on, and how many micro-batches make an update."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from course_lib.schedules.sized import Size, size_text

Unit = Literal["epochs", "optimizer_steps", "samples"]


@dataclass(frozen=True)
class SizeStage:
    """A size and the batch that goes with it."""

    start: int
    """In the schedule's unit."""
    size: Size
    batch_size: int
    """Of a micro-batch of one rank."""
    budget_used: float | None = None
    """The share of the budget that a full batch costs, where a budget made the schedule."""


class Stages:
    """What a plan and a sampler ask of a ``SizeSchedule``, which is one."""

    stages: tuple[SizeStage, ...]
    """Their starts begin at 0 and grow."""
    unit: Unit
    effective_batch_size: int | None
    """Samples of an update over all ranks; None: ``micro_batches`` decides."""
    micro_batches: int
    """Of one rank in every window, where ``effective_batch_size`` does not decide."""

    def stage_at(self, time: int) -> SizeStage:
        """The stage at a time in the schedule's unit: in an epoch, at an optimizer step, or after so many samples."""
        return self.stages[bisect_right(self.stages, time, key=lambda stage: stage.start) - 1]

    def end_of(self, stage: SizeStage) -> int | None:
        """When a stage ends, in the schedule's unit; None for the last, which goes on."""
        following = bisect_right(self.stages, stage.start, key=lambda stage: stage.start)
        return self.stages[following].start if following < len(self.stages) else None

    def window_size(self, stage: SizeStage, world_size: int) -> int:
        """Micro-batches of one rank in a full window of this stage.

        Raises:
            ValueError: ``effective_batch_size`` is no multiple of what a micro-batch of all ranks holds.
        """
        if self.effective_batch_size is None:
            return self.micro_batches
        of_all_ranks = stage.batch_size * world_size
        k, rest = divmod(self.effective_batch_size, of_all_ranks)
        if rest or k == 0:
            ranks = f" on {world_size} ranks" if world_size > 1 else ""
            near = " or ".join(str(windows * of_all_ranks) for windows in (k, k + 1) if windows)
            raise ValueError(
                f"effective_batch_size={self.effective_batch_size} is no multiple of the {of_all_ranks} samples that "
                f"batches of {stage.batch_size}{ranks} make at size {size_text(stage.size)}. Use "
                f"effective_batch_size={near}"
            )
        return k

    def samples_per_step(self, stage: SizeStage) -> int:
        """Samples of an update on one rank, or over all ranks where ``effective_batch_size`` decides."""
        return self.effective_batch_size or stage.batch_size * self.micro_batches
