"""Somebody else's batch sampler, dealt to the ranks: whole batches in turn."""

from __future__ import annotations

import contextlib
import copy
import operator
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DistributedSampler, Sampler

from course_lib._generators import GLOBAL, generators_put_back, held_by, seed_generator
from course_lib._occurrences import Repeats, with_occurrences
from course_lib.samplers.epoch import EpochBatchSampler, SamplerTail
from course_lib.steps.dealt import Dealing, equal_batches

Chunk = tuple[int, int]
"""Begin and end in the epoch's flat order."""
_REPRODUCIBLE = ("builtins", *(f"torch.utils.data.{name}" for name in ("sampler", "distributed", "dataloader")))
"""Where classes are from that draw from the generators they are given, from the global ones, or by seed and epoch."""


class ShardedBatchSampler(EpochBatchSampler):
    """Any batch sampler, sharded: every index that it yields goes to some rank, and all ranks get as many batches.

    Before each epoch the wrapped sampler runs once, whole, with its generators and the global ones seeded from
    (seed, epoch), and the global ones put back afterwards. So all ranks see it yield the same, whatever they drew
    before; a wrapper without this loses some indices and repeats others. What no generator within reach decides (one
    that ``__iter__`` makes, or that a closure holds) would be another order on each rank: it shows when two copies of
    the wrapped sampler are read ahead of the first epoch, and is refused. (hash() of a text is one value in a process,
    and does not show.)

    >>> by_length = [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    >>> for rank in 0, 1:
    ...     print(list(ShardedBatchSampler(by_length, num_replicas=2, rank=rank)))
    [[0, 1, 2], [6, 7]]
    [[3, 4, 5], [8, 9]]

    It runs again within an epoch where it was replaced, or an attribute of it or of a sampler inside it was set. What
    is changed in place (an element of its list of weights) counts from the next epoch on.

    What a resume deals rests on that: on the seed and the epoch. A wrapped sampler that remembers something else of its
    earlier epochs (how often it has run) begins again, and so deals other batches than without the stop. Within an
    epoch, a state whose epoch has other batches here is refused where the sampler is iterated (the dataset has grown, a
    weight or the batch size has changed).

    Args:
        batch_sampler: Has ``__iter__``; its ``set_epoch``, if any, is called. Uneven batches are welcome.
        seed: Of the wrapped sampler's generators, together with the epoch.
        tail: Each rank takes whole batches in turn, and the last ones rarely fill a step of all ranks. ``"spread"``:
            their indices are shared out evenly, together with the step before where it needs to be. ``"drop"``: they
            are left out. ``"pad"``: the epoch's first batches follow.
        num_replicas, rank: Default: the process group's, or 1 and 0 without one, read when iterated.
        sampler: Ignored; under default flags, Lightning hands its own over.

    Raises:
        ValueError: The wrapped sampler shards already, or yields an empty batch, or single indices; or
            ``tail="spread"`` cannot give every rank an index, or two copies of the wrapped sampler yield different
            batches from the same seeds, or a state's epoch had others (these show when the sampler is iterated).
    """

    def __init__(
        self,
        batch_sampler: Any,
        *,
        seed: int = 0,
        tail: SamplerTail = "spread",
        num_replicas: int | None = None,
        rank: int | None = None,
        sampler: object = None,
    ) -> None:
        self.batch_sampler = batch_sampler
        super().__init__(seed=seed, tail=tail, num_replicas=num_replicas, rank=rank, sampler=sampler)
        if not hasattr(batch_sampler, "__iter__"):
            raise ValueError(f"batch_sampler must be iterable, got {batch_sampler!r}")
        for part in _parts(batch_sampler):
            if isinstance(part, Iterator):
                raise ValueError(
                    f"{type(part).__name__} is an iterator, which is empty after one epoch: give an object whose "
                    "__iter__ begins again (a list, a class with __iter__)"
                )
            if isinstance(part, EpochBatchSampler) and part.num_replicas != 1:
                raise ValueError(
                    f"{type(part).__name__} deals its batches to the ranks itself, and would be dealt twice: use it "
                    "alone, or make it whole, with num_replicas=1 and rank=0"
                )
            if isinstance(part, DistributedSampler) and part.num_replicas > 1:
                raise ValueError(
                    f"{type(batch_sampler).__name__} holds a DistributedSampler of {part.num_replicas} replicas: it "
                    "shards already, and would be sharded twice. Wrap one over the whole dataset"
                )
        self.epochs_alike = isinstance(batch_sampler, list | tuple)
        self._is_known = is_of_torch(batch_sampler)
        """Whether the generators that can be seeded decide what it yields."""
        self._last_read: _Read | None = None
        self._last_plan: _StepsOfEpoch | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last_read": None, "_last_plan": None}

    def _keep_one_order(self) -> None:
        raise ValueError(
            f"overfit_batches wants the same batches in every epoch, which {type(self).__name__} cannot make of "
            f"{type(self.batch_sampler).__name__}: take limit_train_batches, and a batch sampler that does not shuffle"
        )

    def _whole(self) -> _Read:
        """What the wrapped sampler yields in this epoch: read once, and again where it is no longer the same."""
        if not self._is_known:
            _require_reproducible(self.batch_sampler, self.seed, self.epoch)
            self._is_known = True
        last = self._last_read
        if last is None or last.epoch != self.epoch or not _same(last.looks, _looks(self.batch_sampler)):
            self._last_read = _read(self.batch_sampler, self.seed, self.epoch)
        assert self._last_read is not None
        return self._last_read

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self._begun = (0, 0)
        self._order: int | None = None  # that a restored position stands in

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        state = super().state_dict(batches)
        world_size, _ = self._world()
        if state["epoch"] != self.epoch:
            begin = 0
        elif world_size == self._begun[1]:
            begin = self._begun[0]
        else:
            begin = self._position
        return state | {"plan": (begin, world_size), "order": self._whole().order if state["position"] else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._begun = tuple(state["plan"])
        self._order = state.get("order")

    def _plan(self, world_size: int) -> _StepsOfEpoch:
        """The steps of this epoch on so many ranks: laid out once, as every state asks for them."""
        whole = self._whole()
        # How the end is shared out depends on where the dealing began, so a resume on as many ranks goes on with it.
        begin, begun_on = self._begun
        if begun_on != world_size:
            begin = self._position
        plan = self._last_plan
        if plan is None or plan.whole is not whole or (plan.begin, plan.world_size) != (begin, world_size):
            plan = self._last_plan = self._lay_out(whole, begin, world_size)
        return plan

    def _lay_out(self, whole: _Read, begin: int, world_size: int) -> _StepsOfEpoch:
        bounds = [begin, *(edge for edge in whole.edges if edge > begin)]
        chunks = list(pairwise(bounds))
        steps = _dealt_steps(chunks, whole.edges, world_size, self.tail)
        return _StepsOfEpoch(whole, begin, world_size, steps, [step[0][0] for step in steps])

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seed", "tail")}

    def _dealing(self, position: int, world_size: int) -> Dealing:
        whole = self._whole()
        steps = self._lay_out(whole, position, world_size).steps
        sizes = [[end - begin for begin, end in step] for step in steps]
        return Dealing(len(whole.flat) - position, equal_batches((max(step), sum(step)) for step in sizes))

    def _steps_left(self, position: int, world_size: int) -> int:
        plan = self._plan(world_size)
        return len(plan.steps) - plan.number_at(position)

    def _position_after(self, position: int, steps: int, world_size: int) -> int:
        if steps == 0:
            return position
        plan = self._plan(world_size)
        last = plan.steps[plan.number_at(position) + steps - 1]
        return min(len(plan.whole.flat), max(end for _, end in last))

    def _check(self, position: int, world_size: int) -> None:
        whole = self._whole()
        if position > len(whole.flat) or self._order not in (None, whole.order):
            raise ValueError(
                f"the state stands at index {position} of an epoch of other batches than those that "
                f"{type(self.batch_sampler).__name__} yields for epoch {self.epoch} here, {len(whole.flat)} indices: "
                "some would be trained twice, and others never. Make it as it was when the state was taken (the "
                "dataset, its order, the batch size), or start a new epoch with set_epoch"
            )
        self._plan(world_size)

    def _batches(self, position: int, batches_before: int, world_size: int, rank: int) -> Iterator[list[int]]:
        plan = self._plan(world_size)
        flat, repeats = plan.whole.flat, plan.whole.repeats
        for number in range(plan.number_at(position), len(plan.steps)):
            begin, end = plan.steps[number][rank]
            if end <= len(flat) and repeats.before is None:
                yield flat[begin:end]
            else:
                rounds, places = np.divmod(np.arange(begin, end), len(flat))
                indices = [flat[place] for place in places.tolist()]
                yield with_occurrences(indices, repeats.occurrences(rounds, places).tolist())


class _Read(NamedTuple):
    """What a wrapped sampler yielded in an epoch."""

    epoch: int
    flat: list[int]
    """Its indices, one after the other."""
    order: int
    """A checksum of these and of the edges."""
    repeats: Repeats
    edges: list[int]
    """Where its batches begin, and the end."""
    looks: list[Any]
    """What the sampler was made of afterwards."""


class _StepsOfEpoch(NamedTuple):
    """An epoch's steps from where the dealing began."""

    whole: _Read
    begin: int
    world_size: int
    steps: list[list[Chunk]]
    """Of each step, every rank's part; the end may lie behind the flat order's, which then begins again."""
    begins: list[int]
    """Where each step begins."""

    def number_at(self, position: int) -> int:
        """The first step from a position on."""
        return bisect_left(self.begins, position)


def _listed(sampler: Any, seed: int, epoch: int) -> list[list[int]]:
    """Its batches of an epoch, with the generators seeded that are global or among its attributes."""
    with _seeded(sampler, (seed, 0, epoch)):
        for part in _parts(sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        return [[_plain_index(sampler, index) for index in _batch(sampler, batch)] for batch in sampler]


def _batch(sampler: Any, batch: Any) -> Any:
    if hasattr(type(batch), "__index__") and not hasattr(type(batch), "__len__"):
        raise ValueError(
            f"{type(sampler).__name__} must yield batches (lists of indices), got the index {batch!r}: put it into "
            "torch.utils.data.BatchSampler(sampler, batch_size, drop_last)"
        )
    return batch


def _plain_index(sampler: Any, index: object) -> int:
    carries_more = isinstance(index, int) and type(index).__index__ is int.__index__ and type(index) not in (int, bool)
    if carries_more or not hasattr(type(index), "__index__"):
        raise ValueError(
            f"{type(sampler).__name__} must yield plain ints, got {index!r} of {type(index).__name__}: what is more "
            "than a number would be lost here"
        )
    return operator.index(index)  # type: ignore[arg-type]


def _read(sampler: Any, seed: int, epoch: int) -> _Read:
    batches = _listed(sampler, seed, epoch)
    if not all(batches):
        raise ValueError(f"{type(sampler).__name__} yields an empty batch")
    edges = np.cumsum([0, *map(len, batches)]).tolist()
    flat = list(chain.from_iterable(batches))
    indices = np.array(flat, dtype=np.int64)
    return _Read(
        epoch,
        flat,
        zlib.crc32(str(edges).encode(), zlib.crc32(indices.tobytes())),
        Repeats(indices),
        edges,
        _looks(sampler),
    )


def _require_reproducible(sampler: Any, seed: int, epoch: int) -> None:
    one, other = (_listed(_copied(sampler), seed, epoch) for _ in range(2))
    if one != other:
        raise ValueError(
            f"two copies of {type(sampler).__name__} yield different batches from the same seeds, and so would two "
            "ranks: it draws from a generator that is made in __iter__ or held elsewhere, or it shuffles a list of its "
            "own in place, which begins with the order of the epoch before. Hold the generator itself as an attribute "
            "(self.generator = ...), or draw from the global one of torch, NumPy or random, and shuffle a copy"
        )


def _copied(sampler: Any) -> Any:
    """A sampler that begins where this one stands; what it deals from is not copied."""
    twin = copy.copy(sampler)
    for name, inner in _inner(sampler):
        vars(twin)[name] = _copied(inner)
    return twin


def _parts(sampler: Any) -> Iterator[Any]:
    """A sampler and the samplers inside it."""
    yield sampler
    for _, inner in _inner(sampler):
        yield from _parts(inner)


def is_of_torch(sampler: Any) -> bool:
    """Whether it, and each sampler inside it, is one of torch's, or a list or the like."""
    return all(type(part).__module__ in _REPRODUCIBLE for part in _parts(sampler))


def generators_of(sampler: Any) -> list[Any]:
    """Those that it and the samplers inside it hold."""
    return held_by(*_parts(sampler))


def _inner(sampler: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(sampler, "__dict__", {}).items():
        if value is not sampler and (isinstance(value, Sampler) or "sampler" in name):
            yield name, value


def _looks(sampler: Any) -> list[Any]:
    """What a sampler is made of: itself and the samplers inside it, and the names and values of their attributes."""
    looks: list[Any] = []
    for part in _parts(sampler):
        looks.append(part)
        for name, value in getattr(part, "__dict__", {}).items():
            looks += [name, value]
    return looks


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))


@contextlib.contextmanager
def _seeded(sampler: Any, seed: tuple[int, ...]) -> Iterator[None]:
    """Within it, the global generators and those of a sampler stand where (seed, epoch) puts them."""
    seeds = iter(np.random.SeedSequence(seed).generate_state(64, np.uint64).tolist())
    generators = generators_of(sampler)
    with generators_put_back():
        for generator in (*reversed(GLOBAL), *generators):
            seed_generator(generator, next(seeds))
        yield


def _dealt_steps(chunks: list[Chunk], edges: list[int], world_size: int, tail: SamplerTail) -> list[list[Chunk]]:
    """Whole batches to the ranks in turn."""
    # A step is a chunk for each rank; the last may lack some, and is made whole or left out by the tail.
    steps = [chunks[i : i + world_size] for i in range(0, len(chunks), world_size)]
    if not steps or len(steps[-1]) == world_size:
        return steps
    short = steps.pop()
    if tail == "spread":
        return _shared_out(steps, short[0][0], short[-1][1], world_size)
    if tail == "pad":
        # Behind the end of the flat order the epoch begins again: its first batches lie at `total` and on.
        total, first = edges[-1], list(pairwise(edges))
        extra = [first[i % len(first)] for i in range(world_size - len(short))]
        steps.append([*short, *((total + begin, total + end) for begin, end in extra)])
    return steps


def _shared_out(steps: list[list[Chunk]], begin: int, end: int, world_size: int) -> list[list[Chunk]]:
    """Give all ranks a part of what does not fill a step: alone, or cut again together with the step before."""
    if end - begin >= world_size:
        return [*steps, _cut(begin, end, world_size)]
    # Together with the step before there are two indices a rank, one for each of the two steps: enough.
    if steps and end - steps[-1][0][0] >= 2 * world_size:
        begin = steps[-1][0][0]
        middle = begin + -(-(end - begin) // 2)
        return [*steps[:-1], _cut(begin, middle, world_size), _cut(middle, end, world_size)]
    raise ValueError(
        f'tail="spread" cannot share {end - begin} indices out to {world_size} ranks without an empty batch: '
        'use tail="drop" or tail="pad"'
    )


def _cut(begin: int, end: int, parts: int) -> list[Chunk]:
    size = end - begin
    return [(begin + size * part // parts, begin + size * (part + 1) // parts) for part in range(parts)]
