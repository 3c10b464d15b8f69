"""Which samples two datasets share: as parts of one, or as two that hold the same data."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

DEEPEST = 8
"""Subsets and wrappers of each other that are looked through."""

MOST_BYTES = 1 << 30
"""Up to which a tensor or an array is compared whole; of a larger one, as of a mapped file, both ends are."""


def under_subsets(dataset: Any) -> tuple[Any, list[int] | None]:
    """The dataset that a subset is a part of, and the indices of its samples there; None: it is all of it.

    What holds one dataset of its own length, as for a transform behind ``random_split``, is looked through: its sample
    i is taken for one that is made of sample i.
    """
    indices: list[int] | None = None
    for _ in range(DEEPEST):
        if isinstance(dataset, Subset):
            own = list(map(int, dataset.indices))
            indices = own if indices is None else [own[index] for index in indices]
            dataset = dataset.dataset
            continue
        held = [value for value in getattr(dataset, "__dict__", {}).values() if isinstance(value, Dataset)]
        if len(held) != 1 or isinstance(held[0], IterableDataset) or length_of(held[0]) != length_of(dataset):
            break
        [dataset] = held
    return dataset, indices


def length_of(thing: Any) -> int | None:
    """Its ``len``; None where it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def same_data(one: Any, other: Any) -> bool:
    """Whether two datasets are of one class and one length and hold equal data, whatever they make of it.

    Data is what has an item for each sample: a tensor or an array of rows, such tensors in a tuple, a list of paths.
    Labels alone are none. False where nothing of the kind is seen.
    """
    if one is other:
        return True
    length = length_of(one)
    if type(one) is not type(other) or length is None or length_of(other) != length:
        return False
    theirs = vars(other) if hasattr(other, "__dict__") else {}
    mine = vars(one) if hasattr(one, "__dict__") else {}
    pairs = [(value, theirs.get(name)) for name, value in mine.items() if _is_data(value, length)]
    return bool(pairs) and all(_equal(value, its) for value, its in pairs)


def _is_data(value: Any, length: int) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim > 1 and len(value) == length
    if isinstance(value, list):
        return bool(value) and len(value) == length and _names_a_file(value[0])
    return isinstance(value, tuple) and bool(value) and _is_data(value[0], length)


def _names_a_file(item: Any) -> bool:
    if isinstance(item, tuple | list):
        return bool(item) and _names_a_file(item[0])
    return isinstance(item, str) or hasattr(item, "__fspath__")


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(_equal(mine, its) for mine, its in zip(one, other, strict=True))
    if not isinstance(one, torch.Tensor | np.ndarray):
        with contextlib.suppress(RuntimeError, ValueError):  # of tensors beside the paths
            return bool(one == other)
        return False
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    parts = [slice(None)] if one.nbytes <= MOST_BYTES else [slice(1_000), slice(-1_000, None)]
    if isinstance(one, torch.Tensor):
        return one.device == other.device and all(torch.equal(one[part], other[part]) for part in parts)
    return all(np.array_equal(one[part], other[part]) for part in parts)
