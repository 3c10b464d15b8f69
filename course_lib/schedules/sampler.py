"""A shuffled dataset in batches whose size follows a schedule: every index once, each with its sample's size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from course_lib._occurrences import with_occurrences
from course_lib._words import int_of_at_least
from course_lib.samplers import IndexPermutation
from course_lib.samplers.epoch import SamplerTail
from course_lib.samplers.in_steps import StepsSampler
from course_lib.samplers.permutation import BLOCK
from course_lib.schedules.schedule import SizeSchedule
from course_lib.schedules.schedule_plan import SchedulePlan
from course_lib.schedules.sized import SizedIndex
from course_lib.schedules.stage_steps import RunPosition, ScheduledEpochs, Walk


class ScheduledBatchSampler(StepsSampler):
    """Batches that follow a :class:`SizeSchedule`, also within an epoch, on every rank alike.

    Yields lists of :class:`SizedIndex`, for a ``SizedDataset``. A step takes the next indices of the epoch's order, and
    has one size on all ranks; so have the micro-batches of a window. Resumable anywhere, on other numbers of workers
    and ranks, if the schedule is the same.

    Args:
        num_samples: Samples in the dataset.
        schedule: Says size and batch size of each step.
        shuffle: Whether each epoch has a random order; else that of the dataset.
        seed: Of the order, together with the epoch.
        tail: ``"spread"``: every index once, full batches but for the last and, where the ranks do not divide the
            samples, one more, whose sizes differ by one between ranks. ``"drop"``: full batches only, the last indices
            of the order are left out. ``"pad"``: full batches only, the order's first indices come again at its end.
        num_replicas, rank: Default: the process group's, or 1 and 0 without one, read when iterated.

    A schedule by optimizer steps counts those of whole epochs: one for each window, and one for the short window at an
    epoch's end. After a resume on other ranks it goes on from what was counted there.

    Raises:
        ValueError: An argument is out of its range; ``effective_batch_size`` does not divide on so many ranks; or
            ``tail="spread"`` would leave a rank without an index in some step. The latter two are said when an epoch
            is read, where the ranks are the process group's.
    """

    def __init__(
        self,
        num_samples: int,
        schedule: SizeSchedule,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: SamplerTail = "spread",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self._place = RunPosition()
        self._rest: tuple[tuple[Any, ...], ScheduledEpochs] | None = None
        """What was found last for an iteration, and for which."""
        super().__init__(shuffle=shuffle, seed=seed, tail=tail, num_replicas=num_replicas, rank=rank)
        self.num_samples = int_of_at_least(1, "num_samples", num_samples)
        self.max_index = self.num_samples - 1
        if not isinstance(schedule, SizeSchedule):
            raise ValueError(f"schedule must be a SizeSchedule, got {schedule!r}; one size: ShuffledBatchSampler")
        self.schedule = schedule
        if self.num_replicas is not None:
            for _ in self._walk(self.num_replicas).epochs_to_deal(RunPosition()):
                pass

    def window_sizes(self) -> list[int]:
        """The micro-batches of each window, from the current position to the end of the epoch, for an own loop.

        ::

            batches = iter(loader)
            for k in sampler.window_sizes():
                accumulate(model, list(islice(batches, k)), loss_sum_fn, count_fn)
        """
        rest = self._steps(self._position, self._world()[0])
        windows = (rest.window(rest.steps_before + number) for number in range(rest.steps))
        return [window.micro_batches for window in windows]

    def plan_steps(self, *, world_size: int | None = None, **run: Any) -> SchedulePlan:
        """Plan the optimizer steps of a run with this sampler, on the ranks there are; see ``SizeSchedule.plan``."""
        ranks = self._planned_world_size(world_size)
        return self.schedule.plan(self.num_samples, world_size=ranks, tail=self.tail, **run)

    plan = plan_steps

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        state = super().state_dict(batches)
        world_size, _ = self._world()
        steps = state["steps"] - self.steps_before
        if state["epoch"] != self.epoch:
            rest = self._steps(self._position, world_size)
            place = RunPosition(optimizer_steps=rest.steps_before + rest.steps)
        elif not steps and (self.epoch, self._position) == self._place[:2]:
            place = self._place  # as it was restored, be it on other ranks
        else:
            place = self._steps(self._position, world_size).place_after(steps)
        return state | {name: getattr(place, name) for name in COUNTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = {name: int_of_at_least(0, f"{name} of a state", state.get(name)) for name in COUNTS}
        super().load_state_dict(state)
        self._place = RunPosition(self.epoch, self._position, **counts)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        # Back beyond what was restored is another run; a Trainer asks once for the epoch before the restored one.
        if self.epoch < self._place.epoch - 1:
            self._place = RunPosition()

    def _here(self, world_size: int) -> RunPosition:
        """Where this iteration begins: as restored, or at its epoch's start, the epochs before it counted."""
        place = self._place
        if (self.epoch, self._position) == place[:2]:
            return self._aligned(place, world_size) if place.position else place
        if self.epoch <= place.epoch:
            place = RunPosition()
        for alike in self._walk(world_size).epochs(place):
            if alike.stop_epoch is None or self.epoch < alike.stop_epoch:
                break
        steps = alike.steps_before + (self.epoch - alike.first_epoch) * alike.steps
        return RunPosition(self.epoch, 0, steps)

    def _aligned(self, place: RunPosition, world_size: int) -> RunPosition:
        # A Trainer counts windows in its rank's batches since the epoch began, also on other ranks than it began on.
        by_epoch = self.schedule.unit == "epochs"
        stages = [self.schedule.stage_at(place.epoch)] if by_epoch else self.schedule.stages
        window_sizes = {self.schedule.window_size(stage, world_size) for stage in stages}
        if len(window_sizes) == 1:
            opened = self.steps_before % window_sizes.pop()
        else:
            opened = place.window_batches // world_size
        if not opened:
            return place._replace(window_position=place.position, window_batches=0)
        return place._replace(window_batches=opened * world_size)

    def _steps(self, position: int, world_size: int) -> ScheduledEpochs:
        """What an iteration has, which knows by itself where it begins."""
        # A state asks several times in each step of a run, and to get there the epochs before are walked through.
        dealt = self.schedule, self.num_samples, self.tail, world_size
        asked = *dealt, self.epoch, self._position, self.steps_before, self._place
        if self._rest is None or self._rest[0] != asked:
            self._rest = asked, self._walk(world_size).rest_of_epoch(self._here(world_size))
        return self._rest[1]

    def _walk(self, world_size: int) -> Walk:
        return Walk(self.schedule, self.num_samples, self.tail, world_size)

    def _identity(self) -> dict[str, Any]:
        names = ("num_samples", "seed", "shuffle", "tail")
        return {name: getattr(self, name) for name in names} | {"schedule": repr(self.schedule)}

    def _batches(self, position: int, batches_before: int, world_size: int, rank: int) -> Iterator[list[int]]:
        # Dealt as a whole, so that an iterator that is read goes on with its epoch, whatever becomes of the sampler.
        rest = self._steps(position, world_size)
        order = IndexPermutation(self.num_samples, (self.seed, 0, self.epoch)) if self.shuffle else None
        for equal in rest.dealt:
            begin, end = equal.part_of(rank)
            size, per_block = equal.stage.size, max(1, BLOCK // (end - begin))
            for first in range(0, equal.steps, per_block):
                steps = np.arange(first, min(first + per_block, equal.steps), dtype=np.int64)
                positions = equal.before.position + steps[:, None] * equal.total + np.arange(begin, end)
                rounds, places = np.divmod(positions, self.num_samples)  # beyond the end only where the tail is padded
                batches = (order(places) if order else places).tolist()
                for batch, occurrences in zip(batches, rounds.tolist(), strict=True):
                    yield with_occurrences([SizedIndex(index, size) for index in batch], occurrences)


COUNTS = ("optimizer_steps", "window_position", "window_batches")
"""What a state holds beside the epoch and the position."""
