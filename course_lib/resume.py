"""A DataLoader that goes on where it was stopped: nothing read again, nothing missed.

A plain loader forgets where it was. After a crash it reads from the start of an epoch what has been trained already,
and misses as much at the end; and its workers have fetched further than the trainer has seen, so that a sampler's own
count is of no use either. The rule: *the loader counts what it delivered; the position in the epoch's order is all
the state; an epoch begins when its first batch is asked for.*

    loader = ResumableDataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
    for epoch in range(loader.epoch, 10):
        for batch in loader:
            train(batch)
            torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)

After ``loader.load_state_dict(...)`` the same loop goes on with the next batch, on whatever number of workers and
ranks there are. ``loader.epoch`` is the epoch of that batch: 0 in a new run; after a kill behind an epoch's last batch,
the next one. A Lightning Trainer saves and restores the state in its own checkpoints. (Take ``callbacks.ExactResume``
with it: where a module asks for ``estimated_stepping_batches``, a Trainer alone restores no loader, without a word.)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from course_lib._sample_seeds import epoch_of_this_batch, iterator_with_draws
from course_lib.samplers import EpochBatchSampler, ShuffledBatchSampler
from course_lib.samplers.epoch import SamplerTail

__all__ = ["ResumableDataLoader", "epoch_of_this_batch"]

COUNTED_AGAIN = "counted_again"
"""In a state that is loaded: whoever loads it asks for the length again, in this epoch and in the next ones."""


class ResumableDataLoader(DataLoader[Any]):
    """torch's DataLoader with ``state_dict`` and ``load_state_dict``: a run goes on within an epoch, on any workers and
    ranks.

    Args:
        dataset: Map-style, with a length.
        batch_sampler: One of ``course_lib.samplers``, or any with ``set_epoch``, ``state_dict(batches=n)``,
            ``load_state_dict``, ``epoch`` and ``steps_before``. Default: a :class:`ShuffledBatchSampler` made of
            ``batch_size``, ``shuffle``, ``seed`` and ``drop_last``, which are not taken beside it.
        batch_size, shuffle, drop_last, seed: Of that default, per rank. Without ``drop_last`` every sample is seen
            once: the batches of an epoch differ in size by at most one.
        seed_samples: Whether what the samples draw at random is a function of the sample; see below.
        loader_arguments: Whatever else torch's DataLoader takes, but for ``sampler``, ``generator`` and
            ``in_order=False``.

    A loop without ``set_epoch`` gets a new order in each epoch: a loader that has delivered an epoch's last batch turns
    to the next when that iteration ends or is left. One that is left earlier begins again where it began. One
    iteration at a time: when another one has begun, the one before cannot go on. ``len(loader)`` counts the batches of
    the epoch, those from before a resume included, as trainers do.

    **Trainers.** One that would put a ``DistributedSampler`` into a loader leaves this one alone: ``loader.sampler`` is
    one. So does ``accelerator.prepare(loader)``, whose ``save_state()`` and ``load_state()`` keep its position: move
    the batches to the device yourself; ``accelerator.accumulate`` is not told where an epoch ends. transformers'
    Trainer keeps a number of batches, so resume there on as many ranks. What ``fabric.setup_dataloaders`` returns has
    no state, and counts epochs from 0 in each process: to go on in a later one, iterate this loader.

    **Augmentation.** With ``seed_samples``, Python's ``random``, NumPy's ``np.random`` and torch's default generator of
    the CPU are seeded before each ``dataset[index]`` from (the sampler's seed, epoch, index, which time the epoch's
    order has this index), and before ``collate_fn`` from (seed, epoch, number of the batch in the epoch over all
    ranks). So a sample is augmented alike with any number of workers and ranks and after any number of kills, and the
    generators of the main process are not moved. Samples are asked for one at a time, and not by ``__getitems__``.
    What it does not reach:

    - A generator that a dataset or a transform keeps for itself: seed it in ``__getitem__`` by a number of a global
      one (albumentations: ``augment.set_random_seed(random.getrandbits(32))``).
    - What goes on from sample to sample, of which each worker has a copy: a count, a cache, a table that is drawn when
      a sample first asks for it (draw it in ``__init__``).
    - GPUs' generators, and threads that draw while the sample is made elsewhere.
    - An index that comes more than once in an epoch of a batch sampler of your own, without a ``ShardedBatchSampler``
      around it: it draws alike each time.

    With ``seed_samples=False``, ``__getitems__`` is asked where there is one, and draws are a function of (seed, epoch,
    position where the iteration began, number of workers).

    Raises:
        ValueError: The batch sampler cannot say its position (wrap it: ``ShardedBatchSampler(batch_sampler)``) or may
            yield indices that the dataset does not have; the dataset is a stream; an argument is not taken.
        RuntimeError: While it is read: the dataset or ``collate_fn`` has raised ``StopIteration``, which would end the
            epoch there without a word; another iteration has begun since, or a state was loaded; or it was turned to an
            epoch before that of the loaded state.
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
        seed_samples: bool = True,
        **loader_arguments: Any,
    ) -> None:
        _refuse_what_has_no_position(dataset, loader_arguments)
        if batch_sampler is None:
            tail: SamplerTail = "drop" if drop_last else "spread"
            batch_sampler = ShuffledBatchSampler(len(dataset), batch_size, shuffle=shuffle, seed=seed, tail=tail)
        elif batch_size != 1 or shuffle or drop_last or seed:
            raise ValueError(
                "batch_size, shuffle, drop_last and seed are not taken beside batch_sampler, which has its own: leave "
                "them out"
            )
        _check_batch_sampler(batch_sampler, len(dataset))
        if isinstance(batch_sampler, EpochBatchSampler):
            batch_sampler.deals_alone = True
        super().__init__(dataset, batch_sampler=batch_sampler, **loader_arguments)
        # Lightning and Fabric look at this attribute, and leave a loader with a DistributedSampler as it is.
        self.__dict__["sampler"] = _AlreadySharded(batch_sampler)
        # With overfit_batches, Lightning makes the loader again, from these: around the batch sampler, made again too.
        again: dict[str, object] = {
            "__pl_saved_args": (),
            "__pl_saved_kwargs": {"dataset": dataset, "seed_samples": seed_samples, **loader_arguments},
            "__pl_saved_arg_names": (),
            "__dataset": dataset,
        }
        vars(self).update(again)
        self.seed_samples = bool(seed_samples)
        self._iteration: object = None
        """Stands for the iteration that began last, until a state is loaded."""
        self._delivered, self._delivered_epoch = 0, 0
        """How many batches it has delivered, and of which epoch."""
        self._restored: dict[str, Any] | None = None
        """The state that was loaded, until its first batch is asked for."""
        self._told_length: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the batch that comes next, from 0: that of the loaded state, after a resume."""
        return int(self.batch_sampler.epoch)  # type: ignore[union-attr]

    def __len__(self) -> int:
        self._told_length = self._length()
        return self._told_length

    def _length(self) -> int:
        return self.batch_sampler.steps_before + len(self.batch_sampler)  # type: ignore[union-attr, arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: nothing is fetched before the first batch is asked for, and by then a trainer that resumes has
        # called set_epoch. (It makes its iterator before.)
        sampler: Any = self.batch_sampler
        epoch, left = sampler.epoch, len(sampler)
        if self._restored is not None and epoch < self._restored["epoch"]:
            sampler.load_state_dict(self._restored)
            raise RuntimeError(
                f"a trainer told epoch {epoch}, and the state that was loaded is of epoch {sampler.epoch}. Fabric's "
                "loader counts epochs from 0 in each process: iterate this loader itself, and move its batches by "
                f"fabric.to_device. To begin anew, call set_epoch({epoch}) of this loader"
            )
        self._restored = None
        iteration = self._iteration = object()
        self._delivered, self._delivered_epoch = 0, epoch
        self.generator = _generator_at(sampler.state_dict(batches=0))  # of the workers' first seeds
        for batch in super().__iter__():
            self._check_that_it_goes_on(iteration)
            self._delivered += 1
            try:
                yield batch
            except GeneratorExit:  # left by a loop that counts, or a zip(): the epoch has ended all the same
                if self._iteration is iteration and self._delivered == left and sampler.epoch == epoch:
                    sampler.set_epoch(epoch + 1)
                raise
        self._check_that_it_goes_on(iteration)
        if sampler.epoch != epoch:  # a trainer has told another one
            return
        if self._delivered < left:
            raise RuntimeError(
                f"the epoch ended after {self._delivered} of the {left} batches that were left: the dataset or "
                "collate_fn raised StopIteration (a next() without a default does), which torch's loader takes for the "
                "end of its data. Catch it there, and raise an error of another kind"
            )
        sampler.set_epoch(epoch + 1)

    def _check_that_it_goes_on(self, iteration: object) -> None:
        if self._iteration is not iteration:
            raise RuntimeError(
                "this iteration cannot go on: since its last batch another one of this loader has begun, or a state "
                "was loaded. For a look at the data within an epoch make a second loader; behind a loaded state begin "
                "another iteration, which goes on from there"
            )

    def _get_iterator(self) -> Any:
        return iterator_with_draws(self, seed_samples=self.seed_samples)

    def set_epoch(self, epoch: int) -> None:
        """Turn to an epoch; the epoch of a restored state keeps its position, another one cancels it."""
        sampler: Any = self.batch_sampler
        if epoch != sampler.epoch:
            self._delivered = 0
        sampler.set_epoch(epoch)
        if self._restored is not None and epoch != self._restored["epoch"]:
            self._restored = None

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands after the batches that were delivered: the same on every rank."""
        sampler: Any = self.batch_sampler
        delivered = self._delivered if sampler.epoch == self._delivered_epoch else 0
        return sampler.state_dict(batches=delivered)  # type: ignore[no-any-return]

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
        self._delivered, self._iteration, self._restored = 0, None, state
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


