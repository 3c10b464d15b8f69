"""What a sampler has beyond ``__iter__``, and which rules cannot be judged without it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Offers:
    """What a sampler has beyond ``__iter__``."""

    length: bool
    set_epoch: bool
    inner_set_epoch: bool
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
        if not self.length:
            yield "no len(): rule 3 is not judged, and trainers cannot plan their steps"
        if not self.set_epoch:
            yield "no set_epoch, neither its own nor its sampler's: rule 6 is not judged, nor rule 5 between epochs"
        if not self.state:
            yield "no state_dict and load_state_dict: rules 7 and 9 are not judged, and no run resumes within an epoch"
        elif not self.state_after_batches:
            yield "no state_dict(batches=n), the state after n delivered batches: rule 8 is judged by pickling alone"


def _method(owner: Any, name: str) -> Any:
    method = getattr(owner, name, None)
    return method if callable(method) else None


def epoch_setter(sampler: Any) -> Any:
    """The sampler's own ``set_epoch``, or that of the sampler inside it."""
    return _method(sampler, "set_epoch") or _method(getattr(sampler, "sampler", None), "set_epoch")


def named_arguments(function: Callable[..., Any]) -> set[str]:
    """The arguments that can be given by name, as far as Python can tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
