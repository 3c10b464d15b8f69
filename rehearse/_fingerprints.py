"""A number of a value's content: equal tensors, arrays, samples and batches have equal numbers, in any process."""

from __future__ import annotations

import hashlib
import operator
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def fingerprint(value: Any) -> int:
    """64 bits of it; mappings, lists and tuples are followed into, and what is neither must be picklable."""
    digest = hashlib.blake2b(digest_size=8)
    _digest(value, digest.update)
    return int.from_bytes(digest.digest(), "big")


def _digest(value: Any, update: Callable[[bytes], None]) -> None:
    # Pickles of equal tensors differ: they hold the storage that a tensor is a view of.
    update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            update(repr(key).encode())
            _digest(part, update)
    elif isinstance(value, list | tuple):
        for part in value:
            _digest(part, update)
    else:
        update(pickle.dumps(value))


def number_of(index: Any) -> int:
    """An index; of one that is no whole number, as a slice, a number for it."""
    try:
        return operator.index(index)
    except TypeError:
        return fingerprint(index)
