"""What every sampler here has: an epoch, a position in its order, the ranks, and a state.

A subclass says how an epoch is dealt from a position on; this class does what must be alike everywhere, so that
trainers, loaders and checkpoints can treat all samplers in one way.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from torch.utils.data import Sampler, SequentialSampler

from course_lib._ranks import rank_of_this_process, world_size_of
from course_lib._words import int_of_at_least

SamplerTail = Literal["spread", "drop", "pad"]
"""What becomes of the samples that fill no whole step: smaller batches, left out, or filled up with repeated ones."""


class EpochBatchSampler(Sampler[list[int]], ABC):
    """What the samplers here share: the epoch, the position in its order, and this rank's part of each step.

    A *step* is one batch on every rank. The state is a global position: how much of the epoch's order all ranks
    together have had. A sampler of your own says with four methods how it deals, and has the rest from here. This one
    deals the blocks of a recording to the ranks in turn; its position counts blocks:

    >>> class Blocks(EpochBatchSampler):
    ...     def __init__(self, blocks, size=2):
    ...         super().__init__(tail="drop")
    ...         self.blocks, self.size = blocks, size
    ...
    ...     def _batches(self, position, batches_before, world_size, rank):
    ...         for step in range(self._steps_left(position, world_size)):
    ...             begin = (self._position_after(position, step, world_size) + rank) * self.size
    ...             yield list(range(begin, begin + self.size))
    ...
    ...     def _steps_left(self, position, world_size):
    ...         return (self.blocks - position) // world_size
    ...
    ...     def _position_after(self, position, steps, world_size):
    ...         return position + steps * world_size
    ...
    ...     def _identity(self):
    ...         return {"blocks": self.blocks, "size": self.size}
    >>> sampler = Blocks(3)
    >>> list(sampler), sampler.state_dict(batches=1)["position"]
    ([[0, 1], [2, 3], [4, 5]], 1)

    Under a Trainer's default flags and in Fabric, what trains is a copy of the sampler. Bounds:

    - ``overfit_batches`` turns the shuffling off, but for a plain loader on one device: take ``shuffle=False`` there.
    - A Trainer that is resumed, or given a used loader, calls ``set_epoch`` when the workers of a plain ``DataLoader``
      have begun to draw another epoch. Reading on raises a RuntimeError, but for an epoch that was drawn whole.
    - With accelerate on several processes, its length and its batches are a ValueError.

    A ``ResumableDataLoader`` has neither of the last two.
    """

    deals_alone = False
    """Whether nobody deals what comes from here once more: set by what reads it, and is never wrapped."""
    _iterations = 0
    """How often it was iterated: of several iterations, only the latest refuses another epoch."""
    _place_names: tuple[str, ...] = ("epoch", "position", "steps", "batches")
    """What a state has beside its identity."""

    # ------------------------------------------------------------------------------------------- what a subclass says

    @abstractmethod
    def _batches(self, position: int, batches_before: int, world_size: int, rank: int) -> Iterator[list[int]]:
        """One rank's batches from a position on; ``batches_before`` were dealt before, over all ranks."""

    @abstractmethod
    def _steps_left(self, position: int, world_size: int) -> int:
        """Steps from a position to the end of the epoch."""

    @abstractmethod
    def _position_after(self, position: int, steps: int, world_size: int) -> int:
        """The position after some steps, when an iteration began at ``position``."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What a state must share with the sampler that loads it."""

    def _check(self, position: int, world_size: int) -> None:
        """Raise a ValueError if what is left cannot be dealt to so many ranks."""

    # ----------------------------------------------------------------------------------------- what it has from here

    def __init__(
        self,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: SamplerTail = "spread",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.shuffle = bool(shuffle)
        self.seed = int_of_at_least(0, "seed", seed)
        if tail not in ("spread", "drop", "pad"):
            raise ValueError(f'tail must be "spread", "drop" or "pad", got {tail!r}')
        self.tail = tail
        self.num_replicas = None if num_replicas is None else int_of_at_least(1, "num_replicas", num_replicas)
        self.rank = None if rank is None else int_of_at_least(0, "rank", rank)
        if self.rank is not None and self.num_replicas is not None:
            self._world()
        self._begin(0)

    def _made_again(self, sampler: object) -> Self:
        """What Lightning and Fabric get where they make a loader's batch sampler again around a ``sampler`` of theirs.

        They do so under default flags, by a call of what stands as ``explicit_cls`` among the ``__pl_saved_kwargs`` of
        the first one (2.6.6, ``fabric/utilities/data.py``: ``_reinstantiate_wrapped_cls``). Here it is this method, so
        that no constructor has to take a ``sampler``, and what was set on a sampler comes along.
        """
        made = copy.copy(self)
        if isinstance(sampler, SequentialSampler):  # overfit_batches says so that it wants the same batches each epoch
            made._keep_one_order()
        return made

    def _keep_one_order(self) -> None:
        self.shuffle = False

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.steps_before = 0
        """Batches of this epoch that a rank had before the restored position; 0 in an epoch from its start."""
        self._position = 0
        self._batches_before = 0
        self._yielded = 0

    @property
    def sampler(self) -> EpochBatchSampler:
        """Itself: a trainer that looks for ``batch_sampler.sampler.set_epoch`` finds it."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Turn to an epoch. Another epoch begins at its start; the epoch of a restored state keeps its position."""
        epoch = int_of_at_least(0, "epoch", epoch)
        if epoch != self.epoch:
            self._begin(epoch)

    def __len__(self) -> int:
        """Batches that an iteration yields on this rank: of the epoch, or of what is left of it after a resume."""
        world_size, _ = self._world()
        self._refuse_to_be_dealt_twice()
        self._check(self._position, world_size)  # a Trainer hides what iter() raises
        return self._steps_left(self._position, world_size)

    def __iter__(self) -> Iterator[list[int]]:
        world_size, rank = self._world()
        self._refuse_to_be_dealt_twice()
        self._check(self._position, world_size)
        self._yielded = 0
        self._iterations += 1
        return self._counted(world_size, rank, self._iterations)

    def _counted(self, world_size: int, rank: int, iteration: int) -> Iterator[list[int]]:
        # A Trainer that resumes asks for an iterator, and only then turns to the epoch; so it is dealt when it is read.
        epoch = self.epoch
        self._check(self._position, world_size)
        batches = self._batches(self._position, self._batches_before, world_size, rank)
        for number, batch in enumerate(batches, start=1):
            self._yielded = number  # of the iterator that moved last
            yield batch
            if self.epoch != epoch and iteration == self._iterations:  # no other iteration has turned to it
                raise RuntimeError(
                    f"the sampler was turned to epoch {self.epoch} when batches of epoch {epoch} had been drawn and "
                    "were still being read: a Trainer that is resumed, or gets a loader that was used before, turns "
                    "to its epoch when the workers of a plain DataLoader have begun to draw. Read the sampler through "
                    "a course_lib.resume.ResumableDataLoader, give a Trainer that is resumed an ExactResume, or make "
                    "the loader of a new run anew"
                )

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where the epoch stands after some batches of the current iteration: the same on every rank.

        Args:
            batches: How many batches this rank's trainer has *received*; a loader with workers asks for more than
                it delivers. Default: those that the last iterator has yielded.
        """
        world_size, _ = self._world()
        done = self._yielded if batches is None else int_of_at_least(0, "batches", batches)
        left = self._steps_left(self._position, world_size)
        if done > left:
            raise ValueError(f"batches must be at most the {left} that this iteration has, got {done}")
        if done == left and done + self._batches_before > 0:
            place = {"epoch": self.epoch + 1, "position": 0, "steps": 0, "batches": 0}  # the next epoch's start
        else:
            place = {
                "epoch": self.epoch,
                "position": self._position_after(self._position, done, world_size),
                "steps": self.steps_before + done,
                "batches": self._batches_before + done * world_size,
            }
        return place | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on whatever number of ranks there are now.

        Raises:
            ValueError: The state belongs to another dataset, seed or batch size: its position means nothing here.
        """
        identity = self._identity()
        for name in (*identity, *self._place_names):
            if name not in state:
                raise ValueError(
                    f"this is no state of a {type(self).__name__}: it has no {name!r}, only {sorted(state)}"
                )
        for name, ours in identity.items():
            if state[name] != ours:
                raise ValueError(
                    f"the state was taken with {name}={state[name]!r}, this sampler has {name}={ours!r}: its position "
                    f"means another sample here. Make the sampler as it was, or start a new epoch with set_epoch"
                )
        self._begin(int_of_at_least(0, "epoch", state["epoch"]))
        self._position = int_of_at_least(0, "position", state["position"])
        self.steps_before = int_of_at_least(0, "steps", state["steps"])
        self._batches_before = int_of_at_least(0, "batches", state["batches"])

    def _world(self) -> tuple[int, int]:
        """The number of ranks and this rank, now."""
        world_size = self.num_replicas or world_size_of()
        rank = self.rank if self.rank is not None else rank_of_this_process()
        if rank >= world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1} with {world_size} replicas, got {rank}")
        return world_size, rank

    def _refuse_to_be_dealt_twice(self) -> None:
        accelerate = sys.modules.get("accelerate.state")
        if self.deals_alone or accelerate is None or not accelerate.is_initialized() or world_size_of() == 1:
            return
        raise ValueError(
            f"accelerator.prepare() deals the batches of a plain loader to the ranks, and this {type(self).__name__} "
            "has dealt them already: each rank would train a part of its part, and the rest would be lost. Read it "
            "through a course_lib.resume.ResumableDataLoader, which prepare() leaves as it is"
        )


# What Lightning reads of a batch sampler to make it again, see ``_made_again``; within a class, the names were mangled.
for _name, _value in {
    "__pl_saved_args": (),
    "__pl_saved_arg_names": (),
    "__pl_saved_default_kwargs": {"sampler": None},
    "__pl_saved_kwargs": property(lambda sampler: {"explicit_cls": sampler._made_again}),
}.items():
    setattr(EpochBatchSampler, _name, _value)
