"""A run's optimizer steps, where batch and window change with a schedule, also within an epoch.

A Trainer estimates a run's length from its first epoch; a schedule makes every epoch another length. The rule is that
of ``course_lib.steps``, asked of each epoch: *every window steps once, the short one at an epoch's end as well.*

    >>> plan = SizeSchedule({0: (16, 16), 16: (32, 8), 32: (64, 4)}, unit="samples").plan(48, max_epochs=2)
    >>> plan.batches_per_epoch, plan.total_steps, plan.optimizer_step_of_stages
    ({0: 7, 1: 12}, 19, [0, 1, 3])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from course_lib._arguments import int_of_at_least
from course_lib.samplers import SamplerTail
from course_lib.schedules.rates import LrFactor, LrRule, lr_factor
from course_lib.schedules.sized import size_text
from course_lib.schedules.walk import Place, Run, epochs, refuse_empty_batches
from course_lib.steps import Carried, Stage, StepPlan, Window, checked_stops, end_of_run

if TYPE_CHECKING:
    from course_lib.schedules.schedule import SizeSchedule, SizeStage


@dataclass(frozen=True)
class SchedulePlan(StepPlan):
    """A :class:`~course_lib.steps.StepPlan` that knows the schedule's sizes.

    ``per_rank_samples`` of a window is that of the rank that has most: under ``tail="spread"`` the ranks may differ by
    one sample.
    """

    schedule: SizeSchedule

    @property
    def sizes(self) -> list[tuple[int, SizeStage]]:
        """The stages that this run reaches, each with the optimizer step at which it begins."""
        reached: list[tuple[int, SizeStage]] = []
        for epochs_alike in self.stages:
            assert isinstance(epochs_alike, ScheduledEpochs)
            for part in epochs_alike.parts:
                step = epochs_alike.steps_before + part.windows_before
                if step < self.total_steps and (not reached or reached[-1][1] != part.stage):
                    reached.append((step, part.stage))
        return reached

    @property
    def optimizer_step_of_stages(self) -> list[int]:
        """The optimizer steps at which the sizes begin that this run reaches."""
        return [step for step, _ in self.sizes]

    def lr_factor(self, rule: LrRule = "linear") -> LrFactor:
        """The factor of the learning rate, a function of the optimizer step, for ``LambdaLR`` stepped at each of them.

        ``"linear"`` in the samples of an update, relative to the first stage's, ``"sqrt"`` of them, or ``"none"``.
        """
        sizes = self.sizes or [(0, self.schedule.stages[0])]
        samples = [self.schedule.samples_per_step(stage) for _, stage in sizes]
        return lr_factor(rule, [step for step, _ in sizes], list(map(float, samples)))

    def epochs_in_words(self) -> Iterator[str]:
        ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        for stage in self.stages:
            assert isinstance(stage, ScheduledEpochs)
            since = f"From epoch {stage.first_epoch:,} on" if len(self.stages) > 1 else "In every epoch"
            parts = ", then ".join(
                f"{part.batches:,} of {part.stage.batch_size:,} at size {size_text(part.stage.size)}"
                + (f" in windows of {part.window:,}" if part.window > 1 else "")
                for part in stage.parts
            )
            yield f"{since}, batches{ranks}: {parts or 'none'}; optimizer steps: {stage.steps:,}."
        reached = {stage for _, stage in self.sizes}
        for stage_of_size in self.schedule.stages:
            if stage_of_size not in reached:
                yield f"The run never has size {size_text(stage_of_size.size)} (from {self._start(stage_of_size)} on)."
        if self.schedule.stages[-1] in reached and len(self.schedule.stages) > 1:
            last = self.schedule.stages[-1]
            yield f"Size {size_text(last.size)}, the last (from {self._start(last)} on), goes on to the end of the run."

    def _start(self, stage: SizeStage) -> str:
        unit = {"epochs": "epoch", "optimizer_steps": "optimizer step", "samples": "sample"}[self.schedule.unit]
        return f"{unit} {stage.start:,}"

    def _samples_drawn(self) -> list[int]:
        return [stage.samples_of_all_ranks for stage in self.stages if isinstance(stage, ScheduledEpochs)]


class Part(NamedTuple):
    """The batches of an epoch that are in one stage."""

    stage: SizeStage
    window: int
    batches_before: int
    batches: int
    windows_before: int


@dataclass(frozen=True)
class ScheduledEpochs(Stage):
    """Epochs that are alike; within each, batch and window may change."""

    runs: tuple[Run, ...]

    @property
    def batches(self) -> int:
        batches, limit = sum(run.steps for run in self.runs), self.limit_train_batches
        return int(batches * limit) if isinstance(limit, float) else min(batches, limit)

    @cached_property
    def parts(self) -> list[Part]:
        """The stages within an epoch, as far as it runs; each begins with a window."""
        parts: list[Part] = []
        batches = windows = 0
        most = self.batches
        for _, runs in groupby(self.runs, key=lambda run: run.stage):
            of_stage = list(runs)
            count = min(sum(run.steps for run in of_stage), most - batches)
            if count > 0:
                parts.append(Part(of_stage[0].stage, of_stage[0].window, batches, count, windows))
                batches += count
                windows += -(-count // of_stage[0].window)
        return parts

    @property
    def steps(self) -> int:
        last = self.parts[-1:]
        return sum(part.windows_before + -(-part.batches // part.window) for part in last)

    @property
    def batches_stepped(self) -> int:
        return self.batches

    @property
    def samples_of_all_ranks(self) -> int:
        """Samples of an epoch over all ranks, those that are repeated included."""
        return sum(run.total * count for run, count in self._runs_up_to(self.batches))

    def samples_up_to(self, batch: int) -> int:
        return sum(max(run.sizes()) * count for run, count in self._runs_up_to(batch))

    def _runs_up_to(self, batch: int) -> Iterator[tuple[Run, int]]:
        for run in self.runs:
            yield run, min(run.steps, batch)
            batch -= min(run.steps, batch)

    def window(self, step: int) -> Window:
        epochs_before, window = divmod(step - self.steps_before, self.steps)
        part = [part for part in self.parts if part.windows_before <= window][-1]
        start = part.batches_before + (window - part.windows_before) * part.window
        stop = min(start + part.window, part.batches_before + part.batches)
        samples = self.samples_up_to(stop) - self.samples_up_to(start)
        return Window(step, self.first_epoch + epochs_before, start, stop, 0, samples)


def plan_schedule(
    schedule: SizeSchedule,
    num_samples: int,
    world_size: int,
    max_epochs: int | None,
    max_steps: int,
    limit_train_batches: int | float,
    tail: SamplerTail,
) -> SchedulePlan:
    num_samples = int_of_at_least(1, "num_samples", num_samples)
    world_size = int_of_at_least(1, "world_size", world_size)
    if tail not in ("spread", "drop", "pad"):
        raise ValueError(f'tail must be "spread", "drop" or "pad", got {tail!r}')
    max_epochs, max_steps, limit = checked_stops(max_epochs, max_steps, limit_train_batches)
    stages: list[Stage] = []
    steps_before = 0
    for group in epochs(schedule, num_samples, tail, Place(), world_size):
        if stages and max_epochs != -1 and group.first >= max_epochs:
            break
        refuse_empty_batches(group.runs)
        stop = group.stop
        if max_epochs != -1:
            stop = max_epochs if stop is None else min(stop, max_epochs)
        stage_now = group.runs[0].stage if group.runs else schedule.stages[0]
        stage = ScheduledEpochs(
            first_epoch=group.first,
            stop_epoch=stop,
            per_rank_samples=-(-num_samples // world_size),
            per_rank_batch_size=stage_now.batch_size,
            accumulate_grad_batches=schedule.window_of(stage_now, world_size),
            drop_last=tail == "drop",
            limit_train_batches=limit,
            tail="step",
            steps_before=steps_before,
            carried_in=Carried(0, 0),
            runs=group.runs,
        )
        stages.append(stage)
        if stop is not None:
            steps_before += stage.steps * (stop - group.first)
    end = end_of_run(stages, max_steps)
    return SchedulePlan(
        num_samples=num_samples,
        world_size=world_size,
        drop_last=tail == "drop",
        tail="step",
        max_epochs=max_epochs,
        max_steps=max_steps,
        stages=tuple(stages),
        total_steps=end.steps,
        epochs_completed=end.epochs,
        micro_batches=end.micro_batches,
        micro_batches_unused=end.micro_batches - end.micro_batches_stepped,
        schedule=schedule,
    )
