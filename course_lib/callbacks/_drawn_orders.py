"""When a loader that nobody here wrote draws its order: as it is iterated, with its first index, or not at all."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from course_lib._generators import generators_put_back, held_by, keep_state
from course_lib.samplers.sharded import generators_of

OF_LIBRARIES = ("torch.utils.data", "torchdata.", "lightning.")


def draws_as_it_is_iterated(loader: Any) -> bool:
    """Whether ``iter(loader)`` alone draws from the global generators, ahead of the first batch.

    A loader's workers draw besides; and what draws in a function with ``yield`` does so with its first index.
    """
    return _moves_generators(_iterated_first(loader), draws_an_index=False)


def order_in_no_state(loader: Any, *, within_epoch: bool) -> str:
    """What draws the order of a loader that is torch's but for a state (torchdata's), and is not in it; or ``""``.

    Such a loader saves what a sampler, or its iterator, has for a state. Without one, it passes over as many indices of
    a new order as had been read; at an epoch's end nothing is left of that order. Of a stream nothing is asked here, as
    asking might take samples from it.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return ""
    if loader.generator is not None:
        return "its generator=, from which it draws its workers' seeds as well"
    sampler = _iterated_first(loader)
    while type(sampler).__module__.startswith(OF_LIBRARIES) and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    if _has_a_state(sampler):
        return ""
    if held_by(sampler):
        return f"the generator of its {type(sampler).__name__}"
    drawn = within_epoch and _moves_generators(sampler, draws_an_index=True)
    return f"its {type(sampler).__name__}, which has no state" if drawn else ""


def _iterated_first(loader: Any) -> Any:
    """By a DataLoader without workers, when it is iterated itself."""
    if not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _has_a_state(sampler: Any) -> bool:
    with _nothing_drawn(sampler), contextlib.suppress(Exception):
        return hasattr(sampler, "state_dict") or hasattr(_iterated(sampler), "state_dict")
    return False


def _moves_generators(part: Any, *, draws_an_index: bool) -> bool:
    """Whether it draws from the global ones when it is iterated. What cannot be copied is taken to draw."""
    if not draws_an_index and inspect.isgeneratorfunction(type(part).__iter__):
        return False
    with _nothing_drawn(part), contextlib.suppress(Exception):
        before = _states()
        indices = _iterated(part)
        if draws_an_index:
            next(indices, None)
        return before != _states()
    return True


def _states() -> tuple[Any, ...]:
    """Of the global generators: equal where nobody has drawn."""
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


def _iterated(part: Any) -> Iterator[Any]:
    """Of a copy, so that what it counts by itself stays."""
    return iter(copy.copy(part))


@contextlib.contextmanager
def _nothing_drawn(sampler: Any) -> Iterator[None]:
    put_back = [keep_state(generator) for generator in generators_of(sampler)]
    with generators_put_back():
        yield
    for put in put_back:
        put()
