"""When each batch is fetched, waited for and delivered: measured on a loader, and modelled.

A loader says neither when a worker began a batch nor how long the training step stood still for it. So workers and
prefetching are added by trial, where one measured epoch would say which side is the slow one.
The rule: *the slower side sets the pace, workers / load_s or 1 / compute_s; prefetching evens out what varies, and
makes no load and no step faster.*

    >>> [round(predict_throughput(load_s=0.02, compute_s=0.01, workers=workers)) for workers in range(4)]
    [33, 50, 100, 100]

What a loader does is measured in the same units:

    loader = DataLoader(dataset, batch_size=64, num_workers=2)
    for batch in trace(loader, compute=train_step):
        print(batch.batch, batch.worker, f"{batch.waited_s:.3f} s")
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, MapDataPipe, get_worker_info

from course_lib._sample_seeds import twin_of
from course_lib._words import int_of_at_least

__all__ = ["predict_throughput", "simulate_pipeline", "trace"]

Seconds = float | Sequence[float]


@dataclass(frozen=True)
class BatchTrace:
    """The times of one batch, in seconds since the loader's iterator was asked for."""

    batch: int
    """Its position in the order of delivery, from 0."""
    worker: int | None
    """The worker that fetched it; None: the main process did."""
    fetch_start_s: float
    """The first sample was asked for, where the batch was fetched."""
    fetch_end_s: float
    """The samples were collated, in the same place."""
    wait_start_s: float
    """The main process asked for the batch."""
    delivered_s: float
    """The main process had it."""

    @property
    def waited_s(self) -> float:
        """How long the main process stood still for this batch."""
        return self.delivered_s - self.wait_start_s


def trace(
    loader: DataLoader[Any], *, compute: Callable[[Any], object] | None = None, batches: int | None = None
) -> list[BatchTrace]:
    """Read a loader once, and say when each batch was fetched, waited for and delivered.

    The loader stays as it is: a copy is read, by workers of its own, which end with the trace. The two share the
    sampler: one that draws from a generator, or knows its epoch, has moved on by what was read.

    Args:
        loader: A DataLoader, torch's or one of its kind.
        compute: The training step, called with each batch after its delivery.
        batches: Stop after so many; default: the whole epoch.

    Workers start before the first wait, or within it where the loader's `__iter__` is a generator. What takes a batch
    to the main process, pinning included, comes after `fetch_end_s`.

    Raises:
        TypeError: `loader` is no DataLoader, reads a datapipe, or delivers something else than `collate_fn` returned.
        ValueError: `batches` is not a positive int.
    """
    twin = _timed_copy(loader)
    batches = None if batches is None else int_of_at_least(1, "batches", batches)
    traces: list[BatchTrace] = []
    end = object()
    begin = time.perf_counter()
    iterator = iter(twin)
    try:
        while batches is None or len(traces) < batches:
            wait_start = time.perf_counter()
            try:
                item = next(iterator, end)
            except BaseException as error:
                if twin.num_workers:  # they live as long as torch's iterator, which the traceback would hold
                    traceback.clear_frames(error.__traceback__)
                raise
            delivered = time.perf_counter()
            if item is end:
                break
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], _Fetch)):
                raise TypeError(
                    f"{type(loader).__name__} delivers something else than its collate_fn returned: trace the "
                    "DataLoader underneath, and leave to compute what is done to a batch afterwards"
                )
            fetch, batch = item
            times = (at - begin for at in (fetch.start, fetch.end, wait_start, delivered))
            traces.append(BatchTrace(len(traces), fetch.worker, *times))
            if compute is not None:
                compute(batch)
    finally:
        del iterator
        vars(twin)["_iterator"] = None
    return traces


