"""The arithmetic of a schedule: which steps an epoch has, from any place on, and when the next stage begins.

A *step* is one batch on every rank. A step takes the next indices of the epoch's order; only where a window ends may
the next step have another size. Everything that comes is a function of the place alone, so that a run which goes on
from there, on as many ranks, has the same steps: that is what makes a resume exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from course_lib.samplers.epoch import SamplerTail
from course_lib.samplers.in_steps import refuse_empty_batches
from course_lib.schedules.sized import size_text
from course_lib.schedules.stages import SizeStage, Stages
from course_lib.steps.counting import Epochs, EqualBatches


class RunPosition(NamedTuple):
    """How far a run is: in its epochs, in the data, in optimizer steps, and in the window that is open."""

    epoch: int = 0
    position: int = 0
    """In the epoch's order: what all ranks together have had."""
    optimizer_steps: int = 0
    """Of the run."""
    window_position: int = 0
    """The position where the window began whose micro-batches go on here."""
    window_batches: int = 0
    """Micro-batches of that window so far, over all ranks; 0 between windows."""


@dataclass(frozen=True, kw_only=True)
class EqualSteps(EqualBatches):
    """Steps of one stage that each take as many indices, one after the other."""

    stage: SizeStage
    before: RunPosition
    opened: int
    """Micro-batches of a rank that the window has had before."""
    walk: Walk

    def place_after(self, steps: int) -> RunPosition:
        # In micro-batches of one rank: windows that were closed on the way, and those that the open one has had. An
        # open window began so many steps back, or where it began before these steps, if none was closed since.
        closed, opened = divmod(self.opened + steps, self.window_size)
        position = min(self.walk.num_samples, self.before.position + steps * self.total)
        began = position - opened * self.total if closed or not opened else self.before.window_position
        optimizer_steps = self.before.optimizer_steps + closed
        return RunPosition(self.before.epoch, position, optimizer_steps, began, opened * self.walk.world_size)

    def part_of(self, rank: int) -> tuple[int, int]:
        """What a rank gets of the indices of a step, as many as each other or one less: from, and to before."""
        ranks = self.walk.world_size
        return self.total * rank // ranks, self.total * (rank + 1) // ranks


@dataclass(frozen=True, kw_only=True)
class ScheduledEpochs(Epochs):
    """Epochs that are dealt alike; the places of their steps are the first one's."""

    dealt: tuple[EqualSteps, ...]
    walk: Walk
    begins: RunPosition

    def batches_in_words(self) -> str:
        steps = Counter[SizeStage]()
        for equal in self.dealt:
            steps[equal.stage] += equal.steps
        words = [f"of {stage.batch_size:,} at size {size_text(stage.size)} ({n:,})" for stage, n in steps.items()]
        return ", then ".join(words) or "of the schedule"

    @property
    def count(self) -> int:
        """Steps of such an epoch."""
        return self.batches

    @property
    def size(self) -> int:
        """Samples of a whole epoch."""
        return self.walk.num_samples

    def start(self, step: int) -> int:
        """The position where a step begins, or where the last one has ended."""
        return self.place_after(step).position

    def place_after(self, steps: int) -> RunPosition:
        """Where a run stands behind a step, and not ahead of the next, which may be in another window."""
        if not steps:
            return self.begins
        number, before = self.place_of(steps - 1)
        return self.dealt[number].place_after(before + 1)

    def sizes(self, step: int) -> list[int]:
        """What each rank gets in a step."""
        number, _ = self.place_of(step)
        parts = map(self.dealt[number].part_of, range(self.walk.world_size))
        return [end - begin for begin, end in parts]


