"""A run's optimizer steps, where batch and window change with a schedule, also within an epoch.

A Trainer estimates a run's length from its first epoch; a schedule makes every epoch another length. The rule is that
of ``course_lib.steps``, asked of each epoch: *every window steps once, the short one at an epoch's end as well.*

    >>> from course_lib.schedules import SizeSchedule
    >>> plan = SizeSchedule({0: (16, 16), 16: (32, 8), 32: (64, 4)}, unit="samples").plan(48, max_epochs=2)
    >>> plan.batches_per_epoch, plan.total_steps, [step for step, _ in plan.sizes]
    ({0: 7, 1: 12}, 19, [0, 1, 3])
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from course_lib.schedules.sized import size_text
from course_lib.schedules.stage_steps import ScheduledEpochs
from course_lib.schedules.stages import SizeStage, Stages
from course_lib.steps import StepPlan

LrRule = Literal["linear", "sqrt", "none"]
RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda ratio: 1.0}


@dataclass(frozen=True)
class LrFactor:
    """A step function for torch's ``LambdaLR``: the factor of the learning rate at an optimizer step."""

    starts: tuple[int, ...]
    factors: tuple[float, ...]

    def __call__(self, step: int) -> float:
        return self.factors[max(0, bisect_right(self.starts, step) - 1)]


@dataclass(frozen=True, kw_only=True)
class SchedulePlan(StepPlan):
    """A :class:`~course_lib.steps.StepPlan` that knows the schedule's sizes.

    ``per_rank_samples`` of a window is that of the rank that has most: under ``tail="spread"`` the ranks may differ by
    one sample.
    """

    spans: tuple[ScheduledEpochs, ...]
    schedule: Stages

    @property
    def sizes(self) -> list[tuple[int, SizeStage]]:
        """The stages that this run reaches, each with the optimizer step at which it begins."""
        reached: list[tuple[int, SizeStage]] = []
        for span in self.spans:
            batch = 0
            for equal in span.dealt:
                step = span.step_of(batch)
                if step < self.total_steps and (not reached or reached[-1][1] != equal.stage):
                    reached.append((step, equal.stage))
                batch += equal.steps
        return reached

    def lr_factor(self, rule: LrRule = "linear") -> LrFactor:
        """The factor of the learning rate, a function of the optimizer step, for ``LambdaLR`` stepped at each of them.

        A larger batch has less noise, and admits a larger step. The factor follows the samples of an update, on all
        ranks and in all its micro-batches together, relative to the first stage's: ``"linear"`` (Goyal et al.,
        *Accurate, Large Minibatch SGD*, 2017), by their square root, ``"sqrt"`` (Krizhevsky, *One weird trick*, 2014),
        or not, ``"none"``.
        """
        if rule not in RULES:
            raise ValueError(f'rule must be "linear", "sqrt" or "none", got {rule!r}')
        sizes = self.sizes
        if not sizes or sizes[0][0] > 0:  # a run that goes on still compares with the first stage
            sizes = [(0, self.schedule.stages[0]), *sizes]
        samples = [self.schedule.samples_per_step(stage) for _, stage in sizes]
        factors = tuple(RULES[rule](each / samples[0]) for each in samples)
        return LrFactor(tuple(step for step, _ in sizes), factors)

    def epochs_in_words(self) -> Iterator[str]:
        yield from super().epochs_in_words()
        reached = {stage for _, stage in self.sizes}
        for stage in self.schedule.stages:
            if stage not in reached:
                begins = f"{stage.start:,} {self.schedule.unit.replace('_', ' ')}"
                yield f"The run never has size {size_text(stage.size)}, which begins after {begins}."
