"""workers: the same random numbers, attributes that do not arrive, streams that come twice, caches, another order."""

from __future__ import annotations

import copy
import multiprocessing
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from course_lib._words import counted, plural
from rehearse._fingerprints import fingerprint
from rehearse.report import Judgement, in_a_line, not_applicable
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.loaders import deal_indices, read, stop_workers
from rehearse.runs.run import Batch, seed_as_another_process

STREAM_SAMPLES = 500
MOST_WORKERS = 4
MOST_PARTS = 16
"""Of a ``ConcatDataset`` that are looked at."""
COINS = 24
"""Fetches of a sample: an image that is only flipped is the same in two workers every other time."""
SAMPLES = 8
"""Samples that are fetched to see what grows."""


def judge_workers(run: LightningRun) -> Callable[[Path], Judgement]:
    """A trial: read a little with the run's workers."""

    def trial(folder: Path) -> Judgement:
        with_workers: list[Any] = []

        def keep(loader: Any) -> None:
            kept = copy.copy(loader)
            vars(kept)["batch_sampler"] = _copied(loader.batch_sampler)
            with_workers.append(kept)
            stop_workers(loader)

        def look() -> Judgement:
            return _judge(run, with_workers[0]) if with_workers else Judgement()

        judgement = run.at_start(folder, look, workers=True, prepare_loader=keep)
        return judgement or not_applicable("workers", "the run has no batch")

    return trial


def _judge(run: LightningRun, loader: Any) -> Judgement:
    if loader.num_workers == 0:
        return Judgement()
    workers = min(MOST_WORKERS, loader.num_workers)
    found = _cannot_be_sent(loader)
    if found is None and isinstance(loader.dataset, IterableDataset):
        found = _stream_twice(loader, max(2, workers)) if loader.num_workers > 1 else None
    elif found is None:
        found = _draws_alike(loader, workers) or _another_order(run, loader, workers)
        if found is None and getattr(loader, "persistent_workers", False):
            found = _changes_unseen(run, loader)
        if found is None and loader.num_workers > 1:
            found = _caches(loader)
    return found or Judgement()


def _copied(sampler: Any) -> Any:
    try:
        return copy.deepcopy(sampler)
    except Exception:  # then its order is not tried
        return None


def _cannot_be_sent(loader: Any) -> Judgement | None:
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    if method == "fork":
        return None
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        try:
            ForkingPickler.dumps(getattr(loader, name))
        except Exception as error:
            return Judgement().find(
                "workers",
                f"The loader's {name} cannot be sent to a worker that is started by {method}: {in_a_line(error)}.",
                "The run raises before its first batch.",
                "Use functions and classes of a module in place of lambdas and local ones.",
            )
    return None


class SeededAlike(Dataset[Any]):
    """A dataset before each of whose samples the global generators are set to one state.

    What still changes from one fetch to the next is drawn by a generator of the dataset's own.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        seed_as_another_process(0)
        return self.dataset[index]


def _draws_alike(loader: Any, workers: int) -> Judgement | None:
    """Fetch one sample again and again in each worker; more often where a few coins may have fallen alike."""
    if len(loader.dataset) == 0:
        return None
    index = _first_index(loader)
    found = _alike(loader, index, workers, times=2)
    return found and _alike(loader, index, workers, times=COINS)


def _alike(loader: Any, index: Any, workers: int, times: int) -> Judgement | None:
    """Fetch a sample so often in each worker, in two epochs."""
    first, second = (_fetched(loader, loader.dataset, index, workers, times) for _ in range(2))
    if not any(map(_changes, first)):
        return None  # the sample is the same whenever it is fetched
    alike = workers > 1 and first[0] == first[1]
    if workers > 1 and not alike:
        own = _fetched(loader, SeededAlike(loader.dataset), index, workers, times)
        alike = own[0] == own[1] and _changes(own[0])
    if alike:
        return Judgement().find(
            "workers",
            f"Workers 0 and 1 draw the same random numbers: what the dataset's own generator makes of sample {index} "
            f"is the same in both, and another when it is fetched again in one of {workers}.",
            f"Augmentations come {workers} times each, and the batches of one round are alike.",
            "Do not keep a generator in the dataset or seed by a constant in worker_init_fn: draw from torch, or from "
            "default_rng([seed, epoch, index]).",
        )
    if first[0] == second[0]:
        return Judgement().find(
            "workers",
            f"The workers draw the same random numbers in every epoch: sample {index} has the same values in both.",
            "Each epoch repeats the augmentations of the first.",
            "Draw from torch's generator, which workers get a new seed for in each epoch, or from "
            "default_rng([seed, epoch, index]).",
        )
    return None


def _changes(fetches: list[int]) -> bool:
    return len(set(fetches)) > 1


def _first_index(loader: Any) -> Any:
    """An index as the loader's own sampler gives it: 0 may be none of them."""
    if loader.batch_sampler is None:
        return 0
    return next((batch[0] for batch in map(list, copy.deepcopy(loader.batch_sampler)) if batch), 0)


