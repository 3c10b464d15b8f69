"""What chapter 02 gives to workers: datasets, what a worker does, and what it is asked by.

It is not in the notebook, because a process that was spawned imports what it runs; and not with the figures, because
each such process would import matplotlib, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from course_lib.datasets import Integers


def answer_tasks(pipe: Any, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
    with contextlib.suppress(EOFError, OSError):  # the other end was closed
        while (indices := pipe.recv()) is not None:  # None: no more tasks
            pipe.send(collate_fn([dataset[index] for index in indices]))


def start_worker(dataset: Any, collate_fn: Callable[[Any], Any] = default_collate) -> Any:
    """Our end of the pipe to a new process that answers tasks."""
    ours, theirs = torch.multiprocessing.Pipe()
    arguments = (theirs, dataset, collate_fn)
    torch.multiprocessing.Process(target=answer_tasks, args=arguments, daemon=True).start()
    theirs.close()
    return ours


class Sleepy(Dataset[int]):
    """Sample i is the int i; reading it takes ``seconds[i]`` and no CPU time, as a disk or a network does."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = list(seconds)

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds[index])
        return index


class Busy(Sleepy):
    """Sample i is the int i; making it takes ``seconds[i]`` of CPU time, as decoding and augmenting do."""

    def __getitem__(self, index: int) -> int:
        end = time.process_time() + self.seconds[index]
        while time.process_time() < end:
            pass
        return index


class Resizable(Dataset[Tensor]):
    """Square images of zeros. Their size is an attribute."""

    def __init__(self, samples: int, size: int | Tensor) -> None:
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Tensor:
        return torch.zeros(int(self.size), int(self.size))


class SizedByIndex(Resizable):
    """Square images of zeros. Their size comes with the index."""

    def __getitem__(self, index_and_size: Any) -> Tensor:
        _, size = index_and_size  # all images are zeros, whatever their index
        return torch.zeros(size, size)


def blank_image(sample: Any, size: int) -> Tensor:
    """The sample at that size: here, zeros."""
    return torch.zeros(size, size)


class ReaderIds(Integers):
    """Sample i is the id of the process that reads it."""

    def __getitem__(self, index: Any) -> int:
        return os.getpid()


class Draws(Dataset[int]):
    """Each sample is a random number below 2**31, drawn in one of three ways.

    ``way``: "global" draws from NumPy's global generator; "own" from a generator that is
    made here, once; "by index" from one that is made for each sample, of (seed, epoch, index).
    """

    def __init__(self, samples: int, way: str) -> None:
        self.samples, self.way = samples, way
        self.rng, self.epoch = np.random.default_rng(0), 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        if self.way == "global":
            return int(np.random.randint(2**31))  # noqa: NPY002 - it is what many datasets do
        rng = self.rng if self.way == "own" else np.random.default_rng([0, self.epoch, index])
        return int(rng.integers(2**31))


def reseed(worker_id: int) -> None:
    """A ``worker_init_fn``: gives the worker's copy of the dataset a generator of its own."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.rng = np.random.default_rng(info.seed)


class InList(Dataset[float]):
    """Floats in a list: each is a Python object, which counts its references."""

    def __init__(self, samples: int) -> None:
        self.values: Any = [float(i) for i in range(samples)]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> float:
        return self.values[index]  # type: ignore[no-any-return]


class InArray(InList):
    """The same floats in one array."""

    def __init__(self, samples: int) -> None:
        self.values = np.arange(samples, dtype=np.float64)


def private_bytes(samples: Any) -> int:
    """A ``collate_fn``: in place of the batch, the bytes that this process shares with no other."""
    return int(psutil.Process().memory_full_info().uss)


def growth_of_workers(dataset: Any, workers: int = 2) -> list[int]:
    """By how many private bytes each forked worker grows from its first batch to its last."""
    options: Any = dict(num_workers=workers, multiprocessing_context="fork")
    loader = DataLoader(dataset, len(dataset) // 40, collate_fn=private_bytes, **options)
    batches = list(loader)
    return [batches[worker::workers][-1] - batches[worker] for worker in range(workers)]


def can_fork() -> bool:
    return "fork" in torch.multiprocessing.get_all_start_methods()


class Killed(Integers):
    """Sample i is the int i. Whoever reads sample ``at`` is killed, as the system does when memory runs out."""

    def __init__(self, samples: int, at: int) -> None:
        super().__init__(samples)
        self.at = at

    def __getitem__(self, index: Any) -> int:
        if index == self.at:
            # What was answered before is on its way; a worker that is spawned may still be starting.
            time.sleep(0.3 if torch.multiprocessing.get_start_method() == "fork" else 5)
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
        return index


def keep_on_one_core(worker_id: int) -> None:
    """A ``worker_init_fn``: all workers run on the same core, where the system has a call for that."""
    process = psutil.Process()
    if can_keep_on_one_core():
        process.cpu_affinity([min(process.cpu_affinity())])


def can_keep_on_one_core() -> bool:
    return hasattr(psutil.Process, "cpu_affinity")  # Linux and Windows; not macOS


def begin_together(workers: int) -> dict[str, Any]:
    """Arguments of a loader whose workers wait until all of them have started: ``num_workers`` and ``worker_init_fn``.

    Where a process is spawned, its start takes up to seconds, and the clock would measure that, too.
    """
    if workers == 0:
        return {"num_workers": 0}
    started = torch.multiprocessing.get_context().Barrier(workers)
    return {"num_workers": workers, "worker_init_fn": functools.partial(_wait_for_all, started)}


def _wait_for_all(started: Any, worker_id: int) -> None:
    started.wait(timeout=60)
