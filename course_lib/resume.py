"""A DataLoader that goes on where it was stopped: nothing read again, nothing missed.

A plain loader forgets where it was. After a crash it reads from the start of an epoch what has been trained already,
and misses as much at the end; and its workers have fetched further than the trainer has seen, so that a sampler's own
count is of no use either. The rule: *the loader counts what it delivered; the position in the epoch's order is all
the state; an epoch begins when its first batch is asked for.*

    loader = ResumableDataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
    for epoch in range(10):
        for batch in loader:
            train(batch)
            torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)

After ``loader.load_state_dict(...)`` the same loop goes on with the next batch, on whatever number of workers and
ranks there are. A Lightning Trainer saves and restores the state in its own checkpoints.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from course_lib.samplers import EpochBatchSampler, SamplerTail, ShuffledBatchSampler

COUNTED_AGAIN = "counted_again"
"""In a state that is loaded: whoever loads it asks for the length again, in this epoch and in the next ones."""


class ResumableDataLoader(DataLoader[Any]):
    """torch's DataLoader over a batch sampler that knows its position.

    Args:
        dataset: Map-style, with a length.
        batch_sampler: One of ``course_lib.samplers``, or any with ``set_epoch``, ``state_dict(batches=n)``,
            ``load_state_dict``, ``epoch`` and ``steps_before``. Default: a :class:`ShuffledBatchSampler` made of
            ``batch_size``, ``shuffle``, ``seed`` and ``drop_last``.
        batch_size, shuffle, drop_last, seed: Of that default, per rank. Without ``drop_last`` every sample is seen
            once: the batches of an epoch differ in size by at most one.
        loader_arguments: Whatever else torch's DataLoader takes.

    A loop without ``set_epoch`` gets a new order in each epoch: a loader that has been read to its end turns to the
    next. ``len(loader)`` counts the batches of the epoch, those from before a resume included, as trainers do.
    Trainers that would put a ``DistributedSampler`` into a loader leave this one alone: ``loader.sampler`` is one.
    So does ``accelerator.prepare(loader)``, which returns it as it is. It therefore does not move the batches to the
    device (do it with ``batch.to(accelerator.device)``), and ``accelerator.accumulate`` is not told where an epoch
    ends: what is left of a window there waits for the next epoch's batches.
    ``accelerator.save_state()`` and ``load_state()`` keep the loader's position. transformers' Trainer, which gets it
    from ``get_train_dataloader``, keeps the position itself: as a number of batches, so resume there on as many ranks.

    What workers draw at random (augmentation) is a function of (seed, epoch, position where the iteration began) and
    of the number of workers: after a resume within an epoch the samples are the same, the draws are new.

    Raises:
        ValueError: The batch sampler cannot say its position (wrap it: ``ShardedBatchSampler(batch_sampler)``), it
            may yield indices that the dataset does not have, or the dataset is a stream.
    """

    _is_accelerate_prepared = True
    """``accelerator.prepare()`` leaves a loader alone that has this: the batch sampler deals to the ranks itself."""
    use_stateful_dataloader = True
    """``accelerator.save_state()`` and ``load_state()`` take the state of a prepared loader that has this."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        batch_sampler: Any = None,
        drop_last: bool = False,
        seed: int = 0,
        **loader_arguments: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"dataset must be map-style and have a length, got {type(dataset).__name__}: a stream has no position"
            )
        if loader_arguments.get("sampler") is not None:
            raise ValueError("sampler is not taken: give a batch_sampler, or batch_size and shuffle")
        if batch_sampler is None:
            tail: SamplerTail = "drop" if drop_last else "spread"
            batch_sampler = ShuffledBatchSampler(len(dataset), batch_size, shuffle=shuffle, seed=seed, tail=tail)
        elif batch_size != 1 or shuffle or drop_last:
            raise ValueError(
                "batch_size, shuffle and drop_last are the batch sampler's: leave them out beside batch_sampler"
            )
        missing = [name for name in ("set_epoch", "state_dict", "load_state_dict") if not hasattr(batch_sampler, name)]
        if missing:
            raise ValueError(
                f"{type(batch_sampler).__name__} cannot say its position (it has no {', '.join(missing)}): wrap it, as "
                "in ShardedBatchSampler(batch_sampler)"
            )
        if isinstance(batch_sampler, EpochBatchSampler):
            batch_sampler.deals_alone = True
        largest = getattr(batch_sampler, "max_index", -1)
        if largest >= len(dataset):
            raise ValueError(
                f"the batch sampler yields indices up to {largest}, the dataset has {len(dataset)} samples"
            )
        super().__init__(dataset, batch_sampler=batch_sampler, **loader_arguments)
        # Lightning and Fabric look at this attribute, and leave a loader with a DistributedSampler as it is.
        self.__dict__["sampler"] = _AlreadySharded(batch_sampler)
        # With overfit_batches, Lightning makes the loader again, from these: around the batch sampler, made again too.
        again: dict[str, object] = {
            "__pl_saved_args": (),
            "__pl_saved_kwargs": {"dataset": dataset, **loader_arguments},
            "__pl_saved_arg_names": (),
            "__dataset": dataset,
        }
        vars(self).update(again)
        self._own_generator = self.generator is None
        self._delivered = 0
        self._told_length: int | None = None

    def __len__(self) -> int:
        self._told_length = self._length()
        return self._told_length

    def _length(self) -> int:
        return self.batch_sampler.steps_before + len(self.batch_sampler)  # type: ignore[union-attr, arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: nothing is fetched before the first batch is asked for, and by then a trainer that resumes has
        # called set_epoch. (It makes its iterator before.)
        sampler: Any = self.batch_sampler
        self._delivered = 0
        epoch = sampler.epoch
        if self._told_length is not None and sampler.steps_before == 0 and len(sampler) > self._told_length:
            warnings.warn(
                f"this epoch has {len(sampler)} batches; len() was {self._told_length} in an epoch that went on with "
                "other ranks. A trainer that counts with that leaves the rest out. In a Lightning Trainer, add "
                "course_lib.callbacks.ExactResume(); in a loop of your own, ask for len(loader) in every epoch",
                stacklevel=2,
            )
        if self._own_generator:
            self.generator = self._generator_for(sampler.state_dict(batches=0))
        for batch in super().__iter__():
            self._delivered += 1
            yield batch
        if sampler.epoch == epoch:
            self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Turn to an epoch; the epoch of a restored state keeps its position, another one cancels it."""
        sampler: Any = self.batch_sampler
        if epoch != sampler.epoch:
            self._delivered = 0
        sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands after the batches that were delivered: the same on every rank."""
        return self.batch_sampler.state_dict(batches=self._delivered)  # type: ignore[union-attr, no-any-return]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches that were delivered when the state was taken.

        Raises:
            ValueError: The state is of another dataset, seed or batch size; or ``len(loader)`` was told before, and
                within this epoch the run has come to other ranks, so that its length differs from the next one's.
                (In a Trainer, ``ExactResume`` counts again, and nothing is refused.)
        """
        state = dict(state)
        counted_again = state.pop(COUNTED_AGAIN, False)
        sampler: Any = self.batch_sampler
        sampler.load_state_dict(state)
        self._delivered = 0
        if self._told_length is None or counted_again or sampler.steps_before == 0:
            return
        from_its_start = copy.copy(sampler)
        from_its_start.set_epoch(sampler.epoch + 1)  # another epoch cancels the position
        from_its_start.set_epoch(sampler.epoch)
        if self._length() > self._told_length or self._length() != len(from_its_start):
            raise ValueError(
                f"this epoch has {self._length()} batches a rank, those from before the resume included, and "
                f"{len(from_its_start)} from its start on as many ranks as there are now; the loader's length was "
                f"asked before as {self._told_length}. A trainer that counts once would leave samples out, of this "
                "epoch or of the next ones. In a Lightning Trainer add course_lib.callbacks.ExactResume() to the "
                "callbacks; in a loop of your own, load the state before anybody asks for len(loader)"
            )

    def load_checkpoint(self, path: str | PathLike[str]) -> None:
        """Load the state from a checkpoint of a Lightning Trainer.

        Ahead of ``trainer.fit(ckpt_path=path)`` this is not needed: the Trainer's own restoring is right or refused. It
        is for a loop of your own that goes on from a Trainer's checkpoint.
        """
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
        states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        if len(states) != 1:
            raise ValueError(f"{path} holds the states of {len(states)} training loaders, expected one")
        self.load_state_dict(states[0])

    @staticmethod
    def _generator_for(state: Mapping[str, Any]) -> torch.Generator:
        entropy = [int(state.get(name, 0)) for name in ("seed", "epoch", "position")]
        seed = np.random.SeedSequence([2, *entropy]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(seed % 2**63))


class _AlreadySharded(DistributedSampler[Any]):
    """Stands where trainers look for a DistributedSampler, and passes ``set_epoch`` on."""

    def __init__(self, batch_sampler: Any) -> None:  # deliberately without the parent's: it deals nothing itself
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[int]:
        return (index for batch in self.batch_sampler for index in batch)

    def __len__(self) -> int:
        return sum(map(len, self.batch_sampler))

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)
