"""A shuffled dataset in batches whose size follows a schedule: every index once, each with its sample's size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from course_lib._arguments import int_of_at_least
from course_lib._occurrences import with_occurrences
from course_lib.samplers import EpochBatchSampler, IndexPermutation
from course_lib.samplers.epoch import SamplerTail
from course_lib.samplers.in_steps import check_position
from course_lib.samplers.permutation import BLOCK
from course_lib.schedules.schedule import SizeSchedule
from course_lib.schedules.schedule_plan import SchedulePlan
from course_lib.schedules.sized import SizedIndex
from course_lib.schedules.walk import RunPosition, ScheduledEpochs, Walk
from course_lib.steps.arguments import RunToPlan
from course_lib.steps.epochs import in_a_row


class ScheduledBatchSampler(EpochBatchSampler):
    """Batches that follow a :class:`SizeSchedule`, also within an epoch, on every rank alike.

    Yields lists of :class:`SizedIndex`, for a ``SizedDataset``. The order of an epoch is that of a
    ``ShuffledBatchSampler`` of the same seed; a step takes the next indices of it, and has one size on all ranks. The
    size changes between updates only: the micro-batches of a window have one. Resumable anywhere, on other numbers of
    workers and ranks, if the schedule is the same.

    Args:
        num_samples: Samples in the dataset.
        schedule: Says size and batch size of each step.
        shuffle: Whether each epoch has a random order; else that of the dataset.
        seed: Of the order, together with the epoch.
        tail: ``num_samples`` rarely divides. ``"spread"``: every index once, full batches but for the last and, where
            the ranks do not divide the samples, one more, whose sizes differ by one between ranks. ``"drop"``: full
            batches only, the last indices of the order are left out. ``"pad"``: full batches only, the first indices of
            the order are repeated at its end.
        num_replicas, rank: Default: the process group's, or 1 and 0 without one, read when iterated.

    A schedule by optimizer steps counts those of whole epochs: one for each window, and one for the short window at an
    epoch's end. After a resume on other ranks it goes on from what was counted there.

    Raises:
        ValueError: An argument is out of its range; ``effective_batch_size`` does not divide on so many ranks; or
            ``tail="spread"`` would leave a rank without an index in some step. Where the number of ranks is that of
            the process group, the latter two show when the sampler is iterated.
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
        super().__init__(shuffle=shuffle, seed=seed, tail=tail, num_replicas=num_replicas, rank=rank)
        self.num_samples = int_of_at_least(1, "num_samples", num_samples)
        if not isinstance(schedule, SizeSchedule):
            raise ValueError(f"schedule must be a SizeSchedule, got {schedule!r}; one size: ShuffledBatchSampler")
        self.schedule = schedule
        if self.num_replicas is not None:
            for stage in schedule.stages:
                schedule.window_size(stage, self.num_replicas)
            for _ in self._walk(self.num_replicas).epochs_to_deal(RunPosition()):
                pass

    @property
    def max_index(self) -> int:
        """The largest index that it can yield."""
        return self.num_samples - 1

    def __len__(self) -> int:
        self._check(self._position, self._world()[0])  # a Trainer hides what iter() raises
        return super().__len__()

    def window_sizes(self) -> list[int]:
        """The micro-batches of each window, from the current position to the end of the epoch, for an own loop.

        ::

            batches = iter(loader)
            for k in sampler.window_sizes():
                accumulate(model, list(islice(batches, k)), loss_sum_fn, count_fn)
        """
        rest = self._rest(self._world()[0])
        windows = (rest.window(rest.steps_before + number) for number in range(rest.steps))
        return [window.micro_batches for window in windows]

    def loss_weight(self, batch: int) -> float:
        """This rank's weight for the mean loss of a batch, so that DDP's average over ranks is the mean over samples.

        See ``ShuffledBatchSampler``. ``batch``: its number in the current iteration, from 0.
        """
        world_size, rank = self._world()
        rest = self._rest(world_size)
        if int_of_at_least(0, "batch", batch) >= rest.batches:
            raise ValueError(f"batch must be below the {rest.batches} of this iteration, got {batch}")
        number, _ = rest.place_of(batch)
        begin, end = rest.dealt[number].part_of(rank)
        return (end - begin) * world_size / rest.dealt[number].total

    def plan_steps(self, *, world_size: int | None = None, **run: Any) -> SchedulePlan:
        """Plan the optimizer steps of a run with this sampler, on the ranks there are; see ``SizeSchedule.plan``."""
        ranks = self._planned_world_size(world_size)
        return self.schedule.plan(self.num_samples, world_size=ranks, tail=self.tail, **run)

    plan = plan_steps

    def check_epochs(
        self,
        max_epochs: int = -1,
        *,
        max_steps: int = -1,
        steps_done: int = 0,
        limit_train_batches: int | float = 1.0,
    ) -> None:
        """Raise the ValueError of an epoch that a run would come to from here and that cannot be dealt to these ranks.

        ``max_steps`` and ``steps_done`` are optimizer steps of the run, at its end and until here.
        """
        world_size, _ = self._world()
        run = RunToPlan(
            max_epochs=max_epochs,
            max_steps=max_steps,
            limit_train_batches=limit_train_batches,
            steps_done=steps_done,
        )
        to_deal = self._walk(world_size).epochs_to_deal(self._here(world_size))
        for _ in in_a_row(to_deal, run, all_are_known=False, batches_done=self._steps_before):
            pass

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        state = super().state_dict(batches)
        world_size, _ = self._world()
        steps = state["steps"] - self._steps_before
        if state["epoch"] != self.epoch:
            rest = self._rest(world_size)
            place = RunPosition(optimizer_steps=rest.steps_before + rest.steps)
        elif not steps and (self.epoch, self._position) == self._place[:2]:
            place = self._place  # as it was restored, be it on other ranks
        else:
            place = self._place_after(steps, world_size)
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
        stages = [self.schedule.stage_at(epoch=place.epoch)] if by_epoch else self.schedule.stages
        window_sizes = {self.schedule.window_size(stage, world_size) for stage in stages}
        if len(window_sizes) == 1:
            opened = self._steps_before % window_sizes.pop()
        else:
            opened = place.window_batches // world_size
        if not opened:
            return place._replace(window_position=place.position, window_batches=0)
        return place._replace(window_batches=opened * world_size)

    def _rest(self, world_size: int) -> ScheduledEpochs:
        """What an iteration has."""
        return self._walk(world_size).rest_of_epoch(self._here(world_size))

    def _walk(self, world_size: int) -> Walk:
        return Walk(self.schedule, self.num_samples, self.tail, world_size)

    def _place_after(self, steps: int, world_size: int) -> RunPosition:
        """Where an iteration stands after a step, and not before the next, which may be in another window."""
        if not steps:
            return self._here(world_size)
        rest = self._rest(world_size)
        number, before = rest.place_of(steps - 1)
        return rest.dealt[number].place_after(before + 1)

    def _identity(self) -> dict[str, Any]:
        names = ("num_samples", "seed", "shuffle", "tail")
        return {name: getattr(self, name) for name in names} | {"schedule": self.schedule.identity()}

    def _steps_left(self, position: int, world_size: int) -> int:
        return self._rest(world_size).batches

    def _position_after(self, position: int, steps: int, world_size: int) -> int:
        return self._place_after(steps, world_size).position

    def _check(self, position: int, world_size: int) -> None:
        check_position(position, self.num_samples)
        self._rest(world_size).refuse_empty_batches()

    def _batches(self, position: int, batches_before: int, world_size: int, rank: int) -> Iterator[list[int]]:
        # Dealt as a whole, so that an iterator that is read goes on with its epoch, whatever becomes of the sampler.
        rest = self._rest(world_size)
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
