"""Loaders: their samplers deal as ever, and a batch of a length that was loaded before is that one again."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Iterator
from typing import Any

from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, dataloader
from torch.utils.data._utils import fetch
from torch.utils.data.distributed import DistributedSampler

from course_lib.timelapse.journal import Delivered, EpochSet, LoaderPlayed, PassBegun, PassEnded
from course_lib.timelapse.lapse import Lapse, Numbered, take_place
from course_lib.timelapse.structures import copied, samples_in

MOST_INDICES = 20_000_000
"""Whose identity is kept; beyond, batches are counted alone."""


class RecordedLoaders:
    """Takes the place of what a loader's iterator asks: its next batch, and the samples of a map-style dataset."""

    def __init__(self, lapse: Lapse) -> None:
        self.lapse = lapse
        self.loaders, self.datasets = Numbered(), Numbered()
        self.batches: dict[tuple[Any, ...], Any] = {}
        self.asked: Any = None
        """The indices that were fetched last."""
        self.indices_kept = 0

    def install(self) -> None:
        lapse = self.lapse
        make, iterator_of = DataLoader.__init__, DataLoader._get_iterator
        iterate, advance = DataLoader.__iter__, dataloader._BaseDataLoaderIter.__next__

        @functools.wraps(make)
        def __init__(loader: Any, *arguments: Any, **options: Any) -> None:
            make(loader, *arguments, **options)
            for part in samplers_of(loader):
                self._record_epochs_of(type(part))

        @functools.wraps(iterator_of)
        def _get_iterator(loader: Any) -> Any:
            if loader._dataset_kind != dataloader._DatasetKind.Map or not loader.num_workers:
                return iterator_of(loader)
            with without_workers(loader):
                return iterator_of(loader)

        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Any:
            number = self._number(loader)
            lapse.write(PassBegun(number, _length_of(loader)))
            iterator = iterate(loader)
            vars(iterator)["of_loader"] = number
            return iterator

        @functools.wraps(advance)
        def __next__(iterator: Any) -> Any:
            self.asked = None
            number = vars(iterator).get("of_loader")
            try:
                batch = advance(iterator)
            except StopIteration:
                if number is not None:
                    lapse.write(PassEnded(number))
                raise
            if number is not None:
                self._write(number, self.asked, batch)
            return batch

        take_place(DataLoader, __init__, __iter__, _get_iterator)
        take_place(dataloader._BaseDataLoaderIter, __next__)
        self._record_epochs_of(DistributedSampler)
        self._fetch_from_memory()

    def _write(self, number: int, asked: Any, batch: Any) -> None:
        indices = self._indices(asked)
        size = len(indices) if indices is not None else samples_in(batch)
        self.lapse.write(Delivered(number, indices, size))

    def _indices(self, asked: Any) -> tuple[int, ...] | None:
        if asked is None or self.indices_kept > MOST_INDICES:
            return None
        try:
            indices = tuple(map(operator.index, asked if isinstance(asked, list | tuple) else [asked]))
        except TypeError:
            return None
        self.indices_kept += len(indices)
        return indices

    def _fetch_from_memory(self) -> None:
        real = fetch._MapDatasetFetcher.fetch

        @functools.wraps(real)
        def fetched(fetcher: Any, indices: Any) -> Any:
            self.asked = indices
            collate = fetcher.collate_fn
            whose = collate.__func__ if isinstance(collate, types.MethodType) else collate
            length = len(indices) if isinstance(indices, list | tuple) else None
            key = (self.datasets.number(fetcher.dataset), self.datasets.number(whose), length)
            if not self.lapse.fast or key not in self.batches:
                self.batches[key] = real(fetcher, indices)
            return copied(self.batches[key])

        take_place(fetch._MapDatasetFetcher, fetched)

    def _record_epochs_of(self, kind: type) -> None:
        for parent in kind.__mro__:
            real = vars(parent).get("set_epoch")
            if real is None or getattr(real, "is_recorded", False):
                continue

            def set_epoch(sampler: Any, epoch: int, *rest: Any, real: Any = real) -> Any:
                self.lapse.write(EpochSet(int(epoch)))
                return real(sampler, epoch, *rest)

            functools.update_wrapper(set_epoch, real)
            vars(set_epoch)["is_recorded"] = True
            take_place(parent, set_epoch)

    def _number(self, loader: Any) -> int:
        if loader not in self.loaders:
            self.lapse.journal.loaders.append(self._played(loader))
        return self.loaders.number(loader)

    def _played(self, loader: Any) -> LoaderPlayed:
        dataset, base = loader.dataset, None
        while isinstance(dataset, Subset):
            own = list(map(int, dataset.indices)) if len(dataset.indices) <= MOST_INDICES else []
            base = tuple(own) if base is None else tuple(own[index] for index in base)
            dataset = dataset.dataset
        stream = isinstance(dataset, data.IterableDataset)
        samplers = samplers_of(loader)
        deals = next((part for part in samplers if getattr(part, "num_replicas", None)), None)
        plain = (BatchSampler, RandomSampler, SequentialSampler)
        return LoaderPlayed(
            dataset=self.datasets.number(dataset),
            samples=None if stream else _length_of(loader.dataset),
            base_indices=base,
            stream=stream,
            drop_last=bool(loader.drop_last or any(getattr(part, "drop_last", False) for part in samplers)),
            own_sampler=not all(type(part) in plain for part in samplers),
            replacement=any(bool(getattr(part, "replacement", False)) for part in samplers),
            set_epoch=any(hasattr(part, "set_epoch") for part in samplers),
            ranks=1 if deals is None else int(deals.num_replicas),
            workers=loader.num_workers,
        )


def samplers_of(loader: Any) -> list[Any]:
    """A loader's batch sampler and sampler, and those within them."""
    found: list[Any] = []
    ahead = [loader.batch_sampler, loader.sampler]
    while ahead:
        part = ahead.pop(0)
        if part is None or any(part is known for known in found) or len(found) > 8:
            continue
        found.append(part)
        ahead += [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
    return [part for part in found if not isinstance(part, list | range)]


@contextlib.contextmanager
def without_workers(loader: Any) -> Iterator[None]:
    """A map-style loader with no workers: what they load is a matter of their own, and what they return is known."""
    before = {name: vars(loader)[name] for name in ("num_workers", "timeout")}
    vars(loader).update(num_workers=0, timeout=0)
    try:
        yield
    finally:
        vars(loader).update(before)


def _length_of(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None
