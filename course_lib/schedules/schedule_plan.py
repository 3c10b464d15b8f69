"""A run's optimizer steps, where batch and window change with a schedule, also within an epoch.

A Trainer estimates a run's length from its first epoch; a schedule makes every epoch another length. The rule is that
of ``course_lib.steps``, asked of each epoch: *every window steps once, the short one at an epoch's end as well.*

    >>> from course_lib.schedules import SizeSchedule
    >>> plan = SizeSchedule({0: (16, 16), 16: (32, 8), 32: (64, 4)}, unit="samples").plan(48, max_epochs=2)
    >>> plan.batches_per_epoch, plan.total_steps, plan.optimizer_step_of_stages
    ({0: 7, 1: 12}, 19, [0, 1, 3])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from course_lib.schedules.lr_factor import LrFactor, LrRule, lr_factor
from course_lib.schedules.sized import size_text
from course_lib.schedules.stages import SizeStage, Stages
from course_lib.schedules.walk import ScheduledEpochs
from course_lib.steps import StepPlan


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

    @property
    def optimizer_step_of_stages(self) -> list[int]:
        """The optimizer steps at which the sizes begin that this run reaches."""
        return [step for step, _ in self.sizes]

    def lr_factor(self, rule: LrRule = "linear") -> LrFactor:
        """The factor of the learning rate, a function of the optimizer step, for ``LambdaLR`` stepped at each of them.

        ``"linear"`` in the samples of an update, relative to the first stage's, ``"sqrt"`` of them, or ``"none"``.
        """
        sizes = self.sizes
        if not sizes or sizes[0][0] > 0:  # a run that goes on still compares with the first stage
            sizes = [(0, self.schedule.stages[0]), *sizes]
        samples = [float(self.schedule.samples_per_step(stage)) for _, stage in sizes]
        return lr_factor(rule, [step for step, _ in sizes], samples)

    def epochs_in_words(self) -> Iterator[str]:
        ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        for span in self.spans:
            since = f"From epoch {span.first_epoch:,} on" if len(self.spans) > 1 else "In every epoch"
            batches = ", then ".join(_batches_in_words(span)) or "none"
            yield f"{since}, batches{ranks}: {batches}; optimizer steps: {span.steps:,}."
        stages, unit = self.schedule.stages, self.schedule.unit
        reached = {stage for _, stage in self.sizes}
        for stage in stages:
            if stage not in reached:
                yield f"The run never has size {size_text(stage.size)} (from {stage.start_in_words(unit)} on)."
        last = stages[-1]
        if last in reached and len(stages) > 1:
            since = last.start_in_words(unit)
            yield f"Size {size_text(last.size)}, the last (from {since} on), goes on to the end of the run."


def _batches_in_words(span: ScheduledEpochs) -> Iterator[str]:
    for stage, alike in groupby(span.dealt, key=lambda equal: equal.stage):
        of_stage = list(alike)
        words = f"{sum(equal.steps for equal in of_stage):,} of {stage.batch_size:,} at size {size_text(stage.size)}"
        if of_stage[0].window_size > 1:
            words += f" in windows of {of_stage[0].window_size:,}"
        yield words
