"""An index that says at which size its sample is wanted, and a dataset that listens.

An attribute of the dataset (``dataset.size = 64``) is copied into a worker when that starts, and never again. The rule:
*what a worker has to know about a sample comes with its index*, since indices are all that is sent to it.

    >>> index = SizedIndex(12, 32)
    >>> index, index + 1, index.size
    (12@32, 13, 32)
    >>> images = [f"image {number}" for number in range(48)]
    >>> SizedDataset(images, lambda image, size: f"{image} at {size} × {size}")[index]
    'image 12 at 32 × 32'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from course_lib._words import int_of_at_least

Size = int | tuple[int, ...]
"""The side of a square image, (height, width), or a number of tokens."""


class SizedIndex(int):
    """An index into a dataset, with the ``size`` at which the sample is wanted.

    It is the plain int wherever one is expected: equal to it, hashed and counted as it. Whatever computes a new index
    from it (``index + 1``, torch's ``Subset``) gets a plain one, without a size.
    """

    size: Size

    def __new__(cls, index: int, size: Size) -> SizedIndex:
        self = super().__new__(cls, index)
        self.size = size
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.size)

    __str__ = int.__repr__

    def __repr__(self) -> str:
        return f"{int(self)}@{size_text(self.size)}"


class SizedDataset(Dataset[Any]):
    """A dataset whose samples come at the size that their index asks for.

    Args:
        dataset: Map-style. It gets plain ints.
        render: ``render(sample, size)`` -> the sample at that size, in the worker that has loaded it. An object of a
            class or a function of a module, so that workers can be started anywhere.

    It must be the outermost dataset: an index without a size (``dataset[0]``, what a ``Subset`` around it hands on) is
    an error. (A ``Subset`` inside is fine.)
    """

    def __init__(self, dataset: Any, render: Callable[[Any, Any], Any]) -> None:
        self.dataset, self.render = dataset, render

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if not isinstance(index, SizedIndex):
            raise ValueError(
                f"index {index!r} does not say at which size: let a ScheduledBatchSampler deal the indices, with this "
                "dataset as the outermost one (a Subset around it takes the size away)"
            )
        return self.render(self.dataset[int(index)], index.size)


def checked_size(name: str, size: object) -> Size:
    """A size as an int or a tuple of ints, or a ValueError that names the argument."""
    if isinstance(size, tuple | list):
        if not size:
            raise ValueError(f"{name} must be an int or a tuple of ints, got {size!r}")
        return tuple(int_of_at_least(1, f"each part of {name}", part) for part in size)
    return int_of_at_least(1, name, size)


def size_text(size: Size) -> str:
    return "x".join(map(str, size)) if isinstance(size, tuple) else str(size)
