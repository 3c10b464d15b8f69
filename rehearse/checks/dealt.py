"""What one rank of a run is dealt, epoch by epoch, as the Trainer deals it with these flags; no sample is loaded."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from rehearse._fingerprints import fingerprint
from rehearse._held_out import length_of
from rehearse.report import Kind, Unjudged
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.loaders import deal_indices, read
from rehearse.runs.run import MOST_INDICES, Batch, seed_as_another_process

STREAM_SAMPLES = 20_000
STREAM_CONTENTS = 1_000
STREAM_SECONDS = 2.0
"""How far a stream is read."""


@dataclass(frozen=True)
class Dealt:
    """What one rank is given, epoch by epoch."""

    samples: int | None
    """The length of this rank's dataset."""
    promised: tuple[int | None, ...] = ()
    """The batches that the Trainer counts in each epoch; None where it has no length, or a limit."""
    epochs: tuple[tuple[Batch, ...], ...] = ()
    """The indices of each batch; of a stream, a number for each sample's content."""
    draws: int = 0
    """How often something random was drawn after the loader was made."""
    set_epoch_would_shuffle: bool = False
    """Whether some set_epoch, called by hand, changes the order."""
    asked_again: tuple[int | None, ...] = ()
    """The length of the loader that the module would give in each epoch, if it were asked then."""
    own_sampler: bool = False
    """Whether the order comes from something else than torch's samplers of a whole dataset."""
    replacement: bool = False
    drop_last: bool = False
    reloads: bool = False
    after_validation: int | None = None
    """The batches that the Trainer counts once a validation within the epoch has ended; None where there is none."""
    stream: bool = False
    stream_samples: int = 0
    """How many were read."""
    overfits: bool = False
    why_not: Unjudged | None = None
    """Why nothing was dealt."""

    def epoch(self, number: int) -> list[int]:
        return list(chain.from_iterable(self.epochs[number]))


def dealt_to(
    run: LightningRun, rank: int, world_size: int, *, epochs: int = 1, seed: int | None = None
) -> Callable[[Path], Dealt]:
    """A trial: start as this rank, and read the indices of some epochs.

    ``seed`` seeds the global generators before the first order is drawn; by default they are as the run leaves them.
    """

    def trial(folder: Path) -> Dealt:
        def look() -> Dealt:
            if seed is not None:
                seed_as_another_process(seed)
            return _dealt(run, epochs)

        dealt = run.at_start(folder, look, rank=rank, world_size=world_size, prepare_loader=deal_indices)
        return dealt or _not_of_this_run("the run has no batch")

    return trial


def _dealt(run: LightningRun, epochs: int) -> Dealt:
    loaders = run.loaders()
    if len(loaders) != 1:
        return _not_of_this_run(f"the run has {len(loaders)} training loaders")
    loader = loaders[0]
    dataset = getattr(loader, "dataset", None)
    if dataset is None or not hasattr(loader, "batch_sampler"):
        return _not_of_this_run(f"{type(loader).__name__} is no torch DataLoader")
    if isinstance(dataset, IterableDataset):
        return _stream(loader, dataset)
    size = length_of(dataset)
    if size is None or size > MOST_INDICES:
        how_many = "a number of samples that is not known" if size is None else f"{size:,} samples"
        return Dealt(size, why_not=Unjudged(f"{how_many}: too many to be dealt in seconds"))
    if loader.batch_sampler is None and loader.sampler is None:
        return _not_of_this_run("the loader has no sampler")
    return _read_epochs(run, loader, size, epochs)


def _not_of_this_run(why: str) -> Dealt:
    return Dealt(None, why_not=Unjudged(why, Kind.NOT_APPLICABLE))


