"""What a dataset and a ``collate_fn`` draw at random, as a function of the sample and of the batch.

Workers are seeded when they start, and draw as their batches come. So what a sample draws depends on the number of
workers, on what was prefetched and on where the run was stopped. The rule: *what a draw may depend on is sent along
with the indices.* Before each sample, Python's, NumPy's and torch's global generators are seeded from (seed, epoch,
index, occurrence of this index in the epoch), and before ``collate_fn`` from (seed, epoch, number of the batch in the
epoch over all ranks). Behind the batch they stand where they stood.
"""

from __future__ import annotations

import copy
import hashlib
import operator
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from course_lib._generators import generators_put_back
from course_lib._ranks import rank_of_this_process, world_size_of

_epoch: int | None = None
"""Of the batch that this process is making."""


def epoch_of_this_batch() -> int:
    """The epoch of the batch that is being made, where it is made: in a dataset or a ``collate_fn``.

    An attribute that the main process sets (``dataset.epoch = 3``) reaches neither a worker that runs already nor a
    batch that was prefetched; this comes with the batch. For a dataset that draws from a generator of its own::

        def __getitem__(self, index):
            rng = np.random.default_rng([self.seed, epoch_of_this_batch(), index])

    Raises:
        RuntimeError: No :class:`~course_lib.resume.ResumableDataLoader` is making a batch here.
    """
    if _epoch is None:
        raise RuntimeError(
            "epoch_of_this_batch() is asked where no batch is being made: call it in the __getitem__ or the collate_fn "
            "of a course_lib.resume.ResumableDataLoader"
        )
    return _epoch


def iterator_with_draws(loader: DataLoader[Any], *, seed_samples: bool) -> Any:
    """torch's iterator over a loader's batches; the loader, its dataset and its sampler stay as they are."""
    maker = _BatchMaker(loader.dataset, loader.collate_fn, seed_samples)
    numbered = _NumberedBatches(loader.batch_sampler)
    return DataLoader._get_iterator(twin_of(loader, maker, collate_fn=_as_it_is, batch_sampler=numbered))


def twin_of(loader: DataLoader[Any], dataset: Any, **replaced: Any) -> Any:
    """A copy of a loader with a stand-in, which has the dataset itself as its ``dataset``: so workers still find it."""
    twin = copy.copy(loader)
    # torch lets nobody set a loader's dataset; persistent workers stay with the loader that they belong to.
    replaced |= {"dataset": dataset, "worker_init_fn": _WorkerStart(loader.worker_init_fn), "_iterator": None}
    vars(twin).update(replaced)
    return twin


class _Task(NamedTuple):
    """What is sent to where a batch is made."""

    indices: Any
    seed: int
    epoch: int
    number: int
    """Of the batch, in the whole epoch over all ranks."""


class _BatchMaker:
    """Stands for a loader's dataset and its ``collate_fn``, in whichever process makes the batches."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], seed_samples: bool) -> None:
        self.dataset, self.collate_fn, self.seed_samples = dataset, collate_fn, seed_samples

    def __getitems__(self, task: _Task) -> Any:
        global _epoch
        outer, _epoch = _epoch, task.epoch  # a dataset may read a loader of its own for a sample
        try:
            return self._seeded(task) if self.seed_samples else self._as_torch_does(task.indices)
        finally:
            _epoch = outer

    def _as_torch_does(self, indices: Any) -> Any:
        at_once = getattr(self.dataset, "__getitems__", None)
        return self.collate_fn(at_once(indices) if at_once else [self.dataset[index] for index in indices])

    def _seeded(self, task: _Task) -> Any:
        indices, samples = list(task.indices), []
        occurrences = getattr(task.indices, "occurrences", [0] * len(indices))
        with generators_put_back(gpus=False):
            for index, occurrence in zip(indices, occurrences, strict=True):
                _seed_by(f"sample {task.seed} {task.epoch} {_key_of(index)} {occurrence}")
                samples.append(self.dataset[index])
            _seed_by(f"batch {task.seed} {task.epoch} {task.number}")
            return self.collate_fn(samples)


def _as_it_is(batch: Any) -> Any:
    return batch


class _WorkerStart:
    """The ``worker_init_fn`` of a twin: the dataset itself is at ``get_worker_info().dataset``."""

    def __init__(self, init_fn: Callable[[int], object] | None) -> None:
        self.init_fn = init_fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self.init_fn is not None:
            self.init_fn(worker)


class _NumberedBatches:
    """Stands for a loader's batch sampler: each batch with what its draws depend on."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[_Task]:
        sampler = self.batch_sampler
        ranks, rank, seed = (getattr(sampler, name, None) for name in ("num_replicas", "rank", "seed"))
        ranks = world_size_of() if ranks is None else ranks
        rank = rank_of_this_process() if rank is None else rank
        seed = seed if isinstance(seed, int) else 0
        epoch = sampler.epoch
        number = sampler.state_dict(batches=0).get("batches", sampler.steps_before * ranks) + rank
        for batch in sampler:
            yield _Task(batch, seed, epoch, number)
            number += ranks


def _key_of(index: Any) -> int | str:
    """An index as what is the same in every process."""
    try:
        return int(operator.index(index))
    except TypeError:
        text = repr(index)
    if " at 0x" in text:
        raise TypeError(
            f"what a sample draws is a function of its index, and {text} says no more than where it lies in memory: "
            "let the batch sampler yield ints, strings or tuples of them, or give seed_samples=False"
        )
    return text


def _seed_by(key: str) -> None:
    """Seed the global generators by a text, each by another part of its hash."""
    of_python, of_numpy, of_torch = struct.unpack("<3I", hashlib.blake2b(key.encode(), digest_size=12).digest())
    random.seed(of_python)
    np.random.seed(of_numpy)  # noqa: NPY002
    torch.default_generator.manual_seed(of_torch)  # torch.manual_seed seeds every device, which takes far longer