def _fetched(loader: Any, dataset: Any, index: Any, workers: int, times: int) -> list[list[int]]:
    """For each worker, what it fetched of a sample."""
    probe: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=[[index]] * (times * workers),
        num_workers=workers,
        collate_fn=_fingerprints,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=_quick_context(loader),
        generator=loader.generator,
    )
    fetches = [fetched[0] for fetched in probe]
    return [fetches[worker::workers] for worker in range(workers)]


def _quick_context(loader: Any) -> Any:
    """Workers of a trial are forked where that can be: a worker that is spawned takes seconds to start."""
    if "fork" in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("fork")
    return loader.multiprocessing_context


def _fingerprints(samples: list[Any]) -> list[int]:
    return [fingerprint(sample) for sample in samples]


def _another_order(run: LightningRun, loader: Any, workers: int) -> Judgement | None:
    if loader.batch_sampler is None:
        return None

    def order(num_workers: int) -> tuple[Batch, ...]:
        dealing = copy.copy(loader)
        vars(dealing)["batch_sampler"] = copy.deepcopy(loader.batch_sampler)
        deal_indices(dealing, num_workers)
        vars(dealing)["_DataLoader__multiprocessing_context"] = _quick_context(loader) if num_workers else None
        seed_as_another_process(0)
        return read(iter(dealing), 50)

    without, with_workers = order(0), order(workers)
    if without == with_workers:
        return None
    step = next((i for i, pair in enumerate(zip(without, with_workers, strict=False)) if pair[0] != pair[1]), 0)
    return Judgement().find(
        "workers",
        f"With {counted(workers, 'worker')} the order is another than without: batch {step} is "
        f"{list(with_workers[step][:4])}… and not {list(without[step][:4])}….",
        "The number of workers changes what the run trains on; a loader with workers asks its sampler for two orders.",
        "Draw the order when the first index is asked for (make __iter__ a generator function), from (seed, epoch).",
    )


def _changes_unseen(run: LightningRun, loader: Any) -> Judgement | None:
    parts = dict(_parts_of(loader.dataset))
    before = {f"{part}.{name}": value for part, of in parts.items() for name, value in _values(of).items()}
    run.begin_epoch(1)
    after = {f"{part}.{name}": value for part, of in parts.items() for name, value in _values(of).items()}
    changed = [name for name in after if after[name] != before.get(name)]
    if not changed:
        return None
    names = ", ".join(changed)
    return Judgement().find(
        "workers",
        f"{names} {plural(len(changed), 'is', 'are')} changed between epochs 0 and 1 here, and with "
        f"persistent_workers=True the copies of {counted(loader.num_workers, 'worker')} stay "
        "those of epoch 0.",
        "The workers go on with the old value; nothing says so.",
        "Make it a tensor in shared memory (share_memory_()), send it with the index, or leave persistent_workers out.",
    )