def _read_epochs(run: LightningRun, loader: Any, size: int, epochs: int) -> Dealt:
    came: list[tuple[Batch, ...]] = []
    promised: list[int | None] = []
    asked_again: list[int | None] = []
    limited = run.settings.is_limited
    limit = 4 * max(size, 1) + 8
    if run.settings.max_epochs != -1:
        epochs = max(1, min(epochs, run.settings.max_epochs))
    with draws_counted() as draws:
        for epoch in range(epochs):
            run.begin_epoch(epoch)
            loader = run.loaders()[0]
            promised.append(None if limited else run.counted_batches())
            batches = read(iter(loader), limit)
            if len(batches) == limit:
                return Dealt(size, why_not=Unjudged(f"an epoch has not ended after {limit:,} batches"))
            came.append(batches)
            if epochs > 1:
                again = run.asked_again()
                asked_again.append(length_of(loader) if again is None else length_of(again))
        drawn = draws()
    after_validation = run.counted_after_validation() if epochs > 1 else None
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    plain = type(loader.batch_sampler) in (BatchSampler, type(None)) and type(sampler) in (
        RandomSampler,
        SequentialSampler,
    )
    listeners = [
        part
        for part in parts_of(sampler if loader.batch_sampler is None else loader.batch_sampler)
        if hasattr(part, "set_epoch")
    ]
    for part in listeners:
        part.set_epoch(epochs + 5)
    return Dealt(
        samples=size,
        promised=tuple(promised),
        epochs=tuple(came),
        draws=drawn,
        set_epoch_would_shuffle=bool(listeners) and read(iter(loader), limit) != came[-1],
        asked_again=tuple(asked_again),
        own_sampler=not plain,
        replacement=bool(getattr(sampler, "replacement", False)),
        drop_last=bool(getattr(loader, "drop_last", False) or getattr(loader.batch_sampler, "drop_last", False)),
        reloads=run.settings.reloads,
        after_validation=after_validation,
        overfits=run.settings.overfits,
    )


def parts_of(sampler: Any, depth: int = 3) -> list[Any]:
    """A sampler and the samplers that it keeps as attributes."""
    if sampler is None or depth == 0:
        return []
    inner = [value for value in vars(sampler).values() if hasattr(value, "__iter__") and hasattr(value, "__dict__")]
    return [sampler, *chain.from_iterable(parts_of(value, depth - 1) for value in inner)]


def _stream(loader: Any, dataset: Any) -> Dealt:
    """Read the beginning of a stream."""
    began, read = time.process_time(), 0
    contents: list[Batch] = []
    for sample in iter(dataset):
        seconds = time.process_time() - began
        if read >= STREAM_SAMPLES or seconds > STREAM_SECONDS:
            break
        if read < STREAM_CONTENTS and seconds < STREAM_SECONDS / 2:
            contents.append((fingerprint(sample),))
        read += 1
    return Dealt(
        length_of(dataset),
        promised=(length_of(loader),),
        epochs=(tuple(contents),),
        stream=True,
        stream_samples=read,
    )


# ------------------------------------------------------------------------------------------------- whether it is drawn


def _drawing() -> list[Any]:
    """The usual functions for orders."""
    of_torch = [torch.randperm, torch.randint, torch.multinomial, torch.rand]
    of_numpy = [np.random.default_rng, np.random.permutation, np.random.shuffle]
    return [*of_torch, *of_numpy, random.shuffle, random.sample, random.Random.shuffle, random.Random.sample]


_Name = tuple[Any, str, Any]
"""A module (or class), a name in it, and the function of that name."""
_found: dict[int, list[_Name]] = {}
"""By a module's id: its names of functions that draw, where they have been looked for."""


@contextlib.contextmanager
def draws_found() -> Iterator[None]:
    """Look for the functions that draw here, for the children that are forked within.

    A child that looks itself reads every object of every module, and so copies most of the memory that it shares.
    """
    ids = set(map(id, _drawing()))
    _found.update((id(module), _names_in(module, ids)) for module in list(sys.modules.values()))
    try:
        yield
    finally:
        _found.clear()


def _names_in(module: Any, ids: Collection[int]) -> list[_Name]:
    # A module that imported a function by its name has it under a name of its own.
    names = list(getattr(module, "__dict__", {}).items())
    return [(module, name, value) for name, value in names if id(value) in ids]


@contextlib.contextmanager
def draws_counted() -> Iterator[Callable[[], int]]:
    """Count what is drawn by the usual functions for orders; gives a function that says how often."""
    drawn = 0

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal drawn
            drawn += 1
            return function(*arguments, **options)

        return counted

    stand_ins = {id(function): counting(function) for function in _drawing()}
    before: list[_Name] = []
    for place in [*sys.modules.values(), random.Random]:
        names = _found.get(id(place))
        before.extend(_names_in(place, stand_ins) if names is None else names)
    for place, name, function in before:
        setattr(place, name, stand_ins[id(function)])
    try:
        yield lambda: drawn
    finally:
        for place, name, function in before:
            setattr(place, name, function)
