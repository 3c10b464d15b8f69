"""Calls into somebody else's code: whatever it raises or yields becomes batches or a :class:`Fault`, never a crash."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

MANY_INDICES = 1_000_000
"""A batch of more has no end."""


class Fault(Exception):
    """The sampler raised, or yielded what is no batch."""


class Refusal(Fault):
    """A ValueError before the first batch."""


class Unpicklable(Fault):
    pass


def call(what: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        return function(*args, **keywords)
    except Exception as error:
        raise (Refusal if isinstance(error, ValueError) else Fault)(describe_error(f"{what} raised", error)) from error


def describe_error(what: str, error: Exception) -> str:
    return f"{what} {type(error).__name__}: {error}".rstrip(": .")


def pickled(value: Any) -> Any:
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise Unpicklable(describe_error(f"pickling the {type(value).__name__} raised", error)) from error


def as_indices(batch: Any, number: int) -> list[int]:
    try:
        items = list(islice(batch, MANY_INDICES + 1))
    except TypeError:
        raise Fault(f"batch {number} is {batch!r}, no list: is this a sampler, and no batch sampler?") from None
    if not items:
        raise Fault(f"batch {number} is empty")
    if len(items) > MANY_INDICES:
        raise Fault(f"batch {number} has no end: more than {MANY_INDICES:,} indices")
    if all(type(item) is int for item in items):
        return items
    for item in items:
        try:
            operator.index(item)
        except TypeError:
            raise Fault(f"batch {number} holds {item!r}, which is no integer") from None
    return [operator.index(item) for item in items]
