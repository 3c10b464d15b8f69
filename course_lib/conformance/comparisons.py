"""The comparisons that several rules make: each returns the breach that it finds, or None."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest

from course_lib._words import counted, plural
from course_lib.conformance.tried import Batches, Breach
from course_lib.conformance.violations import Counterexample, listed, shortened
from course_lib.conformance.world import Deal, missing_and_repeated

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


def some_refuse(deal: Deal) -> Breach | None:
    for rank, why in deal.refused.items():
        return Breach(f"only some ranks refuse, rank {rank} with ValueError: {why}", replace(deal.at, rank=rank))
    return None


def uneven_counts(deal: Deal) -> Breach | None:
    counts = [len(batches) for batches in deal.ranks]
    if len(set(counts)) <= 1:
        return None
    told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    return Breach(f"the ranks have different numbers of batches ({told})", replace(deal.at, step=min(counts)))


def not_exactly_once(once: Mapping[int, int], ranks: list[Batches], at: Counterexample) -> Breach | None:
    missing, repeated = missing_and_repeated(once, ranks)
    if not missing and not repeated:
        return None
    wrong = (("missing", missing), ("repeated", repeated))
    said = [f"{listed(indices)} {plural(len(indices), 'is', 'are')} {what}" for what, indices in wrong if indices]
    text = f"{' and '.join(said)}; each of {counted(len(once), 'index', 'indices')} should come once"
    if missing and repeated and at.stop is None and len(ranks) > 1:
        text += ". Both at once: the ranks seem not to draw one order"
    return Breach(text, replace(at, indices=(*missing, *repeated)))
