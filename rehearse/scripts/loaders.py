"""Loaders: their samplers deal as ever, and a batch of a length that was loaded before is that one again."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, dataloader, default_convert
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.distributed import DistributedSampler

from rehearse._fingerprints import fingerprint, number_of
from rehearse._held_out import length_of, same_data, under_subsets
from rehearse.scripts.events import Delivered, EpochSet, PassBegun, PassEnded
from rehearse.scripts.journal import LoaderPlayed
from rehearse.scripts.lapse import Lapse, Numbered, instead_of, instead_of_own
from rehearse.scripts.structures import copied, samples_in, taken_apart

DRAWING = (RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
MOST_INDICES = 20_000_000
"""Whose identity is kept; beyond, batches are counted alone."""
STREAMED = 8
"""Batches of each loop over a stream whose content is kept."""
MOST_ROWS = 20_000
"""Samples of a stream with workers that are counted by their content."""


class RecordedLoaders:
    """Takes the place of what a loader's iterator asks: its next batch, and the samples of a map-style dataset."""

    def __init__(self, lapse: Lapse) -> None:
        self.lapse = lapse
        self.loaders, self.datasets = Numbered(), Numbered()
        self.sources: list[Any] = []
        """Datasets under all subsets, one of each data."""
        self.batches: dict[tuple[Any, ...], Any] = {}
        self.asked: Any = None
        """The indices that were fetched last."""
        self.indices_kept = 0
        self.loops = itertools.count()
        self.made: list[tuple[Any, str]] = []
        """Each loader, and the line that makes it."""
        self.streamed: dict[tuple[int, int], Counter[int]] = {}
        """Of the first loop over each stream with workers, how often each content came."""
        self.batches_of: Counter[tuple[int, int]] = Counter()

    def install(self) -> None:
        lapse = self.lapse

        @instead_of(DataLoader)
        def __init__(make: Any, loader: Any, *arguments: Any, **options: Any) -> None:
            make(loader, *arguments, **options)
            self.made.append((loader, lapse.line()))
            for part in (*samplers_of(loader), loader.dataset):
                instead_of_own(type(part), set_epoch)

        def set_epoch(set_it: Any, sampler: Any, epoch: int, *rest: Any) -> Any:
            lapse.write(EpochSet(int(epoch)))
            return set_it(sampler, epoch, *rest)

        instead_of_own(DistributedSampler, set_epoch)

        @instead_of(DataLoader)
        def _get_iterator(iterator_of: Any, loader: Any) -> Any:
            if loader._dataset_kind != dataloader._DatasetKind.Map or not loader.num_workers:
                return iterator_of(loader)
            with without_workers(loader):
                return iterator_of(loader)

        @instead_of(DataLoader)
        def __iter__(iterate: Any, loader: Any) -> Any:
            loop = self._number(loader), next(self.loops)
            lapse.write(PassBegun(loop[0], length_of(loader), loop[1]))
            iterator = iterate(loader)
            vars(iterator)["recorded_loop"] = loop
            return iterator

        @instead_of(dataloader._BaseDataLoaderIter)
        def __next__(advance: Any, iterator: Any) -> Any:
            self.asked = None
            loop = vars(iterator).get("recorded_loop")
            try:
                with lapse.going_on("fetch"):
                    batch = advance(iterator)
            except StopIteration:
                if loop is not None:
                    lapse.write(PassEnded(*loop))
                raise
            if loop is not None:
                indices = self._indices(self.asked)
                samples = samples_in(default_convert(batch)) if indices is None else len(indices)
                lapse.write(Delivered(loop[0], indices, samples, loop[1], self._content(loop, batch)))
            return batch

        @instead_of(_MapDatasetFetcher)
        def fetch(real: Any, fetcher: Any, indices: Any) -> Any:
            self.asked = indices
            return self._from_memory(real, fetcher, indices)

    def _indices(self, asked: Any) -> tuple[int, ...] | None:
        if asked is None or self.indices_kept > MOST_INDICES:
            return None
        indices = tuple(map(number_of, asked if isinstance(asked, list | tuple) else [asked]))
        self.indices_kept += len(indices)
        return indices

    def _content(self, loop: tuple[int, int], batch: Any) -> int | None:
        """A number for what a stream's batch holds, of the first ones of a loop."""
        played = self.lapse.journal.loaders[loop[0]]
        if not played.stream:
            return None
        rows = self.streamed.get(loop)
        if rows is None and played.workers > 1 and not any(loader == loop[0] for loader, _ in self.streamed):
            rows = self.streamed[loop] = Counter()
        if rows is not None and rows.total() < MOST_ROWS:
            rows.update(map(fingerprint, rows_of(batch)))
        self.batches_of[loop] += 1
        return fingerprint(batch) if self.batches_of[loop] <= STREAMED else None

    def see_what_is_known_at_the_end(self) -> None:
        journal = self.lapse.journal
        journal.never_read = [line for loader, line in self.made if loader not in self.loaders and length_of(loader)]
        for (loader, _), rows in self.streamed.items():
            often = set(rows.values())
            if len(rows) >= STREAMED and len(often) == 1:
                journal.loaders[loader].times_each = float(*often)

    def _from_memory(self, real: Any, fetcher: Any, indices: Any) -> Any:
        collate = fetcher.collate_fn
        whose = collate.__func__ if isinstance(collate, types.MethodType) else collate
        length = len(indices) if isinstance(indices, list | tuple) else None
        key = (self.datasets.number(fetcher.dataset), self.datasets.number(whose), length)
        if not self.lapse.fast or key not in self.batches:
            self.batches[key] = real(fetcher, indices)
        return copied(self.batches[key])

    def _number(self, loader: Any) -> int:
        if loader not in self.loaders:
            self.lapse.journal.loaders.append(self._played(loader))
        return self.loaders.number(loader)

    def _source(self, dataset: Any) -> int:
        known = next((number for number, source in enumerate(self.sources) if same_data(source, dataset)), None)
        if known is None:
            self.sources.append(dataset)
            return len(self.sources) - 1
        return known

    def _played(self, loader: Any) -> LoaderPlayed:
        stream = isinstance(loader.dataset, data.IterableDataset)
        samples = None if stream else length_of(loader.dataset)
        dataset, base = (loader.dataset, None) if (samples or 0) > MOST_INDICES else under_subsets(loader.dataset)
        samplers = samplers_of(loader)
        deals = next((part for part in samplers if getattr(part, "num_replicas", None)), None)
        plain = (BatchSampler, RandomSampler, SequentialSampler)
        return LoaderPlayed(
            dataset=self._source(dataset),
            samples=samples,
            base_indices=None if base is None else tuple(base),
            stream=stream,
            drop_last=bool(loader.drop_last or any(getattr(part, "drop_last", False) for part in samplers)),
            own_sampler=not all(type(part) in plain for part in samplers),
            drawn_by_torch=any(type(part) in DRAWING for part in samplers),
            replacement=any(bool(getattr(part, "replacement", False)) for part in samplers),
            set_epoch=any(hasattr(part, "set_epoch") for part in (*samplers, loader.dataset)),
            workers=int(loader.num_workers),
            persistent=bool(loader.persistent_workers),
            ranks=1 if deals is None else int(deals.num_replicas),
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


def rows_of(batch: Any) -> list[Any]:
    """The samples of a batch, by its tensors or arrays of the first one's length."""
    batch = default_convert(batch)
    tensors: list[Any] = []
    taken_apart(batch, tensors)
    length = samples_in(batch)
    whole = [tensor for tensor in tensors if tensor.ndim and len(tensor) == length]
    return [list(row) for row in zip(*whole, strict=True)]


@contextlib.contextmanager
def without_workers(loader: Any) -> Iterator[None]:
    """A map-style loader with no workers: what they load is a matter of their own, and what they return is known."""
    before = {name: vars(loader)[name] for name in ("num_workers", "timeout")}
    vars(loader).update(num_workers=0, timeout=0)
    try:
        yield
    finally:
        vars(loader).update(before)
