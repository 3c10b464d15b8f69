"""What the kit says: the rules, the violations with their smallest counterexamples, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib._words import counted, first_of, plural

Shape = Mapping[str, Any]

RULES: dict[int, tuple[str, str]] = {
    1: ("exactly once", "some samples are trained on too often or never, and no error says so"),
    2: ("equal counts", "the ranks average steps of different epochs, silently, and the run hangs at its end"),
    3: ("true length", "trainers plan steps, schedules and the end of an epoch by len(): they stop early or wait"),
    4: ("one order", "the order cannot be repeated: not by a second run, not after a resume, not by another rank"),
    5: ("new orders", "runs or epochs that seem to be independent see the samples in the same order"),
    6: ("set_epoch arrives", "every epoch repeats the order of the first, and nothing says so"),
    7: ("resume", "after a resume the run trains again on what it has seen, or never on what it has missed"),
    8: ("other workers", "workers fetch ahead of the training: what they had fetched is lost by a resume"),
    9: ("other world size", "a run that goes on with more or fewer ranks loses samples or sees them twice"),
    10: ("sound batches", "some samples weigh more than others, or a batch takes more memory than its size says"),
    11: ("picklable, re-iterable", "a second epoch, a second loader or a spawned process gets nothing, or an error"),
}
"""Number: short name, and what a violation means for a training run."""


@dataclass(frozen=True)
class ConformanceReport:
    """What ``check_batch_sampler`` found."""

    violations: tuple[Violation, ...]
    """At most one for each rule, with its smallest counterexample."""
    not_offered: tuple[str, ...]
    """What the sampler does not have, and which rules could not be judged because of that."""
    notes: tuple[str, ...]
    """What is no violation and still worth knowing: what was refused, left unjudged, or warned of."""
    checks: dict[int, int]
    """How many single checks each rule passed; 0: it was not judged."""
    skipped: tuple[int, ...] = ()
    """The rules that ``skip_rules`` left out."""

    @property
    def ok(self) -> bool:
        """Whether no rule is violated; a rule that was not judged counts as not violated."""
        return not self.violations

    def __str__(self) -> str:
        broken = [violation.rule for violation in self.violations]
        unjudged = [rule for rule in RULES if not self.checks[rule] and rule not in (*broken, *self.skipped)]
        verdict = "the sampler breaks " + named_rules(broken) if broken else "no rule is broken"
        lines = [f"{verdict[0].upper()}{verdict[1:]} ({sum(self.checks.values()):,} checks passed)."]
        lines += [f"\n{violation}" for violation in self.violations]
        if self.skipped:
            lines += ["", f"Left out by choice: {named_rules(self.skipped)}."]
        if unjudged:
            lines += ["", f"Not judged: {named_rules(unjudged)}."]
        for title, items in (("Not offered", self.not_offered), ("Notes", self.notes)):
            if items:
                lines += [f"\n{title}:", *(f"- {item}" for item in items)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Violation:
    """One broken rule."""

    rule: int
    name: str
    message: str
    """Where it is broken, what the sampler did, and what that means for a training run."""
    counterexample: Counterexample

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Counterexample:
    """The smallest case that was found: fewest ranks, then smallest shape, earliest epoch, earliest stop."""

    shape: Shape
    num_replicas: int
    epoch: int | None = None
    stop: int | None = None
    """Batches that each rank had had when the state was taken."""
    resumed_on: int | None = None
    """The number of ranks after the resume, if it is another one."""
    rank: int | None = None
    step: int | None = None
    """The batch in question, counted in its iteration from 0."""
    indices: tuple[int, ...] = ()

    def __str__(self) -> str:
        stop = None if self.stop is None else counted(self.stop, "batch", "batches")
        resumed_on = None if self.resumed_on is None else counted(self.resumed_on, "rank")
        places = {"epoch": self.epoch, "stopped after": stop, "resumed on": resumed_on}
        places |= {"rank": self.rank, "step": self.step}
        parts = [f"{name}={value!r}" for name, value in self.shape.items()]
        parts.append(counted(self.num_replicas, "rank"))
        parts += [f"{words} {place}" for words, place in places.items() if place is not None]
        return ", ".join(parts)


def named_rules(numbers: Sequence[int]) -> str:
    return f"{plural(len(numbers), 'rule')} {', '.join(map(str, numbers))}"


def listed(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"index {indices[0]}"
    return f"{len(indices)} indices {shortened(indices)}"


def shortened(indices: Sequence[int], most: int = 8) -> str:
    return f"[{first_of(indices, most)}]"
