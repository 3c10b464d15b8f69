"""Where a rule is broken, and the comparisons that several rules make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from course_lib._words import counted, plural
from course_lib.conformance.simulated_world import Batches, SimulatedWorld
from course_lib.conformance.violations import Counterexample, listed, shortened


@dataclass(frozen=True)
class Breach:
    """Where a rule is broken."""

    text: str
    at: Counterexample
    means: str = ""
    """For a training run; by default what the rule says."""


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


def uneven_counts(ranks: list[Batches], at: Counterexample) -> Breach | None:
    counts = [len(batches) for batches in ranks]
    if len(set(counts)) <= 1:
        return None
    told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    return Breach(f"the ranks have different numbers of batches ({told})", replace(at, step=min(counts)))


def not_exactly_once(world: SimulatedWorld, ranks: list[Batches], at: Counterexample) -> Breach | None:
    missing, repeated = world.missing_and_repeated(ranks)
    said, means = [], []
    if missing:
        said.append(f"{listed(missing)} {plural(len(missing), 'is', 'are')} missing")
        means.append("no rank trains on what is missing")
    if repeated:
        where = ""
        if at.stop is None:
            places = [
                f"rank {rank} in step {step}"
                for rank, batches in enumerate(ranks)
                for step, batch in enumerate(batches)
                for index in batch
                if index == repeated[0]
            ]
            where = f" ({repeated[0]} on {' and on '.join(places[:3])})"
        said.append(f"{listed(repeated)} {plural(len(repeated), 'is', 'are')} repeated{where}")
        means.append("what is repeated weighs more than the rest")
    if not said:
        return None
    text = f"{' and '.join(said)}; each of {counted(len(world.once), 'index', 'indices')} should come once"
    if missing and repeated and at.stop is None and len(ranks) > 1:
        text += ". Both at once: the ranks seem not to draw one order"
    return Breach(text, replace(at, indices=(*missing, *repeated)), f"{' and '.join(means)}, and no error says so")
