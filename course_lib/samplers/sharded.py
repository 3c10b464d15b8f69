"""Somebody else's batch sampler, dealt to the ranks: whole batches in turn."""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Iterator, Mapping
from itertools import accumulate, chain
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, Sampler

from course_lib._generators import GLOBAL, generators_put_back, held_by, seed_generator
from course_lib._occurrences import Repeats, with_occurrences
from course_lib.samplers.dealing_whole_batches import WholeBatchSteps
from course_lib.samplers.epoch import EpochBatchSampler, SamplerTail
from course_lib.samplers.in_steps import StepsSampler


class ShardedBatchSampler(StepsSampler):
    """Any batch sampler, sharded: every index that it yields goes to some rank, and all ranks get as many batches.

    In each epoch the wrapped sampler is read once, whole, with its generators and the global ones seeded from
    (seed, epoch), and the global ones put back afterwards. So all ranks see it yield the same.

    >>> by_length = [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    >>> for rank in 0, 1:
    ...     print(list(ShardedBatchSampler(by_length, num_replicas=2, rank=rank)))
    [[0, 1, 2], [6, 7]]
    [[3, 4, 5], [8, 9]]

    What it yields must be a function of the seed and the epoch: in the first epoch it is read twice, and refused if
    it yields something else the second time. (hash() of a text is one value in a process, and does not show.)

    It is read when the length or the first batch is asked for after ``set_epoch``; what is changed behind that counts
    from the next epoch on. A state of an epoch that has other batches here is refused when the sampler is read.

    Args:
        batch_sampler: Has ``__iter__``; its ``set_epoch``, if any, is called. Uneven batches are welcome.
        seed: Of the wrapped sampler's generators, together with the epoch.
        tail: Each rank takes whole batches in turn, and the last ones rarely fill a step of all ranks. ``"spread"``:
            their indices are shared out evenly; if they are fewer than the ranks, the step before gives what lacks.
            ``"drop"``: they are left out. ``"pad"``: the epoch's first batches follow.
        num_replicas, rank: Default: the process group's, or 1 and 0 without one, read when iterated.

    Raises:
        ValueError: The wrapped sampler shards already; when it is read, it yields what are no batches of indices, or
            ``tail="spread"`` cannot give every rank an index; or a Trainer's ``overfit_batches`` asks for one order.
    """

    _place_names = (*EpochBatchSampler._place_names, "order")

    def __init__(
        self,
        batch_sampler: Any,
        *,
        seed: int = 0,
        tail: SamplerTail = "spread",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(seed=seed, tail=tail, num_replicas=num_replicas, rank=rank)
        _refuse_what_cannot_be_sharded(batch_sampler)
        self.batch_sampler = batch_sampler
        self.epochs_alike = isinstance(batch_sampler, list | tuple)
        self._comes_again = False
        """Whether two readings have been found alike."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_in_epoch": None}

    def _keep_one_order(self) -> None:
        raise ValueError(
            f"overfit_batches wants the same batches in every epoch, which {type(self).__name__} cannot make of "
            f"{type(self.batch_sampler).__name__}: take limit_train_batches, and a batch sampler that does not shuffle"
        )

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self._in_epoch: _WholeEpoch | None = None
        self._order: int | None = None
        """Checksum of the epoch that a restored position stands in."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._in_epoch = None

    def _whole(self) -> _WholeEpoch:
        """What the wrapped sampler yields in this epoch."""
        if self._in_epoch is None:
            batches = _read(self.batch_sampler, self.seed, self.epoch)
            if not self._comes_again and batches != _read(self.batch_sampler, self.seed, self.epoch):
                raise ValueError(
                    f"{type(self.batch_sampler).__name__} yields other batches when it is read twice from the same "
                    "seeds, and so it would on two ranks: it draws from a generator that is made in __iter__ or held "
                    "elsewhere, or shuffles a list of its own in place, or counts its runs. Hold the generator itself "
                    "as an attribute (self.generator = ...), or draw from the global one of torch, NumPy or random; "
                    "shuffle a copy; take the number of the epoch from set_epoch; and give no iterator, which ends once"
                )
            self._comes_again = True
            self._in_epoch = _WholeEpoch(batches)
        return self._in_epoch

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        state = super().state_dict(batches)
        return state | {"order": self._whole().checksum if state["position"] else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._order = state["order"]

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seed", "tail")}

    def _steps(self, position: int, world_size: int) -> WholeBatchSteps:
        return WholeBatchSteps(self._whole().edges, self.tail, position, world_size)

    def _check(self, position: int, world_size: int) -> None:
        whole = self._whole()
        if position > len(whole.flat) or self._order not in (None, whole.checksum):
            raise ValueError(
                f"the state stands at index {position} of an epoch of other batches than those that "
                f"{type(self.batch_sampler).__name__} yields for epoch {self.epoch} here, {len(whole.flat)} indices: "
                "some would be trained twice, and others never. Make it as it was when the state was taken (the "
                "dataset, its order, the batch size), or start a new epoch with set_epoch"
            )
        self._steps(position, world_size)  # which raises, where they cannot be dealt

    def _batches(self, position: int, batches_before: int, world_size: int, rank: int) -> Iterator[list[int]]:
        whole, steps = self._whole(), self._steps(position, world_size)
        for step in range(steps.count):
            begin, end = steps.part(step, rank)
            rounds, places = np.divmod(np.arange(begin, end), len(whole.flat))
            indices = [whole.flat[place] for place in places.tolist()]
            yield with_occurrences(indices, whole.repeats.occurrences(rounds, places).tolist())


class _WholeEpoch:
    """What a wrapped sampler yields in an epoch: its indices, one after the other, and where its batches begin."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.flat = list(chain.from_iterable(batches))
        self.edges = [0, *accumulate(map(len, batches))]
        indices = np.array(self.flat, dtype=np.int64)
        self.repeats = Repeats(indices)
        self.checksum = zlib.crc32(str(self.edges).encode(), zlib.crc32(indices.tobytes()))


def _refuse_what_cannot_be_sharded(batch_sampler: Any) -> None:
    if not hasattr(batch_sampler, "__iter__"):
        raise ValueError(f"batch_sampler must be iterable, got {batch_sampler!r}")
    for part in _parts(batch_sampler):
        if isinstance(part, EpochBatchSampler):
            if part.num_replicas != 1:
                raise ValueError(
                    f"{type(part).__name__} deals its batches to the ranks itself, and would be dealt twice: use it "
                    "alone, or make it whole, with num_replicas=1 and rank=0"
                )
            part.deals_alone = True
        if isinstance(part, DistributedSampler) and part.num_replicas > 1:
            raise ValueError(
                f"{type(batch_sampler).__name__} holds a DistributedSampler of {part.num_replicas} replicas: it "
                "shards already, and would be sharded twice. Wrap one over the whole dataset"
            )


def _parts(sampler: Any) -> Iterator[Any]:
    """A sampler and the samplers inside it."""
    yield sampler
    for name, value in getattr(sampler, "__dict__", {}).items():
        if value is not sampler and (isinstance(value, Sampler) or "sampler" in name):
            yield from _parts(value)


def _read(sampler: Any, seed: int, epoch: int) -> list[list[int]]:
    """Its batches of an epoch, with the generators seeded that are global or among its attributes."""
    parts = list(_parts(sampler))
    with _seeded(parts, (seed, 0, epoch)):
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        batches = [_plain_indices(sampler, batch) for batch in sampler]
    if not all(batches):
        raise ValueError(f"{type(sampler).__name__} yields an empty batch")
    return batches


@contextlib.contextmanager
def _seeded(parts: list[Any], seed: tuple[int, ...]) -> Iterator[None]:
    """Within it, the global generators and those of a sampler's parts stand where (seed, epoch) puts them."""
    generators = [*reversed(GLOBAL), *held_by(*parts)]
    seeds = np.random.SeedSequence(seed).generate_state(len(generators), np.uint64).tolist()
    with generators_put_back():
        for generator, number in zip(generators, seeds, strict=True):
            seed_generator(generator, number)
        yield


def _plain_indices(sampler: Any, batch: Any) -> list[int]:
    if not hasattr(type(batch), "__len__") and hasattr(type(batch), "__index__"):
        raise ValueError(
            f"{type(sampler).__name__} must yield batches (lists of indices), got the index {batch!r}: put it into "
            "torch.utils.data.BatchSampler(sampler, batch_size, drop_last)"
        )
    indices = list(batch)
    for index in indices:
        carries_more = isinstance(index, int) and type(index) not in (int, bool)
        if carries_more or not hasattr(type(index), "__index__"):
            raise ValueError(
                f"{type(sampler).__name__} must yield plain ints, got {index!r} of {type(index).__name__}: what is "
                "more than a number would be lost here"
            )
    return [operator.index(index) for index in indices]
