"""All ranks in one process: the samplers of one shape on one world size, made, read, stopped and resumed."""

from __future__ import annotations

import numbers
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch

from course_lib.conformance.calls import (
    Offers,
    SamplerFault,
    SamplerRefusal,
    as_indices,
    call,
    describe_error,
    epoch_setter,
    fault_or_refusal,
    pickled,
    told_length,
)
from course_lib.conformance.violations import Counterexample, Shape, Violation

Batches = list[list[int]]
"""What one rank yields."""
MANY_ORDERS = 10
"""So many indices (or batches, where whole batches are shuffled) have 3,628,800 orders: equal ones are no chance."""
MANY_EPOCHS = 20
"""A sampler of few indices repeats an order if so many epochs are equal."""
MANY_STOPS = 8
"""A longer epoch is stopped at this many places, the first and the last ones among them."""


@dataclass
class Examination:
    """What was asked in one call, and what has been found so far."""

    factory: Callable[..., Any]
    by_name: bool
    """Whether the factory takes ``num_replicas`` and ``rank`` as keywords; if not, they come first."""
    seeds: bool
    """Whether the factory takes a keyword ``seed``."""
    epochs: range
    skipped: frozenset[int] = frozenset()
    """The rules that the caller leaves out, by number."""
    worlds: list[SimulatedWorld] = field(default_factory=list)
    """The smallest first."""
    broken: dict[int, Violation] = field(default_factory=dict)
    """The rules that are broken, by number."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """The details of each kind of note."""

    def not_held(self, *rules: int) -> list[int]:
        """Those of the rules that are broken or left out, so that nothing can rest on them."""
        return [rule for rule in rules if rule in self.broken or rule in self.skipped]

    def note(self, kind: str, detail: str) -> None:
        details = self.notes.setdefault(kind, [])
        if detail not in details:
            details.append(detail)


@dataclass
class EpochRecord:
    """What the ranks did in one epoch: ``ranks`` is empty if they refused it, or if one went wrong."""

    ranks: list[Batches] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    fault: str = ""
    faulty_rank: int | None = None


class SimulatedWorld:
    """The ranks of one shape on one world size: makes their samplers, reads them, and remembers what they yield."""

    def __init__(self, examination: Examination, shape: Shape, once: Iterable[int], num_replicas: int) -> None:
        self.examination, self.shape, self.num_replicas = examination, shape, num_replicas
        self.once = {index: place for place, index in enumerate(once)}
        self.here = Counterexample(shape, num_replicas)
        self._records: dict[int, EpochRecord] = {}

    def at(self, **place: Any) -> Counterexample:
        """Where the rule is now; an unexpected fault is reported here."""
        self.here = Counterexample(self.shape, self.num_replicas, **place)
        return self.here

    def on_all_world_sizes(self) -> list[SimulatedWorld]:
        """The worlds of this shape, this one included."""
        return [world for world in self.examination.worlds if world.shape is self.shape]

    # Samplers

    def make(self, rank: int, epoch: int | None = None, *, salt: int = 0, seed: int | None = None) -> Any:
        """A rank's new sampler, turned to an epoch."""
        seed_globals(salt, -1)
        keywords = dict(self.shape)
        if seed is not None:
            keywords["seed"] = seed
        if self.examination.by_name:
            keywords.update(num_replicas=self.num_replicas, rank=rank)
            sampler = call("making the sampler", self.examination.factory, **keywords)
        else:
            sampler = call("making the sampler", self.examination.factory, self.num_replicas, rank, **keywords)
        if sampler is None:
            raise SamplerFault("the factory returned None, no sampler: does it end with a return?")
        if epoch is not None:
            self.turn(sampler, epoch)
        return sampler

    def turn(self, sampler: Any, epoch: int) -> None:
        set_epoch = epoch_setter(sampler)
        if set_epoch:
            call(f"set_epoch({epoch})", set_epoch, epoch)

    def iterate(self, sampler: Any, epoch: int, salt: int = 0) -> Iterator[list[int]]:
        """The sampler's batches, checked; an exception or an endless epoch becomes a fault."""
        seed_globals(salt, epoch)
        most = max(10 * len(self.once) + 100, told_length(sampler))
        number = 0
        held: list[tuple[Any, list[int]]] = []
        try:
            for batch in sampler:
                if number == most:
                    raise SamplerFault(
                        f"the epoch has no end: more than {most:,} batches for {len(self.once):,} indices"
                    )
                indices = as_indices(batch, number)
                if not isinstance(batch, Iterator):
                    held.append((batch, indices))
                yield indices
                number += 1
            for of, (batch, indices) in enumerate(held):
                if as_indices(batch, of) != indices:
                    raise SamplerFault(
                        f"batch {of} is written over by a later one: workers are handed batches ahead, and would train "
                        "on other samples; each batch needs a list of its own"
                    )
        except SamplerFault:
            raise
        except Exception as error:
            if number == 0:
                raise fault_or_refusal("iterating raised", error) from error
            raise SamplerFault(describe_error(f"batch {number} raised", error)) from error

    def read(self, sampler: Any, epoch: int, salt: int = 0) -> Batches:
        return list(self.iterate(sampler, epoch, salt))

    def read_all(self, epoch: int, seed: int) -> list[Batches]:
        """What all ranks yield in a run with another seed, which seeds the global generators too."""
        samplers = (self.make(rank, epoch, salt=seed, seed=seed) for rank in range(self.num_replicas))
        return [self.read(sampler, epoch, salt=seed) for sampler in samplers]

    def read_more_than_once(self, rank: int, epoch: int) -> Iterator[tuple[str, Batches]]:
        """The epoch again from one sampler: a second time, by two iterators in turn, and after other epochs."""
        sampler = self.make(rank, epoch)
        self.read(sampler, epoch)
        yield "iterated a second time", self.read(sampler, epoch)
        sampler = self.make(rank, epoch)
        both = list(zip_longest(self.iterate(sampler, epoch), self.iterate(sampler, epoch)))
        for text, number in (("the first", 0), ("the second", 1)):
            yield f"of two iterators in turn, {text}", [pair[number] for pair in both if pair[number] is not None]
        if epoch > 0:
            yield "after the epochs before", self.read(self.used_before(rank, epoch), epoch)

    def used_before(self, rank: int, epoch: int) -> Any:
        """A sampler that has been through all epochs up to this one."""
        sampler = self.make(rank, 0)
        for before in range(epoch):
            self.turn(sampler, before)
            self.read(sampler, before)
        self.turn(sampler, epoch)
        return sampler

    def length(self, sampler: Any) -> int:
        return operator.index(call("len()", len, sampler))

    # States

    def state(self, rank: int, epoch: int, stop: int) -> Any:
        return self.state_of(self.make(rank, epoch), epoch, stop)

    def state_of(self, sampler: Any, epoch: int, stop: int, **batches: int) -> Any:
        """The state after some batches, as a checkpoint keeps it."""
        if stop == 0:
            call("iter()", iter, sampler)  # a loader that has begun the epoch, and has had nothing of it
        for _ in islice(self.iterate(sampler, epoch), stop):
            pass
        return pickled(call("state_dict", sampler.state_dict, **batches))

    def resumed(self, rank: int, state: Any) -> Any:
        """A new sampler with the state, which alone tells it the epoch."""
        sampler = self.make(rank)
        call("load_state_dict", sampler.load_state_dict, state)
        return sampler

    def read_resumed(self, rank: int, state: Any, epoch: int) -> Batches:
        return self.read(self.resumed(rank, state), epoch)

    def stops(self, ranks: list[Batches]) -> list[tuple[int, int]]:
        """Where to stop, as (batches had, rank): everywhere before the end, or at some places of a long epoch."""
        if not self.offers.state:
            return []
        longest = max(map(len, ranks))
        stops: Sequence[int] = range(longest)
        if longest > MANY_STOPS:
            stops = sorted({*range(MANY_STOPS - 4), longest // 2, longest - 2, longest - 1})
        return [(stop, rank) for stop in stops for rank, batches in enumerate(ranks) if stop < len(batches)]

    # What all ranks yield

    def record(self, epoch: int) -> EpochRecord:
        """What all ranks' new samplers yield in an epoch: it is read once, and compared with from then on."""
        if epoch not in self._records:
            self._records[epoch] = self._read_record(epoch)
        return self._records[epoch]

    def _read_record(self, epoch: int) -> EpochRecord:
        record = EpochRecord()
        ranks = []
        for rank in range(self.num_replicas):
            try:
                ranks.append(self.read(self.make(rank, epoch), epoch))
            except SamplerRefusal as refusal:
                record.refused[rank] = str(refusal)
            except SamplerFault as fault:
                record.fault, record.faulty_rank = str(fault), rank
                break
        if len(ranks) == self.num_replicas:
            record.ranks = ranks
        elif len(record.refused) == self.num_replicas:
            self.examination.note("refused", f"{Counterexample(self.shape, self.num_replicas)}: {record.refused[0]}")
        return record

    def recorded(self) -> list[tuple[int, list[Batches]]]:
        """The epochs that could be read on all ranks."""
        records = ((epoch, self.record(epoch).ranks) for epoch in self.examination.epochs)
        return [(epoch, ranks) for epoch, ranks in records if ranks]

    @cached_property
    def offers(self) -> Offers:
        return Offers.of(self.make(0))

    @cached_property
    def secondary(self) -> frozenset[int]:
        """The indices beyond ``exactly_once`` that this world yields in any epoch."""
        batches = [batch for _, ranks in self.recorded() for each in ranks for batch in each]
        return frozenset(index for batch in batches for index in batch if index not in self.once)

    @cached_property
    def batch_limit(self) -> int | None:
        """How large a batch of one rank may be: ``batch_size`` of the shape, or else of the sampler itself."""
        size = self.shape.get("batch_size", getattr(self.make(0), "batch_size", None))
        return int(size) if isinstance(size, numbers.Integral) else None

    def counted_in_size(self, batch: list[int]) -> int:
        """How many of a batch's indices its size speaks of: beside a second stream, only the primary ones for sure."""
        return len(self.primary([batch])) if self.secondary else len(batch)

    @property
    def has_batches(self) -> bool:
        return any(batches for _, ranks in self.recorded() for batches in ranks)

    @cached_property
    def unshuffled(self) -> bool:
        """Whether the shape's ``shuffle`` says so, or all epochs are equal and every rank goes through the given order.

        What comes more than once is left out: padding begins the order again.
        """
        if "shuffle" in self.shape:
            return not self.shape["shuffle"]
        recorded = [ranks for _, ranks in self.recorded()]
        if not recorded or not all_equal(recorded):
            return False
        repeated = set(self.missing_and_repeated(recorded[0])[1])
        places = [[self.once[i] for i in self.primary(batches) if i not in repeated] for batches in recorded[0]]
        return any(places) and all(each == sorted(each) for each in places)

    @cached_property
    def repeats_one_order(self) -> bool:
        """Whether many epochs are equal: a small sampler may repeat an order by chance, but not so often."""
        recorded = [ranks for _, ranks in self.recorded()]
        return all_equal(recorded) and all_equal(self.record(epoch).ranks for epoch in range(MANY_EPOCHS))

    @property
    def has_orders(self) -> bool:
        """Whether there is something to shuffle, and the sampler does shuffle."""
        recorded = [ranks for _, ranks in self.recorded()]
        if not recorded or len(self.once) == 1 or self.unshuffled:
            return False
        return all(max(map(len, ranks)) > 1 for ranks in recorded)

    def has_many_orders(self, epochs: list[list[Batches]]) -> bool:
        """Whether so much is shuffled that two epochs with the same order are no chance."""
        contents = [sorted(sorted(batch) for batches in ranks for batch in batches) for ranks in epochs]
        if all_equal(contents):  # whole batches are shuffled
            return len(contents[0]) >= MANY_ORDERS
        return len(self.once) >= MANY_ORDERS

    def primary(self, batches: Batches) -> list[int]:
        return [index for batch in batches for index in batch if index in self.once]

    def missing_and_repeated(self, ranks: list[Batches]) -> tuple[list[int], list[int]]:
        uses = Counter(index for batches in ranks for index in self.primary(batches))
        missing = [index for index in self.once if index not in uses]
        return missing, [index for index, count in uses.items() if count > 1]


def all_equal(items: Iterable[Any]) -> bool:
    iterator = iter(items)
    first = next(iterator, None)
    return all(item == first for item in iterator)


def seed_globals(salt: int, epoch: int) -> None:
    """Put the global generators where they would be on every rank of a seeded run; another ``salt`` is another run."""
    seed = 100_003 * salt + epoch + 1
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
