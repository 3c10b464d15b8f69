"""The arithmetic of a schedule: which steps an epoch has, from any place on, and when the next stage begins.

A *step* is one batch on every rank. A step takes the next indices of the epoch's order; only where a window ends may
the next step have another size. Everything that comes is a function of the place alone, so that a run which goes on
from there, on as many ranks, has the same steps: that is what makes a resume exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from course_lib.samplers import SamplerTail

if TYPE_CHECKING:
    from course_lib.schedules.schedule import SizeSchedule, SizeStage


class Place(NamedTuple):
    """Where a run stands."""

    epoch: int = 0
    position: int = 0
    """In the epoch's order: what all ranks together have had."""
    optimizer_steps: int = 0
    """Of the run."""
    window_position: int = 0
    """The position where the window began whose micro-batches go on here."""
    window_batches: int = 0
    """Micro-batches of that window so far, over all ranks; 0 between windows."""


@dataclass(frozen=True)
class Run:
    """Steps of one stage and one number of indices, one after the other."""

    stage: SizeStage
    window: int
    """Micro-batches of a full window."""
    steps: int
    total: int
    """Indices of each step, over all ranks."""
    before: Place
    opened: int
    """Micro-batches of a rank that the window has had before."""
    num_samples: int
    world_size: int

    def position_after(self, steps: int) -> int:
        return min(self.num_samples, self.before.position + steps * self.total)

    def place_after(self, steps: int) -> Place:
        closed, opened = divmod(self.opened + steps, self.window)
        position = self.position_after(steps)
        began = position - opened * self.total if closed or not opened else self.before.window_position
        optimizer_steps = self.before.optimizer_steps + closed
        return Place(self.before.epoch, position, optimizer_steps, began, opened * self.world_size)

    def sizes(self) -> list[int]:
        """What each rank gets in a step: as many, or one less."""
        total, n = self.total, self.world_size
        return [total * (rank + 1) // n - total * rank // n for rank in range(n)]


class Epochs(NamedTuple):
    """Epochs that are alike."""

    first: int
    stop: int | None
    """One past the last; None: they go on."""
    optimizer_steps_before: int
    optimizer_steps: int
    """Of each."""
    runs: tuple[Run, ...]
    """Of each; their places are the first one's."""


def deal(schedule: SizeSchedule, num_samples: int, tail: SamplerTail, place: Place, world_size: int) -> Iterator[Run]:
    """The steps from a place to the end of its epoch.

    ``"spread"`` deals whole rows of one index a rank. What is left over makes one row incomplete; the first step that
    has a second row takes it, so that no rank's batch is empty or larger than asked, and every other step is even.
    """
    while place.position < num_samples:
        index = schedule.index_at(_time(schedule, num_samples, place))
        stage = schedule.stages[index]
        window = schedule.window_of(stage, world_size)
        opened = min(window - 1, place.window_batches // world_size)
        left, total = num_samples - place.position, stage.batch_size * world_size
        if left < total and tail == "drop":
            return
        steps = 1
        if left <= total:
            total = left if tail == "spread" else total
        elif tail == "spread" and left % world_size and stage.batch_size > 1:
            total += left % world_size - world_size
        else:
            of_stage = _steps_of_stage(schedule, index, num_samples, place, window, opened, total)
            steps = min(left // total, of_stage)
        run = Run(stage, window, steps, total, place, opened, num_samples, world_size)
        yield run
        place = run.place_after(steps)


def epochs(
    schedule: SizeSchedule, num_samples: int, tail: SamplerTail, place: Place, world_size: int
) -> Iterator[Epochs]:
    """All epochs from a place on, those that are alike together; the last of them go on for ever."""
    while True:
        runs = tuple(deal(schedule, num_samples, tail, place, world_size))
        after = next_epoch(runs, place)
        steps = after.optimizer_steps - place.optimizer_steps
        alike: int | None = 1
        if not place.position and len({run.stage for run in runs}) <= 1:
            alike = _epochs_of_stage(schedule, num_samples, place, steps, tail)
        stop = None if alike is None else place.epoch + alike
        yield Epochs(place.epoch, stop, place.optimizer_steps, steps, runs)
        if alike is None or stop is None:
            return
        place = Place(stop, 0, place.optimizer_steps + alike * steps)


def refuse_empty_batches(runs: tuple[Run, ...]) -> None:
    """Raise a ValueError where a step would leave a rank without an index; its sampler has ``tail="spread"``."""
    short = next((run for run in runs if run.total < run.world_size), None)
    if short is not None:
        position, epoch = runs[0].before.position, runs[0].before.epoch
        what = "samples that are left of the epoch" if position else "samples"
        raise ValueError(
            f'tail="spread" cannot deal the {short.num_samples - position} {what} to {short.world_size} ranks in epoch '
            f"{epoch} without an empty batch: {short.total} are left for the last step, and no step before it has two "
            'indices a rank. Use tail="drop" or tail="pad"'
            + (", or fewer ranks until the epoch ends" if position else "")
        )


def next_epoch(runs: tuple[Run, ...], place: Place) -> Place:
    """Where the next epoch starts; a window that the end cuts short has stepped too."""
    last = runs[-1].place_after(runs[-1].steps) if runs else place
    return Place(place.epoch + 1, 0, last.optimizer_steps + (last.window_batches > 0))


def _time(schedule: SizeSchedule, num_samples: int, place: Place) -> int:
    """When the window at a place began, in the schedule's unit."""
    if schedule.unit == "samples":
        return place.epoch * num_samples + place.window_position
    return place.epoch if schedule.unit == "epochs" else place.optimizer_steps


def _steps_of_stage(
    schedule: SizeSchedule, index: int, num_samples: int, place: Place, window: int, opened: int, total: int
) -> int:
    """Steps of so many indices until a window ends in the next stage's time, or as many as an epoch can have."""
    end = schedule.end_of(index)
    if end is None or schedule.unit == "epochs":
        return num_samples
    if schedule.unit == "optimizer_steps":
        return (end - place.optimizer_steps) * window - opened
    rest = -opened % window
    first = place.epoch * num_samples + place.position + rest * total
    return rest + window * max(0, -((first - end) // (window * total)))


def _epochs_of_stage(
    schedule: SizeSchedule, num_samples: int, place: Place, optimizer_steps: int, tail: SamplerTail
) -> int | None:
    """Epochs from this one on that lie in its stage altogether, at least this one; None: all that come."""
    time = _time(schedule, num_samples, place)
    end = schedule.end_of(schedule.index_at(time))
    length = {"epochs": 1, "samples": num_samples, "optimizer_steps": optimizer_steps}[schedule.unit]
    # An epoch whose last step is the stage's has dropped what is left of it; the next stage's batch may fit into that.
    end_of_epochs = None if end is None else end - (tail == "drop" and schedule.unit == "optimizer_steps")
    return None if end_of_epochs is None or not length else max(1, (end_of_epochs - time) // length)