@dataclass(frozen=True)
class Walk:
    """A schedule over so many samples, dealt to so many ranks."""

    stages: Stages
    num_samples: int
    tail: SamplerTail
    world_size: int

    def epochs_to_deal(self, place: RunPosition) -> Iterator[ScheduledEpochs]:
        """All epochs from a place on; where one is reached that cannot be dealt, a ValueError."""
        for alike in self.epochs(place):
            refuse_empty_batches(alike.dealt, alike.num_samples, self.num_samples, self.world_size, alike.first_epoch)
            yield alike

    def epochs(self, place: RunPosition) -> Iterator[ScheduledEpochs]:
        """All epochs from a place on, those that are alike together; the last of them have no end."""
        while True:
            rest = self.rest_of_epoch(place)
            alike: int | None = 1
            if not place.position and len({equal.stage for equal in rest.dealt}) <= 1:
                alike = self._epochs_of_stage(place, rest.steps)
            if alike is None:
                yield replace(rest, stop_epoch=None)
                return
            yield replace(rest, stop_epoch=place.epoch + alike)
            place = RunPosition(place.epoch + alike, 0, place.optimizer_steps + alike * rest.steps)

    def rest_of_epoch(self, place: RunPosition) -> ScheduledEpochs:
        """An epoch from a place on."""
        dealt = tuple(self._steps(place))
        return ScheduledEpochs(
            first_epoch=place.epoch,
            stop_epoch=place.epoch + 1,
            num_samples=self.num_samples - place.position,
            dealt=dealt,
            walk=self,
            begins=place,
            opened=dealt[0].opened if dealt else 0,
            steps_before=place.optimizer_steps,
        )

    def _steps(self, place: RunPosition) -> Iterator[EqualSteps]:
        """The steps from a place to the end of its epoch.

        ``"spread"`` deals whole rows of one index a rank. What is left over makes one row incomplete; the first step
        that has a second row takes it, so that no rank's batch is empty or larger than asked, and every other step is
        even.
        """
        while place.position < self.num_samples:
            stage = self.stages.stage_at(self._time(place))
            window_size = self.stages.window_size(stage, self.world_size)
            opened = min(window_size - 1, place.window_batches // self.world_size)
            left, total = self.num_samples - place.position, stage.batch_size * self.world_size
            if left < total and self.tail == "drop":
                return
            steps = 1
            if left <= total:
                total = left if self.tail == "spread" else total
            elif self.tail == "spread" and left % self.world_size and stage.batch_size > 1:
                total += left % self.world_size - self.world_size
            else:
                steps = min(left // total, self._steps_of_stage(place, stage, window_size, opened, total))
            largest = -(-total // self.world_size)
            equal = EqualSteps(steps, largest, total, window_size, stage=stage, before=place, opened=opened, walk=self)
            yield equal
            place = equal.place_after(steps)

    def _time(self, place: RunPosition) -> int:
        """When the window at a place began, in the schedule's unit."""
        if self.stages.unit == "samples":
            return place.epoch * self.num_samples + place.window_position
        return place.epoch if self.stages.unit == "epochs" else place.optimizer_steps

    def _steps_of_stage(self, place: RunPosition, stage: SizeStage, window_size: int, opened: int, total: int) -> int:
        """Steps of so many indices until a window ends in the next stage's time, or as many as an epoch can have."""
        end = self.stages.end_of(stage)
        if end is None or self.stages.unit == "epochs":
            return self.num_samples
        if self.stages.unit == "optimizer_steps":  # a window is one; the open one has had `opened` of its micro-batches
            return (end - place.optimizer_steps) * window_size - opened
        # By samples: the time counts only where a window begins. `rest` steps close the open one, at sample `first` of
        # the run; from there, the fewest whole windows that reach the end: the division is rounded up.
        rest = -opened % window_size
        first = place.epoch * self.num_samples + place.position + rest * total
        return rest + window_size * max(0, -((first - end) // (window_size * total)))

    def _epochs_of_stage(self, place: RunPosition, optimizer_steps: int) -> int | None:
        """Epochs from this one on that lie wholly in its stage, and at least this one; None: all that come."""
        time = self._time(place)
        end = self.stages.end_of(self.stages.stage_at(time))
        length = {"epochs": 1, "samples": self.num_samples, "optimizer_steps": optimizer_steps}[self.stages.unit]
        if end is None or not length:
            return None
        if self.tail == "drop" and self.stages.unit == "optimizer_steps":
            # An epoch whose last step is the stage's last drops what is left; the next stage's batch may fit into that.
            end -= 1
        return max(1, (end - time) // length)
