"""Calls into somebody else's sampler: what it offers, and what it does.

Whatever it raises or yields becomes batches or a :class:`SamplerFault`, and never ends the kit itself.
"""

from __future__ import annotations

import inspect
import operator
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

MANY_INDICES = 1_000_000
"""A batch with more indices is taken for one without an end."""


class SamplerFault(Exception):
    """The sampler raised, or yielded something that is no batch."""


class SamplerRefusal(SamplerFault):
    """A ValueError before the first batch."""


class Unpicklable(SamplerFault):
    pass


def call(what: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        return function(*args, **keywords)
    except Exception as error:
        raise fault_or_refusal(f"{what} raised", error) from error


def fault_or_refusal(what: str, error: Exception) -> SamplerFault:
    kind = SamplerRefusal if isinstance(error, ValueError) else SamplerFault
    return kind(describe_error(what, error))


def describe_error(what: str, error: Exception) -> str:
    return f"{what} {type(error).__name__}: {error}".rstrip(": .")


def pickled(value: Any) -> Any:
    """A copy, as another process or a checkpoint gets it."""
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise Unpicklable(describe_error(f"pickling the {type(value).__name__} raised", error)) from error


def as_indices(batch: Any, number: int) -> list[int]:
    try:
        items = list(islice(batch, MANY_INDICES + 1))
    except TypeError:
        raise SamplerFault(f"batch {number} is {batch!r}, no list: is this a sampler, and no batch sampler?") from None
    if not items:
        raise SamplerFault(f"batch {number} is empty")
    if len(items) > MANY_INDICES:
        raise SamplerFault(f"batch {number} has no end: more than {MANY_INDICES:,} indices")
    if all(type(item) is int for item in items):
        return items
    for item in items:
        try:
            operator.index(item)
        except TypeError:
            raise SamplerFault(f"batch {number} holds {item!r}, which is no integer") from None
    return [operator.index(item) for item in items]


def told_length(sampler: Any) -> int:
    """What ``len()`` says, or 0: whether it is right is for rule 3 to judge."""
    try:
        return min(len(sampler), MANY_INDICES)
    except Exception:
        return 0


@dataclass(frozen=True)
class Offers:
    """What a sampler has beyond ``__iter__``."""

    length: bool
    set_epoch: bool
    inner_set_epoch: bool
    """``sampler.sampler.set_epoch``, which is where trainers look for a batch sampler's."""
    state: bool
    state_after_batches: bool

    @classmethod
    def of(cls, sampler: Any) -> Offers:
        state = bool(_method(sampler, "state_dict") and _method(sampler, "load_state_dict"))
        return cls(
            length=hasattr(type(sampler), "__len__"),
            set_epoch=bool(epoch_setter(sampler)),
            inner_set_epoch=bool(_method(getattr(sampler, "sampler", None), "set_epoch")),
            state=state,
            state_after_batches=state and "batches" in named_arguments(sampler.state_dict),
        )

    def missing(self) -> Iterator[str]:
        """What the sampler lacks, each with the rules that cannot be judged without it."""
        if not self.length:
            yield "no len(): rule 3 is not judged, and trainers cannot plan their steps"
        if not self.set_epoch:
            yield "no set_epoch, neither its own nor its sampler's: rule 6 is not judged, nor rule 5 between epochs"
        if not self.state:
            yield "no state_dict and load_state_dict: rules 7 and 9 are not judged, and no run resumes within an epoch"
        elif not self.state_after_batches:
            yield "no state_dict(batches=n), the state after n delivered batches: rule 8 is judged by pickling alone"


def epoch_setter(sampler: Any) -> Any:
    """The sampler's own ``set_epoch``, or that of the sampler inside it."""
    return _method(sampler, "set_epoch") or _method(getattr(sampler, "sampler", None), "set_epoch")


def _method(owner: Any, name: str) -> Any:
    method = getattr(owner, name, None)
    return method if callable(method) else None


def named_arguments(function: Callable[..., Any]) -> set[str]:
    """The arguments that can be given by name, as far as Python can tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
