"""The arithmetic of a schedule: which steps an epoch has, from any place on, and when the next stage begins.

A *step* is one batch on every rank. A step takes the next indices of the epoch's order; only where a window ends may
the next step have another size. Everything that comes is a function of the place alone, so that a run which goes on
from there, on as many ranks, has the same steps: that is what makes a resume exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from course_lib.samplers.epoch import SamplerTail
from course_lib.schedules.stages import SizeStage, Stages
from course_lib.steps.epochs import Epochs, EqualBatches


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
    num_samples: int
    world_size: int

    def position_after(self, steps: int) -> int:
        return min(self.num_samples, self.before.position + steps * self.total)

    def place_after(self, steps: int) -> RunPosition:
        # In micro-batches of one rank: windows that were closed on the way, and those that the open one has had. An
        # open window began so many steps back, or where it began before these steps, if none was closed since.
        closed, opened = divmod(self.opened + steps, self.window_size)
        position = self.position_after(steps)
        began = position - opened * self.total if closed or not opened else self.before.window_position
        optimizer_steps = self.before.optimizer_steps + closed
        return RunPosition(self.before.epoch, position, optimizer_steps, began, opened * self.world_size)

    def sizes(self) -> list[int]:
        """What each rank gets in a step: as many, or one less."""
        total, n = self.total, self.world_size
        return [total * (rank + 1) // n - total * rank // n for rank in range(n)]


@dataclass(frozen=True, kw_only=True)
class ScheduledEpochs(Epochs):
    """Epochs that are dealt alike; the places of their steps are the first one's."""

    dealt: tuple[EqualSteps, ...]