def _parts_of(dataset: Any, name: str = "dataset", depth: int = 4) -> Iterator[tuple[str, Any]]:
    """A dataset and what it wraps (``Subset``, ``ConcatDataset``, one's own), each by its way there."""
    if not hasattr(dataset, "__dict__") or isinstance(dataset, type | ModuleType):
        return
    yield name, dataset
    if depth == 0:
        return
    for attribute, value in vars(dataset).items():
        several = isinstance(value, list | tuple) and 0 < len(value) <= MOST_PARTS
        for number, part in enumerate(value if several else [value]):
            if isinstance(part, Dataset) or hasattr(part, "__getitem__"):
                at = f"[{number}]" if several else ""
                yield from _parts_of(part, f"{name}.{attribute}{at}", depth - 1)


def _values(dataset: Any) -> dict[str, Any]:
    """What can be compared of a dataset's attributes; a tensor by its version, unless workers share it."""
    values: dict[str, Any] = {}
    for name, value in vars(dataset).items():
        if isinstance(value, torch.Tensor):
            if not value.is_shared():
                values[name] = _version_of(value)
        elif isinstance(value, np.ndarray):
            if value.nbytes < 1 << 20:
                values[name] = value.tobytes()
        elif isinstance(value, bool | int | float | str | tuple | None):
            values[name] = value
    return values


class _This:
    """A tensor by itself, and not by its numbers or its place, which a later one may have: equal while it lives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _This) and self._tensor() is not None and self._tensor() is other._tensor()


def _version_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Another one where a tensor was replaced, or changed in place, but through ``.data``."""
    place = tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)  # a sparse one is no one place
    return _This(tensor), place, -1 if tensor.is_inference() else tensor._version


def _stream_twice(loader: Any, workers: int) -> Judgement | None:
    alone = Counter(map(fingerprint, islice(iter(loader.dataset), STREAM_SAMPLES)))
    reading: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=None,
        num_workers=workers,
        collate_fn=fingerprint,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=_quick_context(loader),
    )
    together = Counter(islice(iter(reading), workers * STREAM_SAMPLES))
    extra = sum(times - alone.get(content, 1) for content, times in together.items() if times > alone.get(content, 1))
    if extra <= len(together) / 2:
        return None
    return Judgement().find(
        "workers",
        f"The stream gives {counted(together.total(), 'sample')} to {workers} workers, {len(together):,} of them "
        "different: each worker reads all of it.",
        f"Every sample is trained {loader.num_workers} times in an epoch.",
        "In __iter__, take every n-th sample by torch.utils.data.get_worker_info(), as datasets.IntegerStream does.",
    )


def _caches(loader: Any) -> Judgement | None:
    """Fetch samples in this process, and see which containers of the dataset grow with them."""
    dataset = loader.dataset
    most = min(2 * SAMPLES, len(dataset))
    sizes = [_sizes(dataset)]
    for index in range(most):
        dataset[index]
        if index in (most // 2 - 1, most - 1):
            sizes.append(_sizes(dataset))
    grows = [name for name, size in sizes[-1].items() if sizes[0].get(name, 0) < sizes[1].get(name, 0) < size]
    if len(sizes) < 3 or not grows:
        return None
    name = grows[0]
    return Judgement().find(
        "workers",
        f"{name} grows with what is fetched, to {counted(sizes[-1][name], 'entry', 'entries')} after "
        f"{counted(most, 'sample')}, and each of {loader.num_workers} workers fills one of its own.",
        "The workers' memory grows for as long as they live, to a copy of the data in each.",
        "Cache in shared memory or on disk, bound the cache, or leave it out.",
    )


def _sizes(dataset: Any) -> dict[str, int]:
    held = [(f"{part}.{name}", value) for part, of in _parts_of(dataset) for name, value in vars(of).items()]
    return {name: len(value) for name, value in held if isinstance(value, list | dict | set)}
