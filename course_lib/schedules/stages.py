"""The stages of a schedule as data: which size and batch from when on, and how many micro-batches make an update."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from course_lib.schedules.batch_sizes import nearest_choices
from course_lib.schedules.sized import Size, size_text

Unit = Literal["epochs", "optimizer_steps", "samples"]
ONE_OF = {"epochs": "epoch", "optimizer_steps": "optimizer step", "samples": "sample"}


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

    def start_in_words(self, unit: Unit) -> str:
        return f"{ONE_OF[unit]} {self.start:,}"


@dataclass(frozen=True)
class Stages:
    """All stages of a schedule: what a plan and a sampler ask of it."""

    stages: tuple[SizeStage, ...]
    """Their starts begin at 0 and grow."""
    unit: Unit
    effective_batch_size: int | None
    """Samples of an update over all ranks; None: ``accumulate_grad_batches`` decides."""
    accumulate_grad_batches: int

    @cached_property
    def starts(self) -> list[int]:
        return [stage.start for stage in self.stages]

    def number_at(self, time: int) -> int:
        """The number of the stage at a time in the schedule's unit, from 0."""
        return bisect_right(self.starts, time) - 1

    def end_of(self, number: int) -> int | None:
        """When a stage ends, in the schedule's unit; None for the last, which goes on."""
        return self.starts[number + 1] if number + 1 < len(self.starts) else None

    def window_size(self, stage: SizeStage, world_size: int) -> int:
        """Micro-batches of one rank in a full window of this stage.

        Raises:
            ValueError: ``effective_batch_size`` is no multiple of what a micro-batch of all ranks holds.
        """
        if self.effective_batch_size is None:
            return self.accumulate_grad_batches
        of_all_ranks = stage.batch_size * world_size
        k, rest = divmod(self.effective_batch_size, of_all_ranks)
        if rest or k == 0:
            ranks = f" on {world_size} ranks" if world_size > 1 else ""
            raise ValueError(
                f"effective_batch_size={self.effective_batch_size} is no multiple of the {of_all_ranks} samples that "
                f"batches of {stage.batch_size}{ranks} make at size {size_text(stage.size)}. "
                + nearest_choices(self.effective_batch_size, stage.batch_size, world_size)
            )
        return k

    def samples_per_step(self, stage: SizeStage, world_size: int = 1) -> int:
        """Samples of an update over all ranks."""
        if self.effective_batch_size is not None:
            return self.effective_batch_size
        return stage.batch_size * world_size * self.accumulate_grad_batches
