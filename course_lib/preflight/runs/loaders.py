"""A loader that deals without loading: its dataset gives each index back as the sample."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Subset


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


def deal_indices(loader: Any) -> None:
    """Make a loader deal indices, in this process, whatever it loaded; its samplers stay."""
    stop_workers(loader)
    if not isinstance(loader.dataset, IterableDataset):
        vars(loader)["dataset"] = Indices(loader.dataset)
        loader.collate_fn = _as_it_is


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


def indices_of(batch: Any) -> list[int]:
    """The indices of a batch that was dealt; a TypeError where it holds anything else."""
    if isinstance(batch, list | tuple):
        return [int(index) for index in batch]
    return [int(batch)]


def _drawing() -> list[Any]:
    """The usual functions for orders."""
    return [
        torch.randperm,
        torch.randint,
        torch.multinomial,
        torch.rand,
        np.random.default_rng,
        np.random.permutation,
        np.random.shuffle,
        random.shuffle,
        random.sample,
        random.Random.shuffle,
        random.Random.sample,
    ]


_Name = tuple[Any, str, Any]
"""A module (or class), a name in it, and the function of that name."""
_seen: dict[int, list[_Name]] = {}
"""By a module's id: its names of functions that draw, where they have been looked for."""


@contextlib.contextmanager
def draws_found() -> Iterator[None]:
    """Look for the functions that draw here, for the children that are forked within.

    A child that looks itself reads every object of every module, and so copies most of the memory that it shares.
    """
    ids = set(map(id, _drawing()))
    _seen.update((id(module), _names_in(module, ids)) for module in list(sys.modules.values()))
    try:
        yield
    finally:
        _seen.clear()


def _names_in(module: Any, ids: Collection[int]) -> list[_Name]:
    # A module that imported a function by its name has it under a name of its own.
    names = list(getattr(module, "__dict__", {}).items())
    return [(module, name, value) for name, value in names if id(value) in ids]


@contextlib.contextmanager
def draws_counted() -> Iterator[Callable[[], int]]:
    """Count what is drawn by the usual functions for orders; gives a function that says how often."""
    count = [0]

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            return function(*arguments, **options)

        return counted

    stand_ins = {id(function): counting(function) for function in _drawing()}
    before: list[_Name] = []
    for place in [*sys.modules.values(), random.Random]:
        names = _seen.get(id(place))
        before.extend(_names_in(place, stand_ins) if names is None else names)
    for place, name, function in before:
        setattr(place, name, stand_ins[id(function)])
    try:
        yield lambda: count[0]
    finally:
        for place, name, function in before:
            setattr(place, name, function)
