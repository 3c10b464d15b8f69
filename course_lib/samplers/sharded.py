"""Somebody else's batch sampler, dealt to the ranks: whole batches in turn, or each batch cut into parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler

from course_lib.samplers.epoch import EpochBatchSampler, SamplerTail

Chunk = tuple[int, int]
"""Begin and end in the epoch's flat order."""


class ShardedBatchSampler(EpochBatchSampler):
    """Any batch sampler, sharded: every index that it yields goes to some rank, and all ranks get as many batches.

    Before each epoch the wrapped sampler runs once, whole, with its generators and the global ones seeded from
    (seed, epoch), and the global ones put back afterwards. So all ranks see it yield the same, whatever they drew
    before; a wrapper without this loses some indices and repeats others.

    Args:
        batch_sampler: Has ``__iter__``; its ``set_epoch``, if any, is called. Uneven batches are welcome.
        split: ``False``: each rank takes whole batches, in turn. ``True``: each batch is cut into one part a rank, so
            that its size is that of a step over all ranks.
        seed: Of the wrapped sampler's generators, together with the epoch.
        tail: The last batches rarely fill a step of all ranks (and with ``split=True``, a short batch may have fewer
            indices than there are ranks). ``"spread"``: their indices are shared out evenly, together with the step
            before where it needs to be. ``"drop"``: they are left out. ``"pad"``: the epoch's first batches follow
            (with ``split=True``: a batch repeats its own indices).
        num_replicas, rank: Default: the process group's, or 1 and 0 without one, read when iterated.
        sampler: Ignored; under default flags, Lightning hands its own over.

    Raises:
        ValueError: The wrapped sampler shards already, or yields an empty batch; or ``tail="spread"`` cannot give
            every rank an index (it shows when the sampler is iterated).
    """

    def __init__(
        self,
        batch_sampler: Any,
        *,
        split: bool = False,
        seed: int = 0,
        tail: SamplerTail = "spread",
        num_replicas: int | None = None,
        rank: int | None = None,
        sampler: object = None,
    ) -> None:
        super().__init__(shuffle=True, seed=seed, tail=tail, num_replicas=num_replicas, rank=rank)
        if not hasattr(batch_sampler, "__iter__"):
            raise ValueError(f"batch_sampler must be iterable, got {batch_sampler!r}")
        for part in _parts(batch_sampler):
            if isinstance(part, DistributedSampler) and part.num_replicas > 1:
                raise ValueError(
                    f"{type(batch_sampler).__name__} holds a DistributedSampler of {part.num_replicas} replicas: it "
                    "shards already, and would be sharded twice. Wrap one over the whole dataset"
                )
        self.batch_sampler = batch_sampler
        self.split = bool(split)
        self._flat: list[int] = []
        self._edges: list[int] = []
        self._epoch_of_plan = -1
        self._laid_out: tuple[tuple[int, ...], list[list[Chunk]]] = (), []
        self._remember_arguments(
            batch_sampler=batch_sampler, split=split, seed=seed, tail=tail, num_replicas=num_replicas, rank=rank
        )

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"_flat": [], "_edges": [], "_epoch_of_plan": -1, "_laid_out": ((), [])}
        return vars(self) | fresh

    def _whole(self) -> tuple[list[int], list[int]]:
        """The wrapped sampler's indices of this epoch, one after the other, and where its batches end."""
        if self._epoch_of_plan != self.epoch:
            with _seeded(self.batch_sampler, (self.seed, 0, self.epoch)):
                for part in _parts(self.batch_sampler):
                    if hasattr(part, "set_epoch"):
                        part.set_epoch(self.epoch)
                batches = [list(map(int, batch)) for batch in self.batch_sampler]
            if not all(batches):
                raise ValueError(f"{type(self.batch_sampler).__name__} yields an empty batch")
            self._flat = [index for batch in batches for index in batch]
            self._edges = np.cumsum([0, *map(len, batches)]).tolist()
            self._epoch_of_plan = self.epoch
        return self._flat, self._edges

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self._plan = (0, 0)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        state = super().state_dict(batches)
        world_size, _ = self._world()
        same_plan = world_size == self._plan[1] and state["epoch"] == self.epoch
        begin = self._plan[0] if same_plan else self._position if state["epoch"] == self.epoch else 0
        return state | {"plan": (begin, world_size)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._plan = tuple(state["plan"])

    def _steps(self, position: int, world_size: int) -> list[list[Chunk]]:
        """For each step from a position on, every rank's (begin, end) in the flat order; the end may run past it."""
        # How the end is shared out depends on where the dealing began, so a resume on as many ranks goes on with it.
        begin, planned_for = self._plan
        plan = self._planned(begin if planned_for == world_size else position, world_size)
        return [step for step in plan if step[0][0] >= position]

    def _planned(self, position: int, world_size: int) -> list[list[Chunk]]:
        _, edges = self._whole()
        if self._laid_out[0] != (self.epoch, position, world_size):  # linear in the epoch's batches: keep the last
            self._laid_out = (self.epoch, position, world_size), self._lay_out(position, world_size, edges)
        return self._laid_out[1]

    def _lay_out(self, position: int, world_size: int, edges: list[int]) -> list[list[Chunk]]:
        bounds = [position, *(edge for edge in edges if edge > position)]
        chunks = list(pairwise(bounds))
        if self.split:
            return _split_steps(chunks, world_size, self.tail)
        return _dealt_steps(chunks, edges, world_size, self.tail)

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seed", "split", "tail")}

    def _steps_left(self, position: int, world_size: int) -> int:
        return len(self._steps(position, world_size))

    def _position_after(self, position: int, steps: int, world_size: int) -> int:
        if steps == 0:
            return position
        flat, _ = self._whole()
        return min(len(flat), max(end for _, end in self._steps(position, world_size)[steps - 1]))

    def _check(self, position: int, world_size: int) -> None:
        flat, _ = self._whole()
        if position > len(flat):
            raise ValueError(
                f"the state stands at index {position} of an epoch that has {len(flat)}: it was taken with another "
                f"{type(self.batch_sampler).__name__}"
            )
        self._steps(position, world_size)

    def _batches(self, position: int, batches_before: int, world_size: int, rank: int) -> Iterator[list[int]]:
        flat, _ = self._whole()
        for step in self._steps(position, world_size):
            begin, end = step[rank]
            if end <= len(flat):
                yield flat[begin:end]
            else:
                yield [flat[i % len(flat)] for i in range(begin, end)]


def _parts(sampler: Any) -> Iterator[Any]:
    """A sampler and the samplers inside it."""
    yield sampler
    for name, value in getattr(sampler, "__dict__", {}).items():
        if value is not sampler and (isinstance(value, Sampler) or "sampler" in name):
            yield from _parts(value)


class _seeded:
    """Within it, the global generators and those of a sampler stand where (seed, epoch) puts them."""

    def __init__(self, sampler: Any, seed: tuple[int, ...]) -> None:
        self.seeds = iter(np.random.SeedSequence(seed).generate_state(64, np.uint64).tolist())
        self.generators = [
            value
            for part in _parts(sampler)
            for value in getattr(part, "__dict__", {}).values()
            if isinstance(value, (torch.Generator, np.random.Generator, random.Random))
        ]

    def __enter__(self) -> None:
        self.before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        torch.default_generator.manual_seed(next(self.seeds) % 2**63)
        np.random.seed(next(self.seeds) % 2**32)  # noqa: NPY002
        random.seed(next(self.seeds))
        for generator in self.generators:
            seed = next(self.seeds)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed % 2**63)
            elif isinstance(generator, random.Random):
                generator.seed(seed)
            else:
                generator.bit_generator.state = type(generator.bit_generator)(seed).state

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.before[0])
        np.random.set_state(self.before[1])  # noqa: NPY002
        random.setstate(self.before[2])


