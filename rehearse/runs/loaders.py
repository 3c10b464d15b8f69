"""A loader that deals without loading: its dataset gives each index back as the sample."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Subset

from rehearse._fingerprints import fingerprint, number_of


class Indices:
    """Stands in for a map-style dataset; a ``Subset`` gives the index in what it is a part of."""

    def __init__(self, dataset: Any) -> None:
        self.subsets: list[Any] = []
        while isinstance(dataset, Subset):
            self.subsets.append(dataset.indices)
            dataset = dataset.dataset
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.subsets[0] if self.subsets else self.dataset)

    def __getitem__(self, index: Any) -> Any:
        for indices in self.subsets:
            index = indices[index]
        return index


def deal_indices(loader: Any, workers: int = 0) -> None:
    """Make a loader deal indices, in this process or with workers, whatever it loaded; its samplers stay.

    A stream, which has no indices, deals fingerprints of its samples, in this process.
    """
    stop_workers(loader)
    if isinstance(loader.dataset, IterableDataset):
        loader.collate_fn = _fingerprints
        return
    vars(loader)["dataset"] = Indices(loader.dataset)
    loader.collate_fn = _as_it_is
    if workers:
        vars(loader).update(num_workers=workers, prefetch_factor=2)


MOST_SHUFFLED = 20_000_000
"""Samples up to which a trial draws the whole order of an epoch, as torch does: 40 bytes each, in each trial."""


def stop_workers(loader: Any) -> None:
    """Have a loader fetch in this process; the order of a huge dataset is drawn as far as it is asked for."""
    attributes = vars(loader)
    sampler = getattr(loader, "sampler", None)
    if type(sampler) is RandomSampler and len(sampler) > MOST_SHUFFLED and type(loader.batch_sampler) is BatchSampler:
        loader.batch_sampler.sampler = _RandomIndices(len(sampler))
    attributes.update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, pin_memory=False)
    attributes.update(worker_init_fn=None, _iterator=None, _DataLoader__multiprocessing_context=None)


def cut_batches(loader: Any, samples: int) -> None:
    """Leave so many samples in the first batch of a loader, and as large a share of each other one, rounded down.

    A batch that is smaller than others stays so. The sampler is the same object; what is not dealt in batches of
    indices, or by an object that cannot be changed, is left as it is.
    """
    sampler = loader.batch_sampler
    if isinstance(sampler, list):
        vars(loader)["batch_sampler"] = list(_cut(sampler, samples))
    elif sampler is not None:
        kind = type(sampler)
        shorter = type(kind.__name__, (kind,), {"__iter__": lambda self: _cut(kind.__iter__(self), samples)})
        with contextlib.suppress(TypeError):
            sampler.__class__ = shorter


def _cut(batches: Iterable[Any], samples: int) -> Iterator[list[Any]]:
    whole = 0
    for batch in batches:
        indices = list(batch)
        whole = whole or len(indices)
        left = min(samples, max(1, len(indices) * samples // whole)) if whole else 0
        yield indices[:left] if whole > samples else indices


class _RandomIndices:
    """Stands in for a RandomSampler: random indices, without the memory of an order."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng(0)
        for _ in range(self.samples):
            yield int(generator.integers(self.samples))


def _as_it_is(samples: Any) -> Any:
    return samples


def _fingerprints(samples: Any) -> list[int]:
    return [fingerprint(sample) for sample in samples] if isinstance(samples, list) else [fingerprint(samples)]


def read(batches: Iterator[Any], most: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The next batches that were dealt; all that come, by default."""
    return tuple(tuple(indices_of(batch)) for batch in itertools.islice(batches, most))


def indices_of(batch: Any) -> list[int]:
    """The indices of a batch that was dealt; of one that is no whole number, as a slice, a number for it."""
    return [number_of(index) for index in batch] if isinstance(batch, list | tuple) else [number_of(batch)]
