"""All ranks in one process: one shape on one world size, made, read, stopped and resumed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

from course_lib.conformance.generators import seed_globals
from course_lib.conformance.guarding import Fault, Refusal, as_indices, call, describe_error, pickled
from course_lib.conformance.offers import Offers, epoch_setter
from course_lib.conformance.report import Counterexample, Shape

if TYPE_CHECKING:
    from course_lib.conformance.lab import Lab

Batches = list[list[int]]
"""What one rank yields."""
MANY_ORDERS = 10
"""So many indices (or batches, where whole batches are shuffled) have 3,628,800 orders: two alike are no chance."""
MANY_STOPS = 8
"""An epoch of more batches is stopped at so many places, the first and the last ones among them."""


@dataclass
class Record:
    """What the ranks did in one epoch: ``ranks`` is empty if they refused it, or one went wrong."""

    ranks: list[Batches] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    fault: str = ""
    faulty_rank: int | None = None


class Trial:
    """One shape on one world size: makes samplers, reads them, and remembers what new ones yield."""

    def __init__(self, lab: Lab, shape: Shape, once: Collection[int], num_replicas: int) -> None:
        self.lab, self.shape, self.num_replicas = lab, shape, num_replicas
        ordered = once if isinstance(once, Sequence) else sorted(once)
        self.once = {operator.index(index): place for place, index in enumerate(ordered)}
        if not self.once:
            raise ValueError(f"exactly_once must name at least one index, got {once!r} for the shape {dict(shape)}")
        self.here = Counterexample(shape, num_replicas)
        self._records: dict[int, Record] = {}

    def at(self, **place: Any) -> Counterexample:
        """Where the rule is now; a fault that comes unexpected is reported here."""
        self.here = Counterexample(self.shape, self.num_replicas, **place)
        return self.here

    def make(self, rank: int, epoch: int | None = None, *, salt: int = 0, seed: int | None = None) -> Any:
        """A rank's new sampler, turned to an epoch."""
        seed_globals(salt, -1)
        keywords = dict(self.shape) if seed is None else {**self.shape, "seed": seed}
        place = {"num_replicas": self.num_replicas, "rank": rank}
        if self.lab.by_name:
            sampler = call("making the sampler", self.lab.factory, **place, **keywords)
        else:
            sampler = call("making the sampler", self.lab.factory, *place.values(), **keywords)
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
        most = 10 * len(self.once) + 100
        number = 0
        try:
            for number, batch in enumerate(sampler):
                if number == most:
                    raise Fault(f"the epoch has no end: more than {most:,} batches for {len(self.once):,} indices")
                yield as_indices(batch, number)
                number += 1
        except Fault:
            raise
        except Exception as error:
            when = f"batch {number} raised" if number else "iterating raised"
            kind = Refusal if isinstance(error, ValueError) and not number else Fault
            raise kind(describe_error(when, error)) from error

    def read(self, sampler: Any, epoch: int, salt: int = 0) -> Batches:
        return list(self.iterate(sampler, epoch, salt))

    def read_all(self, epoch: int, seed: int) -> list[Batches]:
        """What all ranks yield in a run with another seed, its global generators' included."""
        samplers = (self.make(rank, epoch, salt=seed, seed=seed) for rank in range(self.num_replicas))
        return [self.read(sampler, epoch, salt=seed) for sampler in samplers]

    def record(self, epoch: int) -> Record:
        """What all ranks' new samplers yield in an epoch: read once, and compared with ever after."""
        if epoch not in self._records:
            record = self._records[epoch] = Record()
            ranks = []
            for rank in range(self.num_replicas):
                try:
                    ranks.append(self.read(self.make(rank, epoch), epoch))
                except Refusal as refusal:
                    record.refused[rank] = str(refusal)
                except Fault as fault:
                    record.fault, record.faulty_rank = str(fault), rank
                    break
            if len(ranks) == self.num_replicas:
                record.ranks = ranks
            elif len(record.refused) == self.num_replicas:
                self.lab.note("refused", f"{Counterexample(self.shape, self.num_replicas)}: {record.refused[0]}")
        return self._records[epoch]

    def recorded(self) -> list[tuple[int, list[Batches]]]:
        """The epochs that could be read on all ranks."""
        records = ((epoch, self.record(epoch).ranks) for epoch in self.lab.epochs)
        return [(epoch, ranks) for epoch, ranks in records if ranks]

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

    def state(self, rank: int, epoch: int, stop: int) -> Any:
        return self.state_of(self.make(rank, epoch), epoch, stop)

    def state_of(self, sampler: Any, epoch: int, stop: int, **batches: int) -> Any:
        """The state after some batches, as a checkpoint keeps it."""
        iterator = self.iterate(sampler, epoch)
        for _ in islice(iterator, stop):
            pass
        return pickled(call("state_dict", sampler.state_dict, **batches))

    def resumed(self, rank: int, state: Any) -> Any:
        """A new sampler with the state, which alone tells it the epoch."""
        sampler = self.make(rank)
        call("load_state_dict", sampler.load_state_dict, state)
        return sampler

    def stops(self, ranks: list[Batches]) -> list[tuple[int, int]]:
        """Where to stop, as (batches had, rank): everywhere before the end, or at some places of a long epoch."""
        if not self.offers.state:
            return []
        longest = max(map(len, ranks))
        stops: Sequence[int] = range(longest)
        if longest > MANY_STOPS:
            stops = sorted({*range(MANY_STOPS - 4), longest // 2, longest - 2, longest - 1})
        return [(stop, rank) for stop in stops for rank, batches in enumerate(ranks) if stop < len(batches)]

    def primary(self, batches: Batches) -> list[int]:
        return [index for batch in batches for index in batch if index in self.once]

    def uncovered(self, ranks: list[Batches]) -> tuple[list[int], list[int]]:
        """The indices that are missing, and those that come more than once."""
        uses = Counter(index for batches in ranks for index in self.primary(batches))
        missing = [index for index in self.once if index not in uses]
        return missing, [index for index, count in uses.items() if count > 1]

    def steps_of(self, ranks: list[Batches]) -> dict[int, int]:
        """For each index, the first step in which it comes."""
        steps: dict[int, int] = {}
        for step, batches in enumerate(zip_longest(*ranks, fillvalue=[])):
            for index in self.primary(list(batches)):
                steps.setdefault(index, step)
        return steps

    def has_many_orders(self, epochs: list[list[Batches]]) -> bool:
        """Whether so much is shuffled that two epochs with one order are no chance."""
        contents = [sorted(sorted(batch) for batches in ranks for batch in batches) for ranks in epochs]
        return (len(contents[0]) if all_alike(contents) else len(self.once)) >= MANY_ORDERS

    @cached_property
    def secondary(self) -> frozenset[int]:
        """The indices beyond ``exactly_once`` that this trial yields in any epoch."""
        batches = [batch for _, ranks in self.recorded() for each in ranks for batch in each]
        return frozenset(index for batch in batches for index in batch if index not in self.once)

    @property
    def has_orders(self) -> bool:
        """Whether there is something to shuffle, and the sampler does."""
        recorded = [ranks for _, ranks in self.recorded()]
        several = len(self.once) > 1 and all(sum(map(len, ranks)) > 1 for ranks in recorded)
        return bool(recorded) and several and not self.unshuffled

    @cached_property
    def unshuffled(self) -> bool:
        """Whether the shape says so, or all epochs are alike and every rank goes through the given order."""
        recorded = [ranks for _, ranks in self.recorded()]
        alike = bool(recorded) and all_alike(recorded)
        places = [[self.once[i] for i in self.primary(batches)] for batches in recorded[0]] if alike else []
        plain = any(places) and all(each == sorted(each) for each in places)
        return self.shape.get("shuffle") is False or plain

    @cached_property
    def offers(self) -> Offers:
        return Offers.of(self.make(0))


def all_alike(items: Iterable[Any]) -> bool:
    iterator = iter(items)
    first = next(iterator, None)
    return all(item == first for item in iterator)
