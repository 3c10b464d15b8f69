"""One rank's sampler, as the kit uses it: whatever it raises or yields becomes batches, or a :class:`Breach`."""

from __future__ import annotations

import inspect
import operator
import pickle
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from itertools import count, islice, zip_longest
from typing import Any

from course_lib._generators import seed_generators
from course_lib.conformance.violations import Counterexample, shortened

Batches = list[list[int]]
"""What one rank yields."""
END = object()


class Breach(Exception):
    """What breaks a rule, and where: a check that does not hold, or what the sampler itself raised or yielded."""

    def __init__(self, text: str, at: Counterexample) -> None:
        super().__init__(text)
        self.at = at


class Refusal(Breach):
    """A ValueError before the first batch."""


Checks = Iterator[Breach | None]
"""The single checks of a rule: None for one that holds, a breach for one that does not.

After a breach the rule is not asked again.
"""


def difference(at: Counterexample, got: Batches, expected: Batches, text: str) -> Breach | None:
    for step, (batch, other) in enumerate(zip_longest(got, expected)):
        if batch != other:
            is_ = "the end" if batch is None else shortened(batch)
            should_be = "the end" if other is None else shortened(other)
            place = replace(at, step=step, indices=tuple(batch or other or ()))
            return Breach(f"{text}: batch {step} is {is_}, it should be {should_be}", place)
    return None


def sizes_of(batches: Batches) -> list[int]:
    return [len(batch) for batch in batches]


class TriedSampler:
    """A rank's sampler, made for a place, which its breaches name."""

    def __init__(self, make: Callable[[], Any], at: Counterexample, num_indices: int, run: int = 0) -> None:
        self.at, self.num_indices, self.run = at, num_indices, run
        self.epoch = -1
        """Where the run is that seeds the global generators, as far as this sampler was told."""
        self.begun = False
        """Whether it has yielded a batch: from then on a ValueError refuses nothing."""
        seed_generators(run, 0)
        self.sampler = self.call("making the sampler", make)

    def call(self, what: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """The function's result; what it raises becomes a breach."""
        try:
            return function(*args, **keywords)
        except Exception as error:
            kind = Refusal if isinstance(error, ValueError) and not self.begun else Breach
            raise kind(f"{what} raised {type(error).__name__}: {error}".rstrip(": ."), self.at) from error

    def turned(self, epoch: int | None, *, by: Callable[[Any], Any] | None = None) -> TriedSampler:
        """Itself, after ``set_epoch``, if it has one and there is an epoch."""
        if epoch is not None:
            set_epoch = (by or epoch_setter)(self.sampler)
            if set_epoch:
                self.call(f"set_epoch({epoch})", set_epoch, epoch)
            self.epoch = epoch
        return self

    def read(self) -> Batches:
        return list(self.batches())

    def batches(self) -> Iterator[list[int]]:
        """The batches of an epoch, or of its rest."""
        seed_generators(self.run, self.epoch + 1)  # as on every rank of a seeded run
        most = 10 * self.num_indices + 100
        iterator = self.call("iterating", iter, self.sampler)
        held: list[tuple[Any, list[int]]] = []
        for number in count():
            batch = self.call(f"batch {number}" if number else "iterating", next, iterator, END)
            if batch is END:
                break
            if number == most:
                told = f"more than {most:,} batches for {self.num_indices:,} indices"
                raise Breach(f"the epoch has no end: {told}", self.at)
            self.begun = True
            indices = self.indices_of(batch, number)
            if not isinstance(batch, Iterator):
                held.append((batch, indices))
            yield indices
        for number, (batch, indices) in enumerate(held):
            if self.indices_of(batch, number) != indices:
                text = "workers are handed batches ahead, and would train on other samples; yield a new list each time"
                raise Breach(f"batch {number} is written over by a later one: {text}", self.at)

    def indices_of(self, batch: Any, number: int) -> list[int]:
        try:
            items = iter(batch)
        except TypeError:
            text = f"batch {number} is {batch!r}, no list: is this a sampler, and no batch sampler?"
            raise Breach(text, self.at) from None
        indices = []
        for item in self.call(f"batch {number}", list, items):
            try:
                indices.append(operator.index(item))
            except TypeError:
                raise Breach(f"batch {number} holds {item!r}, which is no integer", self.at) from None
        if not indices:
            raise Breach(f"batch {number} is empty", self.at)
        return indices

    def had(self, batches: int | None) -> TriedSampler:
        """Itself, after so many batches of an epoch."""
        if not batches:
            self.call("iter()", iter, self.sampler)  # a loader that has begun the epoch, and has had nothing of it
        for _ in islice(self.batches(), batches or 0):
            pass
        return self

    def length(self) -> int:
        return int(self.call("len()", len, self.sampler))

    def state(self, **batches: int) -> bytes:
        """The state, as a checkpoint keeps it."""
        return self.pickled(self.call("state_dict", self.sampler.state_dict, **batches))

    def loaded(self, state: bytes, epoch: int | None) -> TriedSampler:
        """Itself with a state, which alone tells it the epoch."""
        self.call("load_state_dict", self.sampler.load_state_dict, pickle.loads(state))
        self.epoch = -1 if epoch is None else epoch
        return self

    def copied(self) -> TriedSampler:
        """A copy, as another process gets it."""
        other = copy(self)
        other.sampler = pickle.loads(self.pickled(self.sampler))
        return other

    def pickled(self, value: Any) -> bytes:
        what = f"pickling the {type(value).__name__}"
        data: bytes = self.call(what, pickle.dumps, value)
        self.call(what, pickle.loads, data)
        return data


def offered_by(sampler: Any) -> set[str]:
    """What a sampler has beyond ``__iter__``."""
    offered = {"length"} if hasattr(type(sampler), "__len__") else set()
    if epoch_setter(sampler):
        offered.add("set_epoch")
    if _method(sampler, "state_dict") and _method(sampler, "load_state_dict"):
        offered.add("state")
        if "batches" in named_arguments(sampler.state_dict):
            offered.add("state after batches")
    return offered


NOT_OFFERED = {
    "length": "no len(): rule 3 is not judged, and trainers cannot plan their steps",
    "set_epoch": "no set_epoch, neither its own nor its sampler's: rule 6 is not judged, nor rule 5 between epochs",
    "state": "no state_dict and load_state_dict: rules 7 and 9 are not judged, and no run resumes within an epoch",
    "state after batches": "no state_dict(batches=n), the state after n delivered batches: rule 8 is judged by "
    "pickling alone",
}
"""What it means that a sampler lacks it."""


def epoch_setter(sampler: Any) -> Any:
    """The sampler's own ``set_epoch``, or that of the sampler inside it."""
    return _method(sampler, "set_epoch") or inner_epoch_setter(sampler)


def inner_epoch_setter(sampler: Any) -> Any:
    return _method(getattr(sampler, "sampler", None), "set_epoch")


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
