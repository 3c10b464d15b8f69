"""The loader and its iterators, from an index to a batch; what each worker does stands in ``workers.py``."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data._utils.pin_memory import pin_memory
from typing_extensions import TypeVar

from course_lib.loader.workers import Crew, EpochBegins, Failure, StreamEnds

Sample = TypeVar("Sample", covariant=True, default=Any)


class MiniDataLoader(DataLoader[Sample]):
    """Batches of a dataset, by the arguments of ``torch.utils.data.DataLoader`` and with their meaning.

    The constructor is torch's own, which checks the arguments and makes the samplers; the iterators and the workers
    are ours. The process that asks for a batch pins it. A datapipe is left to torch, which shuffles and shards it in
    its own iterators.

    Raises:
        ValueError, TypeError: An argument is out of its range, or two exclude each other; torch's constructor tells of
            most, ``iter(loader)`` of ``timeout``, ``prefetch_factor`` and a datapipe.
        RuntimeError: In an epoch: a worker was killed or has left, or ``timeout`` is over. An error of the dataset, of
            ``collate_fn`` or of ``worker_init_fn`` brings the worker's traceback, and keeps its type where that can be
            made from one text.
    """

    _iterator: Any  # the _WorkerBatches whose workers live on, or None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None}  # a copy will have workers of its own

    def __iter__(self) -> _Batches:  # type: ignore[override]
        if self._iterator is not None and not self._iterator.closed:
            self._iterator.begin_epoch(self)
            return self._iterator  # type: ignore[no-any-return]
        iterator = self._get_iterator()
        if self.persistent_workers:
            self._iterator = iterator
        return iterator

    def _get_iterator(self) -> _Batches:  # type: ignore[override]
        if isinstance(self.dataset, IterDataPipe):
            raise ValueError("dataset must be map-style or a stream, got a datapipe: torch's DataLoader reads those")
        if self.timeout and not self.num_workers:
            raise ValueError(f"timeout option needs num_workers > 0, got num_workers=0 and timeout={self.timeout}")
        if self.prefetch_factor == 0:
            raise ValueError("prefetch_factor option should be an int greater than 0, got 0")
        return _WorkerBatches(self) if self.num_workers else _Batches(self)


class _Batches:
    """The iterator over an epoch; this one fetches where it is asked."""

    def __init__(self, loader: MiniDataLoader[Any]) -> None:
        self._index_sampler, self._dataset = loader._index_sampler, loader.dataset
        self._pins = _can_pin(loader)
        self._begin_order(loader)
        seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as torch, also without workers
        self._begin_fetching(loader, int(seed))

    def _begin_order(self, loader: MiniDataLoader[Any]) -> None:
        self._indices = iter(self._index_sampler)
        self._told_length, self._yielded = loader._IterableDataset_len_called, 0

    def _begin_fetching(self, loader: MiniDataLoader[Any], base_seed: int) -> None:
        self._fetch = _fetch_of(loader)()

    def _next_batch(self) -> Any:
        return self._fetch(next(self._indices))

    def __next__(self) -> Any:
        batch = self._next_batch()
        self._yielded += 1
        if self._told_length is not None and self._yielded > self._told_length:
            warnings.warn(
                f"Length of IterableDataset {self._dataset} was reported to be {self._told_length} (when accessing "
                f"len(dataloader)), but {self._yielded} samples have been fetched. For multiprocessing data-loading, "
                "this may be workers that do not each read a part of their own: see torch.utils.data.get_worker_info",
                stacklevel=2,
            )
        return pin_memory(batch) if self._pins else batch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._index_sampler)


class _WorkerBatches(_Batches):
    """The iterator over an epoch that workers fetch: a task is dealt for each batch that is delivered."""

    def _begin_fetching(self, loader: MiniDataLoader[Any], base_seed: int) -> None:
        self._crew = Crew(loader, _fetch_of(loader), base_seed)
        self._workers = self._crew.processes
        weakref.finalize(self, self._crew.close)
        self._persistent = loader.persistent_workers
        self._tasks_ahead = (loader.prefetch_factor or 1) * loader.num_workers
        self._begin_dealing()

    @property
    def closed(self) -> bool:
        return self._crew.closed

    def begin_epoch(self, loader: MiniDataLoader[Any]) -> None:
        """Begin the next epoch with the same workers."""
        while self._crew.dealt:  # what an epoch that was left has not been given
            self._crew.answer()
        self._begin_order(loader)
        self._begin_dealing()

    def _begin_dealing(self) -> None:
        self._turns = deque(range(len(self._workers)))  # of the workers that have more to read
        for worker in self._turns:
            self._crew.send(worker, EpochBegins())
        for _ in range(self._tasks_ahead):
            self._deal()

    def _deal(self) -> None:
        """Send one task more to the worker whose turn it is; without ``in_order`` to the one that has fewest."""
        if not self._turns:
            return
        try:
            indices = next(self._indices)
        except StopIteration:
            return
        worker = self._turns[0] if self._crew.in_order else min(self._turns, key=self._crew.dealt.count)
        self._turns.rotate(-1)
        self._crew.deal(worker, indices)

    def _next_batch(self) -> Any:
        while self._crew.dealt:
            answer = self._crew.answer()
            if isinstance(answer, StreamEnds):
                if answer.worker in self._turns:
                    self._turns.remove(answer.worker)
                    self._deal()
                continue
            self._deal()
            if isinstance(answer, Failure):
                raise answer.error()
            return answer
        if not self._persistent:
            self._crew.close()
        raise StopIteration


def _can_pin(loader: DataLoader[Any]) -> bool:
    if not loader.pin_memory:
        return False
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "mps":
        lack = "no accelerator is found" if accelerator is None else "it is not supported on MPS now"
        warnings.warn(
            f"'pin_memory' argument is set as true but {lack}, then device pinned memory won't be used", stacklevel=4
        )
        return False
    return True


def _fetch_of(loader: DataLoader[Any]) -> Callable[[], Callable[[Any], Any]]:
    """What makes ``fetch``, where batches are made: a worker does it, or the process that asks."""
    return functools.partial(_make_fetch, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last)


def _make_fetch(dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool) -> Callable[[Any], Any]:
    """From indices to a batch: *fetch the samples, then collate them*. A stream ends with ``StopIteration``."""

    def from_map(indices: Any) -> Any:
        try:
            if not auto_collation:
                return collate_fn(dataset[indices])
            if getattr(dataset, "__getitems__", None):
                return collate_fn(dataset.__getitems__(indices))
            return collate_fn([dataset[index] for index in indices])
        except StopIteration as error:  # it would end the epoch without a word
            raise RuntimeError(f"dataset or collate_fn raised StopIteration for {indices}") from error

    def from_stream(indices: Any) -> Any:
        if not auto_collation:
            return collate_fn(next(stream))
        samples = list(itertools.islice(stream, len(indices)))
        if not samples or (drop_last and len(samples) < len(indices)):
            raise StopIteration
        return collate_fn(samples)

    if not isinstance(dataset, IterableDataset):
        return from_map
    stream = iter(dataset)
    return from_stream
