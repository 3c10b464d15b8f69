"""From indices to a batch: *fetch the samples, then collate them*. A worker does it, or the process that asks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset


def make_fetch(dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool) -> Callable[[Any], Any]:
    """The function that turns indices into a batch; at the end of a stream it raises ``StopIteration``."""

    def from_map(indices: Any) -> Any:
        try:
            if not auto_collation:
                return collate_fn(dataset[indices])
            if getattr(dataset, "__getitems__", None):
                return collate_fn(dataset.__getitems__(indices))
            return collate_fn([dataset[index] for index in indices])
        except StopIteration as error:  # it would end the epoch without a word
            raise RuntimeError(f"dataset or collate_fn raised StopIteration for {indices}") from error

    def from_stream(indices: Any) -> Any:
        if not auto_collation:
            return collate_fn(next(stream))
        samples = list(itertools.islice(stream, len(indices)))
        if not samples or (drop_last and len(samples) < len(indices)):
            raise StopIteration
        return collate_fn(samples)

    if not isinstance(dataset, IterableDataset):
        return from_map
    stream = iter(dataset)
    return from_stream
