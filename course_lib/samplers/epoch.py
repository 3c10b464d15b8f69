"""What every sampler here has: an epoch, a position in its order, the ranks, and a state.

A subclass says how an epoch is dealt from a position on; this class does what must be alike everywhere, so that
trainers, loaders and checkpoints can treat all samplers in one way.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch.utils.data import SequentialSampler

from course_lib._arguments import int_of_at_least
from course_lib._ranks import rank_of_this_process, world_size_of

SamplerTail = Literal["spread", "drop", "pad"]
"""What becomes of the samples that fill no whole step: smaller batches, left out, or filled up with repeated ones."""


class EpochBatchSampler(ABC):
    """What the samplers here share: the epoch, the position in its order, and this rank's part of each step.

    A *step* is one batch on every rank. The state is a global position: how much of the epoch's order all ranks
    together have had.

    With accelerate: ``accelerator.prepare()`` takes every n-th batch of what a batch sampler yields, so a sampler that
    deals to n ranks would be dealt twice, and most samples would be lost. There are two ways that are right:

    - Read the sampler through a :class:`~course_lib.resume.ResumableDataLoader`. ``prepare`` leaves that loader as it
      is, and the sampler deals to the process group's ranks as everywhere.
    - Make it with ``num_replicas=1, rank=0`` and ``tail="pad"`` or ``"drop"``, and let ``prepare`` deal the batches of
      a plain loader. Then accelerate's rule holds for the end of an epoch: it repeats the first indices until all
      ranks have as many batches (``tail="pad"``), or leaves out the batches that not every rank has (``"drop"``).
      Not for a resume by transformers' Trainer on several ranks: there no ``set_epoch`` reaches the sampler.

    Anything else is refused by a ``ValueError`` when it is iterated, where an ``Accelerator`` of several processes
    exists; nobody can tell whether a loader was prepared.
    """

    deals_alone = False
    """Whether nobody deals what comes from here once more: a loader that is never wrapped sets it."""

    def __init__(
        self,
        *,
        shuffle: bool,
        seed: int,
        tail: SamplerTail,
        num_replicas: int | None,
        rank: int | None,
        sampler: object = None,
    ) -> None:
        # A Trainer's overfit_batches, which wants the same batches in every epoch, says so by this sampler.
        self.shuffle = bool(shuffle) and not isinstance(sampler, SequentialSampler)
        self.seed = int_of_at_least(0, "seed", seed)
        if tail not in ("spread", "drop", "pad"):
            raise ValueError(f'tail must be "spread", "drop" or "pad", got {tail!r}')
        self.tail = tail
        self.num_replicas = None if num_replicas is None else int_of_at_least(1, "num_replicas", num_replicas)
        self.rank = None if rank is None else int_of_at_least(0, "rank", rank)
        if self.rank is not None and self.num_replicas is not None and self.rank >= self.num_replicas:
            raise ValueError(
                f"rank must be from 0 to {self.num_replicas - 1} with num_replicas={num_replicas}, got {rank}"
            )
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._position = 0
        self._steps_before = 0
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
        self._refuse_to_be_dealt_twice(world_size)
        return self._steps_left(self._position, world_size)

    def __iter__(self) -> Iterator[list[int]]:
        world_size, rank = self._world()
        self._refuse_to_be_dealt_twice(world_size)
        self._check(self._position, world_size)
        self._yielded = 0
        return self._counted(self._batches(self._position, self._batches_before, world_size, rank))

    def _counted(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        for number, batch in enumerate(batches, start=1):
            self._yielded = number  # of the iterator that moved last
            yield batch

    @property
    def steps_before(self) -> int:
        """Batches of this epoch that a rank had before the restored position; 0 in an epoch from its start."""
        return self._steps_before

    @property
    def drop_last(self) -> bool:
        """Under its usual name, for trainers that ask."""
        return self.tail == "drop"

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
                "steps": self._steps_before + done,
                "batches": self._batches_before + done * world_size,
            }
        return place | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on whatever number of ranks there are now.

        Raises:
            ValueError: The state belongs to another dataset, seed or batch size: its position means nothing here.
        """
        for name, ours in self._identity().items():
            if name not in state:
                raise ValueError(
                    f"this is no state of a {type(self).__name__}: it has no {name!r}, only {sorted(state)}"
                )
            if state[name] != ours:
                raise ValueError(
                    f"the state was taken with {name}={state[name]!r}, this sampler has {name}={ours!r}: its position "
                    f"means another sample here. Make the sampler as it was, or start a new epoch with set_epoch"
                )
        self._begin(int_of_at_least(0, "epoch", state["epoch"]))
        self._position = int_of_at_least(0, "position", state["position"])
        self._steps_before = int_of_at_least(0, "steps", state["steps"])
        self._batches_before = int_of_at_least(0, "batches", state["batches"])

    def _world(self) -> tuple[int, int]:
        """The number of ranks and this rank, now."""
        world_size = self.num_replicas or world_size_of()
        rank = self.rank if self.rank is not None else rank_of_this_process()
        if rank >= world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1} with {world_size} replicas, got {rank}")
        return world_size, rank

    def _refuse_to_be_dealt_twice(self, world_size: int) -> None:
        if self.deals_alone or not accelerator_deals():
            return
        if world_size > 1:
            raise ValueError(
                f"accelerator.prepare() deals the batches of a loader to the ranks, and this {type(self).__name__} has "
                "dealt them already: each rank would train a part of its part, and the rest would be lost. Read it "
                "through a ResumableDataLoader, which prepare() leaves as it is; or make it with num_replicas=1, "
                'rank=0 and tail="pad" or "drop", and let prepare() deal'
            )
        if self.tail == "spread" and hasattr(self, "batch_size"):
            raise ValueError(
                f'accelerator.prepare() keeps full batches of {self.batch_size} alone, and tail="spread" makes some '
                'that are smaller: use tail="drop" or tail="pad", or read the sampler through a ResumableDataLoader, '
                "which prepare() leaves as it is"
            )

    def _remember_arguments(self, **arguments: object) -> None:
        # Under default flags, Lightning and Fabric make the batch sampler of a plain DataLoader again, around a
        # DistributedSampler of theirs, from these four attributes. So they make one like this, which ignores theirs.
        remembered: dict[str, object] = {
            "__pl_saved_args": (),
            "__pl_saved_kwargs": dict(arguments),
            "__pl_saved_default_kwargs": {"sampler": None},
            "__pl_saved_arg_names": (),
        }
        vars(self).update(remembered)

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What a state must share with the sampler that loads it."""

    @abstractmethod
    def _steps_left(self, position: int, world_size: int) -> int:
        """Steps from a position to the end of the epoch."""

    @abstractmethod
    def _position_after(self, position: int, steps: int, world_size: int) -> int:
        """The position after some steps, when an iteration began at ``position``."""

    @abstractmethod
    def _check(self, position: int, world_size: int) -> None:
        """Raise a ValueError if what is left cannot be dealt to so many ranks."""

    @abstractmethod
    def _batches(self, position: int, batches_before: int, world_size: int, rank: int) -> Iterator[list[int]]:
        """One rank's batches from a position on; ``batches_before`` were dealt before, over all ranks."""


def accelerator_deals() -> bool:
    """Whether this process has an ``Accelerator`` of several processes, which deals the batches of what it prepares."""
    state = sys.modules.get("accelerate.state")
    return state is not None and state.is_initialized() and world_size_of() > 1
