"""All ranks in one process: what the samplers of one shape deal to the ranks of one world size, recorded.

A rule reads the record, and tries samplers that have been through more than one epoch from its start.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

from course_lib._words import counted, plural
from course_lib.conformance.tried import Batches, Breach, Refusal, TriedSampler, offered_by
from course_lib.conformance.violations import Counterexample, Shape, Violation, listed

MANY_STOPS = 8
"""A longer epoch is stopped at this many places, the first and the last ones among them."""


@dataclass
class Asked:
    """What was asked in one call, and what has been found so far."""

    factory: Callable[..., Any]
    seeds: bool
    """Whether the factory takes a keyword ``seed``."""
    epochs: range
    skipped: frozenset[int]
    """The rules that the caller leaves out."""
    worlds: list[World] = field(default_factory=list)
    """The smallest first."""
    broken: dict[int, Violation] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    """The details of each kind of note."""

    @property
    def unsound(self) -> set[int]:
        """The rules that are broken or left out, so that nothing can rest on them."""
        return {*self.broken, *self.skipped}

    def note(self, kind: str, detail: str) -> None:
        details = self.notes.setdefault(kind, [])
        if detail not in details:
            details.append(detail)


@dataclass(frozen=True)
class Deal:
    """What all ranks got in one epoch, or in the rest of one."""

    at: Counterexample
    ranks: list[Batches]
    """Empty if any rank refused the epoch, or went wrong."""
    refused: dict[int, str]
    """Why, by rank, if only some ranks refused: what all refuse is noted, and no more said of it."""
    fault: Breach | None

    @property
    def epoch(self) -> int:
        return self.at.epoch or 0

    def by_rank(self) -> Iterator[tuple[Counterexample, Batches]]:
        for rank, batches in enumerate(self.ranks):
            yield replace(self.at, rank=rank), batches

    def some_refuse(self) -> Breach | None:
        for rank, why in self.refused.items():
            return Breach(f"only some ranks refuse, rank {rank} with ValueError: {why}", replace(self.at, rank=rank))
        return None

    def uneven_counts(self) -> Breach | None:
        counts = [len(batches) for batches in self.ranks]
        if len(set(counts)) <= 1:
            return None
        told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        return Breach(f"the ranks have different numbers of batches ({told})", replace(self.at, step=min(counts)))

    def stops(self) -> Iterator[tuple[Counterexample, Batches]]:
        """Where to stop each rank, and the rest of its batches: everywhere, or at some places of a long epoch."""
        longest = max(map(len, self.ranks))
        stops: Iterable[int] = range(longest)
        if longest > MANY_STOPS:
            stops = sorted({*range(MANY_STOPS - 4), longest // 2, longest - 2, longest - 1})
        for stop in stops:
            for at, batches in self.by_rank():
                if stop < len(batches):
                    yield replace(at, stop=stop), batches[stop:]


class World:
    """The ranks of one shape on one world size."""

    def __init__(self, asked: Asked, shape: Shape, once: Iterable[int], num_replicas: int) -> None:
        self.asked, self.shape, self.num_replicas = asked, shape, num_replicas
        self.once = {index: place for place, index in enumerate(once)}
        self._deals: dict[tuple[int, int | None], Deal] = {}

    def at(self, **place: Any) -> Counterexample:
        return Counterexample(self.shape, self.num_replicas, **place)

    def on_all_world_sizes(self) -> list[World]:
        """The worlds of this shape, this one included."""
        return [world for world in self.asked.worlds if world.shape is self.shape]

    # The record

    def deal(self, epoch: int, seed: int | None = None) -> Deal:
        """What all ranks' new samplers yield in an epoch; another seed is another run, which seeds all generators."""
        if (epoch, seed) not in self._deals:
            deal = self._dealt(self.at(epoch=epoch), lambda at: self.fresh(at, seed=seed))
            if seed is not None and deal.fault:
                raise deal.fault  # no rule reads the faults of another run
            self._deals[epoch, seed] = deal
        return self._deals[epoch, seed]

    def deal_after_resume(self, at: Counterexample, state: bytes) -> Deal:
        """What is left of the epoch for all ranks, each of which gets the one state."""
        return self._dealt(at, lambda at: self.resumed(at, state))

    def _dealt(self, place: Counterexample, make: Callable[[Counterexample], TriedSampler]) -> Deal:
        ranks: list[Batches] = []
        refused = {}
        for rank in range(self.num_replicas):
            try:
                ranks.append(make(replace(place, rank=rank)).read())
            except Refusal as refusal:
                refused[rank] = str(refusal)
            except Breach as fault:
                return Deal(place, [], refused, fault)
        if ranks:
            return Deal(place, [] if refused else ranks, refused, None)
        kind = "refused to resume on another number of ranks" if place.resumed_on else "refused"
        where = place if place.resumed_on else self.at()
        self.asked.note(kind, f"{where}: {refused[0]}")
        return Deal(place, [], {}, None)

    @property
    def deals(self) -> list[Deal]:
        """Those of the epochs that were asked for and could be read on all ranks."""
        return [deal for deal in map(self.deal, self.asked.epochs) if deal.ranks]

    @cached_property
    def offers(self) -> set[str]:
        return offered_by(self.made(self.at()).sampler)

    @cached_property
    def secondary(self) -> frozenset[int]:
        """The indices beyond ``exactly_once`` that this world yields in any epoch."""
        batches = [batch for deal in self.deals for each in deal.ranks for batch in each]
        return frozenset(index for batch in batches for index in batch if index not in self.once)

    @cached_property
    def batch_limit(self) -> int | None:
        """How large a batch of one rank may be: ``batch_size`` of the shape, or else of the sampler itself."""
        size = self.shape.get("batch_size", getattr(self.made(self.at()).sampler, "batch_size", None))
        return int(size) if isinstance(size, numbers.Integral) else None

    @cached_property
    def unshuffled(self) -> bool:
        """Whether the shape's ``shuffle`` says so, or all epochs are equal and every rank goes through the given order.

        What comes more than once is left out: padding begins the order again.
        """
        if "shuffle" in self.shape:
            return not self.shape["shuffle"]
        epochs = [deal.ranks for deal in self.deals]
        if not epochs or any(ranks != epochs[0] for ranks in epochs):
            return False
        repeated = set(self.missing_and_repeated(epochs[0])[1])
        places = [[self.once[i] for i in self.primary(batches) if i not in repeated] for batches in epochs[0]]
        return any(places) and all(each == sorted(each) for each in places)

    def primary(self, batches: Iterable[list[int]]) -> list[int]:
        return [index for batch in batches for index in batch if index in self.once]

    def missing_and_repeated(self, ranks: Iterable[Batches]) -> tuple[list[int], list[int]]:
        """The primary indices that come never, and those that come more than once."""
        uses = Counter(index for batches in ranks for index in self.primary(batches))
        return [index for index in self.once if not uses[index]], [index for index in uses if uses[index] > 1]

    def not_exactly_once(self, ranks: list[Batches], at: Counterexample) -> Breach | None:
        missing, repeated = self.missing_and_repeated(ranks)
        if not missing and not repeated:
            return None
        wrong = (("missing", missing), ("repeated", repeated))
        said = [f"{listed(indices)} {plural(len(indices), 'is', 'are')} {what}" for what, indices in wrong if indices]
        text = f"{' and '.join(said)}; each of {counted(len(self.once), 'index', 'indices')} should come once"
        if missing and repeated and at.stop is None and len(ranks) > 1:
            text += ". Both at once: the ranks seem not to draw one order"
        return Breach(text, replace(at, indices=(*missing, *repeated)))

    # Samplers to try; a place without a rank is tried on rank 0

    def made(self, at: Counterexample, *, seed: int | None = None, run: int | None = None) -> TriedSampler:
        keywords = dict(self.shape)
        if seed is not None:
            keywords["seed"] = seed
        make = partial(self.asked.factory, self.num_replicas, at.rank or 0, **keywords)
        return TriedSampler(make, at, len(self.once), run or seed or 0)

    def fresh(self, at: Counterexample, *, seed: int | None = None, run: int | None = None) -> TriedSampler:
        """A new sampler, at the start of the place's epoch; ``run`` is the seed of the global generators."""
        return self.made(at, seed=seed, run=run).turned(at.epoch)

    def used(self, at: Counterexample) -> TriedSampler:
        """A sampler that has been through all epochs before the place's."""
        sampler = self.made(at)
        for epoch in range(at.epoch or 0):
            sampler.turned(epoch).read()
        return sampler.turned(at.epoch)

    def state(self, at: Counterexample) -> bytes:
        """The state at the place's stop."""
        return self.fresh(at).had(at.stop).state()

    def resumed(self, at: Counterexample, state: bytes) -> TriedSampler:
        return self.made(at).loaded(state, at.epoch)

    def read_again(self, at: Counterexample) -> Iterator[tuple[str, Batches]]:
        """The epoch again from one sampler: a second time, by two iterators in turn, and after other epochs."""
        sampler = self.fresh(at)
        sampler.read()
        yield "iterated a second time", sampler.read()
        sampler = self.fresh(at)
        both = list(zip_longest(sampler.batches(), sampler.batches()))
        for text, number in (("the first", 0), ("the second", 1)):
            yield f"of two iterators in turn, {text}", [pair[number] for pair in both if pair[number] is not None]
        if at.epoch:
            yield "after the epochs before", self.used(at).read()
