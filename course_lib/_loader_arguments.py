"""What arguments a loader takes, and what it says of the others; the kernels of the messages are torch's."""

from __future__ import annotations

import multiprocessing.context
import os
import warnings
from typing import Any

import torch.multiprocessing
from torch.utils.data import IterableDataset


def check_workers(num_workers: int, timeout: float, prefetch_factor: int | None, persistent_workers: bool) -> None:
    if num_workers < 0:
        raise ValueError(
            f"num_workers option should be non-negative, got {num_workers}; use num_workers=0 to fetch in this process"
        )
    if timeout < 0:
        raise ValueError(f"timeout option should be non-negative, got {timeout}; 0 waits as long as the workers live")
    if prefetch_factor is not None and num_workers == 0:
        raise ValueError(
            f"prefetch_factor option could only be specified in multiprocessing, got {prefetch_factor} with "
            "num_workers=0: only workers fetch ahead"
        )
    if prefetch_factor is not None and prefetch_factor < 1:
        raise ValueError(f"prefetch_factor option should be non-negative, and greater than 0, got {prefetch_factor}")
    if num_workers == 0 and (persistent_workers or timeout):
        option = "persistent_workers" if persistent_workers else "timeout"
        raise ValueError(f"{option} option needs num_workers > 0, got num_workers=0")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers > cores:
        warnings.warn(
            f"This DataLoader will create {num_workers} worker processes in total. Our suggested max number of worker "
            f"in current system is {cores}: excessive worker creation might get DataLoader running slow or even freeze",
            stacklevel=3,
        )


def check_order(
    dataset: Any, batch_size: int | None, shuffle: bool | None, sampler: Any, batch_sampler: Any, drop_last: bool
) -> None:
    if isinstance(dataset, IterableDataset):
        options = {"shuffle": shuffle or None, "sampler": sampler, "batch_sampler": batch_sampler}
        for name, value in options.items():
            if value is not None:
                raise ValueError(
                    f"DataLoader with IterableDataset: expected unspecified {name} option, but got {name}={value}: a "
                    "stream comes in its own order"
                )
    if sampler is not None and shuffle:
        raise ValueError("sampler option is mutually exclusive with shuffle: the sampler is the order")
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise ValueError(
            "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last: it decides "
            "them all"
        )
    if batch_size is None and batch_sampler is None and drop_last:
        raise ValueError("batch_size=None option disables auto-batching and is mutually exclusive with drop_last")


def context_of(value: Any, num_workers: int) -> Any:
    if value is None:
        return None
    if not num_workers:
        raise ValueError(
            "multiprocessing_context can only be used with multi-process loading (num_workers > 0), but got "
            f"num_workers={num_workers}"
        )
    if isinstance(value, str):
        known = torch.multiprocessing.get_all_start_methods()
        if value not in known:
            raise ValueError(
                f"multiprocessing_context option should specify a valid start method in {known!r}, but got "
                f"multiprocessing_context={value!r}"
            )
        return torch.multiprocessing.get_context(value)
    if not isinstance(value, multiprocessing.context.BaseContext):
        raise TypeError(
            "multiprocessing_context option should be a valid context object or a string specifying the start method, "
            f"but got multiprocessing_context={value}"
        )
    return value
