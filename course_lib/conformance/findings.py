"""What a rule yields: a finding where it is broken; and the comparisons that several rules make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from course_lib.conformance.report import Counterexample
from course_lib.conformance.trial import Batches, Trial
from course_lib.conformance.wording import counted, is_or_are, listed, short


@dataclass(frozen=True)
class Finding:
    text: str
    at: Counterexample
    means: str = ""
    """For a training run; default: what the rule says."""


Checks = Iterator[Finding | None]
"""A rule: the single checks of one trial, smallest first; None for one that holds, a finding for one that does not.

After a finding it is not asked again.
"""


def difference(at: Counterexample, got: Batches, expected: Batches, text: str) -> Finding | None:
    for step, (one, other) in enumerate(zip_longest(got, expected)):
        if one != other:
            is_, was = ("the end" if batch is None else short(batch) for batch in (one, other))
            place = replace(at, step=step, indices=tuple(one or other or ()))
            return Finding(f"{text}: batch {step} is {is_}, it should be {was}", place)
    return None


def uneven_counts(counts: list[int], at: Counterexample) -> Finding | None:
    if len(set(counts)) == 1:
        return None
    told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    return Finding(f"the ranks have different numbers of batches ({told})", replace(at, step=min(counts)))


def uncovered(trial: Trial, ranks: list[Batches], at: Counterexample) -> Finding | None:
    missing, repeated = trial.uncovered(ranks)
    said, means = [], []
    if missing:
        said.append(f"{listed(missing)} {is_or_are(missing)} missing")
        means.append("no rank trains on what is missing")
    if repeated:
        places = [
            f"rank {rank} in step {step}"
            for rank, batches in enumerate(ranks)
            for step, batch in enumerate(batches)
            for index in batch
            if index == repeated[0]
        ]
        where = f" ({repeated[0]} on {' and on '.join(places[:3])})" if at.stop is None else ""
        said.append(f"{listed(repeated)} {is_or_are(repeated)} repeated{where}")
        means.append("what is repeated weighs more than the rest")
    if not said:
        return None
    text = f"{' and '.join(said)}; each of {counted(len(trial.once), 'index', 'indices')} should come once"
    if missing and repeated and at.stop is None and len(ranks) > 1:
        text += ". Both at once: the ranks seem not to draw one order"
    return Finding(text, replace(at, indices=(*missing, *repeated)), f"{' and '.join(means)}, and no error says so")