def simulate_pipeline(
    load_s: Seconds, compute_s: Seconds, workers: int, prefetch: int = 2, *, batches: int
) -> list[BatchTrace]:
    """The records of an epoch in which nothing but fetching and computing takes time.

    Batches are dealt to the workers in turn: `prefetch * workers` at the start, and one more at each delivery, before
    the step computes. A worker fetches its batches one after another; they are delivered in order.

    Args:
        load_s: Seconds to fetch and collate a batch; a sequence begins again when it is used up.
        compute_s: Seconds of the training step, in the same form.
        workers: `num_workers`; 0: the main process fetches each batch when it needs it.
        prefetch: `prefetch_factor`, the most batches that a worker is given ahead of their delivery.
        batches: Batches in the epoch.

    Raises:
        ValueError: A time is negative or not finite, a sequence is empty, or an int is out of its range.
    """
    loads, computes = _in_turn("load_s", load_s), _in_turn("compute_s", compute_s)
    workers, prefetch = int_of_at_least(0, "workers", workers), int_of_at_least(1, "prefetch", prefetch)
    traces: list[BatchTrace] = []
    wait_start, ahead = 0.0, prefetch * workers
    for batch in range(int_of_at_least(1, "batches", batches)):
        fetch_start = wait_start
        if workers:
            dealt = traces[batch - ahead].delivered_s if batch >= ahead else 0.0
            free = traces[batch - workers].fetch_end_s if batch >= workers else 0.0
            fetch_start = max(dealt, free)
        fetch_end = fetch_start + loads[batch % len(loads)]
        delivered = max(wait_start, fetch_end)
        worker = batch % workers if workers else None
        traces.append(BatchTrace(batch, worker, fetch_start, fetch_end, wait_start, delivered))
        wait_start = delivered + computes[batch % len(computes)]
    return traces


def predict_throughput(load_s: float, compute_s: float, workers: int) -> float:
    """Batches per second of a run without end, infinite if nothing takes time.

    It is `1 / (load_s + compute_s)` without workers, else `min(workers / load_s, 1 / compute_s)`. `prefetch_factor`
    does not matter to it: one batch ahead keeps a worker busy while the step computes, and more of them only bridge a
    batch that takes longer than others. Where times vary, :func:`simulate_pipeline` plays them.

    The model leaves out, and real loaders are slower by it: samples that need the CPU, for which no more workers count
    than cores are free; the start of the workers; the way of a batch from its worker, and to a GPU.

    Raises:
        ValueError: A time is negative or not finite, or `workers` is no int of at least 0.
    """
    load_s, compute_s = _seconds("load_s", load_s), _seconds("compute_s", compute_s)
    workers = int_of_at_least(0, "workers", workers)
    seconds = max(compute_s, load_s / workers) if workers else load_s + compute_s
    return 1 / seconds if seconds else math.inf


def _in_turn(name: str, value: Seconds) -> list[float]:
    times = [_seconds(name, each) for each in (value if isinstance(value, Iterable) else [value])]
    if not times:
        raise ValueError(f"{name} must be seconds, or a sequence of at least one time, got an empty one")
    return times


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} must be seconds, finite and at least 0, got {value!r}")
    return seconds


# ------------------------------------------------------------------------------------------ the copy that is timed


def _timed_copy(loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        raise TypeError(f"loader must be a torch.utils.data.DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):  # torch shards and seeds these by their type
        raise TypeError(f"loader must read a Dataset, got the datapipe {type(loader.dataset).__name__}")
    stopwatch = _StreamStopwatch if isinstance(loader.dataset, IterableDataset) else _Stopwatch
    stands_for_both = stopwatch(loader.dataset, loader.collate_fn)
    return twin_of(loader, stands_for_both, collate_fn=stands_for_both)


@dataclass(frozen=True)
class _Fetch:
    """Travels with its batch; no tuple, so that pinning passes it on as it is."""

    worker: int | None
    start: float
    end: float


class _Stopwatch(Dataset[Any]):
    """Stands for the dataset and the `collate_fn`, in whichever process they are called."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self.start: float | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # copying and pickling ask before there is one
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        self.start_timing()
        return self.dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        self.start_timing()
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(indices) if at_once else [self.dataset[index] for index in indices]

    def start_timing(self) -> None:
        # perf_counter is the machine's own monotonic clock on Linux, macOS and Windows: one for all its processes.
        if self.start is None:
            self.start = time.perf_counter()

    def __call__(self, samples: Any) -> tuple[_Fetch, Any]:
        batch = self.collate_fn(samples)
        end, worker = time.perf_counter(), get_worker_info()
        start, self.start = self.start, None
        return _Fetch(None if worker is None else worker.id, end if start is None else start, end), batch


class _StreamStopwatch(_Stopwatch, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        # zip asks its first argument first: the time is noted when a sample is asked for, not when it has come.
        return (sample for _, sample in zip(iter(self.start_timing, "never"), self.dataset, strict=False))