def deal(
    stages: Stages, num_samples: int, tail: SamplerTail, place: RunPosition, world_size: int
) -> Iterator[EqualSteps]:
    """The steps from a place to the end of its epoch.

    ``"spread"`` deals whole rows of one index a rank. What is left over makes one row incomplete; the first step that
    has a second row takes it, so that no rank's batch is empty or larger than asked, and every other step is even.
    """
    while place.position < num_samples:
        number = stages.number_at(_time(stages, num_samples, place))
        stage = stages.stages[number]
        window_size = stages.window_size(stage, world_size)
        opened = min(window_size - 1, place.window_batches // world_size)
        left, total = num_samples - place.position, stage.batch_size * world_size
        if left < total and tail == "drop":
            return
        steps = 1
        if left <= total:
            total = left if tail == "spread" else total
        elif tail == "spread" and left % world_size and stage.batch_size > 1:
            total += left % world_size - world_size
        else:
            of_stage = _steps_of_stage(stages, number, num_samples, place, window_size, opened, total)
            steps = min(left // total, of_stage)
        equal = EqualSteps(
            steps,
            -(-total // world_size),
            total,
            window_size,
            stage=stage,
            before=place,
            opened=opened,
            num_samples=num_samples,
            world_size=world_size,
        )
        yield equal
        place = equal.place_after(steps)


def epochs(
    stages: Stages, num_samples: int, tail: SamplerTail, place: RunPosition, world_size: int
) -> Iterator[ScheduledEpochs]:
    """All epochs from a place on, those that are alike together; the last of them have no end."""
    while True:
        rest = rest_of_epoch(stages, num_samples, tail, place, world_size)
        steps = next_epoch(rest.dealt, place).optimizer_steps - place.optimizer_steps
        alike: int | None = 1
        if not place.position and len({equal.stage for equal in rest.dealt}) <= 1:
            alike = _epochs_of_stage(stages, num_samples, place, steps, tail)
        if alike is None:
            yield replace(rest, stop_epoch=None)
            return
        yield replace(rest, stop_epoch=place.epoch + alike)
        place = RunPosition(place.epoch + alike, 0, place.optimizer_steps + alike * steps)


def rest_of_epoch(
    stages: Stages, num_samples: int, tail: SamplerTail, place: RunPosition, world_size: int
) -> ScheduledEpochs:
    """An epoch from a place on."""
    dealt = tuple(deal(stages, num_samples, tail, place, world_size))
    return ScheduledEpochs(
        first_epoch=place.epoch,
        stop_epoch=place.epoch + 1,
        num_samples=num_samples - place.position,
        dealt=dealt,
        opened=dealt[0].opened if dealt else 0,
        steps_before=place.optimizer_steps,
    )


def dealt_epochs(
    stages: Stages, num_samples: int, tail: SamplerTail, place: RunPosition, world_size: int
) -> Iterator[ScheduledEpochs]:
    """The same as ``epochs``; where one is reached that cannot be dealt, a ValueError."""
    for alike in epochs(stages, num_samples, tail, place, world_size):
        refuse_empty_batches(alike.dealt)
        yield alike


def refuse_empty_batches(dealt: tuple[EqualSteps, ...]) -> None:
    """Raise a ValueError where a step would leave a rank without an index; its sampler has ``tail="spread"``."""
    short = next((equal for equal in dealt if equal.total < equal.world_size), None)
    if short is not None:
        position, epoch = dealt[0].before.position, dealt[0].before.epoch
        what = "samples that are left of the epoch" if position else "samples"
        raise ValueError(
            f'tail="spread" cannot deal the {short.num_samples - position} {what} to {short.world_size} ranks in epoch '
            f"{epoch} without an empty batch: {short.total} are left for the last step, and no step before it has two "
            'indices a rank. Use tail="drop" or tail="pad"'
            + (", or fewer ranks until the epoch ends" if position else "")
        )


def step_after(dealt: Iterable[EqualSteps], steps: int) -> tuple[EqualSteps, int] | None:
    """Where the step is that comes after so many: the equal steps it is one of, and how many of them come before it.

    None behind the last one.
    """
    for equal in dealt:
        if steps < equal.steps:
            return equal, steps
        steps -= equal.steps
    return None


def next_epoch(dealt: tuple[EqualSteps, ...], place: RunPosition) -> RunPosition:
    """Where the next epoch starts; a window that the end cuts short has stepped too."""
    last = dealt[-1].place_after(dealt[-1].steps) if dealt else place
    return RunPosition(place.epoch + 1, 0, last.optimizer_steps + (last.window_batches > 0))


def _time(stages: Stages, num_samples: int, place: RunPosition) -> int:
    """When the window at a place began, in the schedule's unit."""
    if stages.unit == "samples":
        return place.epoch * num_samples + place.window_position
    return place.epoch if stages.unit == "epochs" else place.optimizer_steps


def _steps_of_stage(
    stages: Stages, number: int, num_samples: int, place: RunPosition, window_size: int, opened: int, total: int
) -> int:
    """Steps of so many indices until a window ends in the next stage's time, or as many as an epoch can have."""
    end = stages.end_of(number)
    if end is None or stages.unit == "epochs":
        return num_samples
    if stages.unit == "optimizer_steps":  # a window is one; the open one has had `opened` of its micro-batches
        return (end - place.optimizer_steps) * window_size - opened
    # By samples: the time counts only where a window begins. `rest` steps close the open one, at sample `first` of the
    # run; from there, the fewest whole windows that reach the end: the division is rounded up.
    rest = -opened % window_size
    first = place.epoch * num_samples + place.position + rest * total
    return rest + window_size * max(0, -((first - end) // (window_size * total)))


def _epochs_of_stage(
    stages: Stages, num_samples: int, place: RunPosition, optimizer_steps: int, tail: SamplerTail
) -> int | None:
    """Epochs from this one on that lie wholly in its stage, and at least this one; None: all that come."""
    time = _time(stages, num_samples, place)
    end = stages.end_of(stages.number_at(time))
    length = {"epochs": 1, "samples": num_samples, "optimizer_steps": optimizer_steps}[stages.unit]
    if end is None or not length:
        return None
    if tail == "drop" and stages.unit == "optimizer_steps":
        # An epoch whose last step is the stage's last drops what is left; the next stage's batch may fit into that.
        end -= 1
    return max(1, (end - time) // length)
