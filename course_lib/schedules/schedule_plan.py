"""A run's optimizer steps, where batch and window change with a schedule, also within an epoch.

A Trainer estimates a run's length from its first epoch; a schedule makes every epoch another length. The rule is that
of ``course_lib.steps``, asked of each epoch: *every window steps once, the short one at an epoch's end as well.*

    >>> from course_lib.schedules import SizeSchedule
    >>> plan = SizeSchedule({0: (16, 16), 16: (32, 8), 32: (64, 4)}, unit="samples").plan(48, max_epochs=2)
    >>> plan.batches_per_epoch, plan.total_steps, plan.optimizer_step_of_stages
    ({0: 7, 1: 12}, 19, [0, 1, 3])
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from course_lib._arguments import int_of_at_least
from course_lib.samplers.epoch import SamplerTail
from course_lib.schedules.lr_factor import LrFactor, LrRule, lr_factor
from course_lib.schedules.sized import size_text
from course_lib.schedules.stages import SizeStage, Stages
from course_lib.schedules.walk import EqualSteps, RunPosition, epochs, refuse_empty_batches
from course_lib.steps import StepPlan
from course_lib.steps.dealt import DealtEpochs
from course_lib.steps.epochs import Window


@dataclass(frozen=True)
class SchedulePlan(StepPlan):
    """A :class:`~course_lib.steps.StepPlan` that knows the schedule's sizes.

    ``per_rank_samples`` of a window is that of the rank that has most: under ``tail="spread"`` the ranks may differ by
    one sample.
    """

    all_stages: Stages

    @property
    def sizes(self) -> list[tuple[int, SizeStage]]:
        """The stages that this run reaches, each with the optimizer step at which it begins."""
        reached: list[tuple[int, SizeStage]] = []
        for span in self._scheduled():
            for part in span.parts:
                step = span.steps_before + part.windows_before
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
        sizes = self.sizes
        if not sizes or sizes[0][0] > 0:  # a run that goes on still compares with the first stage
            sizes = [(0, self.all_stages.stages[0]), *sizes]
        samples = [float(self.all_stages.samples_per_step(stage)) for _, stage in sizes]
        return lr_factor(rule, [step for step, _ in sizes], samples)

    def epochs_in_words(self) -> Iterator[str]:
        ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        for span in self._scheduled():
            since = f"From epoch {span.first_epoch:,} on" if len(self.spans) > 1 else "In every epoch"
            parts = ", then ".join(part.in_words() for part in span.parts)
            yield f"{since}, batches{ranks}: {parts or 'none'}; optimizer steps: {span.steps:,}."
        stages, unit = self.all_stages.stages, self.all_stages.unit
        reached = {stage for _, stage in self.sizes}
        for stage in stages:
            if stage not in reached:
                yield f"The run never has size {size_text(stage.size)} (from {stage.start_in_words(unit)} on)."
        last = stages[-1]
        if last in reached and len(stages) > 1:
            since = last.start_in_words(unit)
            yield f"Size {size_text(last.size)}, the last (from {since} on), goes on to the end of the run."

    def _scheduled(self) -> Iterator[ScheduledEpochs]:
        for span in self.spans:
            assert isinstance(span, ScheduledEpochs)
            yield span


class StageBatches(NamedTuple):
    """The batches of an epoch that are in one stage."""

    stage: SizeStage
    window_size: int
    """Micro-batches of one rank in a full window."""
    batches_before: int
    batches: int
    windows_before: int

    def in_words(self) -> str:
        words = f"{self.batches:,} of {self.stage.batch_size:,} at size {size_text(self.stage.size)}"
        if self.window_size > 1:
            words += f" in windows of {self.window_size:,}"
        return words

    @property
    def windows(self) -> int:
        return -(-self.batches // self.window_size)


@dataclass(frozen=True, kw_only=True)
class ScheduledEpochs(DealtEpochs):
    """Epochs that are alike; within each, batch and window may change."""

    equal_steps: tuple[EqualSteps, ...]
    """What is dealt, with the stage and the window of each."""

    @cached_property
    def parts(self) -> list[StageBatches]:
        """The stages within an epoch, as far as it runs; each begins with a window."""
        parts: list[StageBatches] = []
        batches = windows = 0
        for _, group in groupby(self.equal_steps, key=lambda equal: equal.stage):
            of_stage = list(group)
            count = min(sum(equal.steps for equal in of_stage), self.batches - batches)
            if count > 0:
                part = StageBatches(of_stage[0].stage, of_stage[0].window_size, batches, count, windows)
                parts.append(part)
                batches += count
                windows += part.windows
        return parts

    @cached_property
    def steps(self) -> int:
        return sum(part.windows for part in self.parts)

    @property
    def batches_stepped(self) -> int:
        return self.batches

    def window(self, step: int) -> Window:
        epochs_before, window = divmod(step - self.steps_before, self.steps)
        part = self.parts[bisect_right(self._windows_before, window) - 1]
        start = part.batches_before + (window - part.windows_before) * part.window_size
        stop = min(start + part.window_size, part.batches_before + part.batches)
        samples = self.samples_up_to(stop) - self.samples_up_to(start)
        return Window(step, self.first_epoch + epochs_before, start, stop, 0, samples)

    @cached_property
    def _windows_before(self) -> list[int]:
        return [part.windows_before for part in self.parts]


def plan_schedule(
    all_stages: Stages,
    num_samples: int,
    world_size: int,
    stops: tuple[int, int, int | float],
    tail: SamplerTail,
    steps_done: int,
    samples_done: int,
) -> SchedulePlan:
    num_samples = int_of_at_least(1, "num_samples", num_samples)
    world_size = int_of_at_least(1, "world_size", world_size)
    if tail not in ("spread", "drop", "pad"):
        raise ValueError(f'tail must be "spread", "drop" or "pad", got {tail!r}')
    max_epochs, max_steps, limit = stops
    epoch, position = divmod(samples_done, num_samples)
    if position and limit != 1.0:
        raise ValueError(
            f"within an epoch ({position} of {num_samples} samples are done), what is left can be planned without "
            f"limit_train_batches alone, got {limit!r}"
        )
    place = RunPosition(epoch, position, steps_done, position)
    dealt = scheduled_epochs(
        all_stages,
        num_samples,
        tail,
        place,
        world_size,
        steps_done=steps_done,
        max_epochs=max_epochs,
        max_steps=max_steps,
        limit_train_batches=limit,
    )
    return SchedulePlan.of_spans(
        dealt,
        num_samples=num_samples,
        world_size=world_size,
        drop_last=tail == "drop",
        short_window="step",
        max_epochs=max_epochs,
        max_steps=max_steps,
        steps_done=steps_done,
        samples_done=samples_done,
        all_stages=all_stages,
    )


def scheduled_epochs(
    all_stages: Stages,
    num_samples: int,
    tail: SamplerTail,
    place: RunPosition,
    world_size: int,
    *,
    steps_done: int,
    max_epochs: int,
    max_steps: int,
    limit_train_batches: int | float,
    limit_at_place: int | None = None,
) -> Iterator[ScheduledEpochs]:
    """The epochs that a run reaches from a place on; an epoch that cannot be dealt is refused as it is reached.

    ``steps_done`` are the run's optimizer steps before the place. Where epochs are cut, the schedule has counted more:
    for it, an epoch counts in full. ``limit_at_place``: the batches that are left to the epoch of the place.
    """
    steps = steps_done
    for group in epochs(all_stages, num_samples, tail, place, world_size):
        first = group.first == place.epoch
        if not first and (0 <= max_epochs <= group.first or 0 <= max_steps <= steps):
            return
        refuse_empty_batches(group.dealt)
        stop = group.stop
        if max_epochs != -1:
            stop = max_epochs if stop is None else min(stop, max_epochs)
            stop = max(stop, group.first)
        first_stage = group.dealt[0].stage if group.dealt else all_stages.stages[0]
        span = ScheduledEpochs(
            first_epoch=group.first,
            stop_epoch=stop,
            num_samples=num_samples - (place.position if first else 0),
            world_size=world_size,
            per_rank_batch_size=first_stage.batch_size,
            accumulate_grad_batches=all_stages.window_size(first_stage, world_size),
            drop_last=tail == "drop",
            limit_train_batches=limit_train_batches if limit_at_place is None or not first else limit_at_place,
            short_window="step",
            dealt=tuple(equal.batches() for equal in group.dealt),
            equal_steps=group.dealt,
        )
        yield span
        if not span.batches:  # which ends a run
            return
        if stop is not None:
            steps += span.steps * (stop - group.first)