def _dealt_steps(chunks: list[Chunk], edges: list[int], world_size: int, tail: SamplerTail) -> list[list[Chunk]]:
    """Whole batches to the ranks in turn."""
    steps = [chunks[i : i + world_size] for i in range(0, len(chunks), world_size)]
    if not steps or len(steps[-1]) == world_size:
        return steps
    short = steps.pop()
    if tail == "spread":
        return _shared_out(steps, short[0][0], short[-1][1], world_size)
    if tail == "pad":
        total, first = edges[-1], list(pairwise(edges))
        extra = [first[i % len(first)] for i in range(world_size - len(short))]
        steps.append([*short, *((total + begin, total + end) for begin, end in extra)])
    return steps


def _split_steps(chunks: list[Chunk], world_size: int, tail: SamplerTail) -> list[list[Chunk]]:
    """Each batch to all ranks."""
    steps: list[list[Chunk]] = []
    for begin, end in chunks:
        if end - begin >= world_size:
            steps.append(_cut(begin, end, world_size))
        elif tail == "spread":
            steps = _shared_out(steps, begin, end, world_size)
        elif tail == "pad":
            steps.append([(begin + r % (end - begin), begin + r % (end - begin) + 1) for r in range(world_size)])
    return steps


def _shared_out(steps: list[list[Chunk]], begin: int, end: int, world_size: int) -> list[list[Chunk]]:
    """Give all ranks a part of what does not fill a step: alone, or cut anew together with the step before."""
    if end - begin >= world_size:
        return [*steps, _cut(begin, end, world_size)]
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