def _generator_at(state: Mapping[str, Any]) -> torch.Generator:
    entropy = [int(state.get(name, 0)) for name in ("seed", "epoch", "position")]
    seed = np.random.SeedSequence([2, *entropy]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed % 2**63))


def _refuse_what_has_no_position(dataset: Any, loader_arguments: Mapping[str, Any]) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"dataset must be map-style and have a length, got {type(dataset).__name__}: a stream has no position"
        )
    if loader_arguments.get("sampler") is not None:
        raise ValueError("sampler is not taken: give a batch_sampler, or batch_size and shuffle")
    if loader_arguments.get("generator") is not None:
        raise ValueError("generator is not taken: order and draws are functions of (seed, epoch). Give seed")
    if not loader_arguments.get("in_order", True):
        raise ValueError("in_order=False is not taken: batches out of order have no position. Leave it out")


def _check_batch_sampler(batch_sampler: Any, num_samples: int) -> None:
    asked = ("set_epoch", "state_dict", "load_state_dict", "epoch", "steps_before", "__len__")
    missing = [name for name in asked if not hasattr(batch_sampler, name)]
    if missing:
        raise ValueError(
            f"{type(batch_sampler).__name__} cannot say its position (it has no {', '.join(missing)}): wrap it, as "
            "in ShardedBatchSampler(batch_sampler)"
        )
    largest = getattr(batch_sampler, "max_index", -1)
    if largest >= num_samples:
        raise ValueError(f"the batch sampler yields indices up to {largest}, the dataset has {num_samples} samples")


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
