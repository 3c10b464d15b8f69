"""One call of the kit: every rule over every trial, smallest first, and the report of what was found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from course_lib._arguments import int_of_at_least
from course_lib.conformance.findings import Checks, Finding
from course_lib.conformance.guarding import Fault
from course_lib.conformance.offers import named_arguments
from course_lib.conformance.report import RULES, ConformanceReport, Shape, Violation
from course_lib.conformance.trial import Trial
from course_lib.conformance.wording import listed, named_rules


class Lab:
    """All trials of one call, and what the rules found in them."""

    def __init__(
        self,
        factory: Callable[..., Any],
        exactly_once: Collection[int] | Callable[[Shape], Collection[int]],
        world_sizes: Iterable[int],
        epochs: int,
        shapes: Iterable[Shape] | None,
    ) -> None:
        self.factory = factory
        parameters = named_arguments(factory)
        self.by_name = {"num_replicas", "rank"} <= parameters
        self.epochs = range(int_of_at_least(2, "epochs", epochs))
        sizes = sorted({int_of_at_least(1, "every world size", size) for size in world_sizes})
        given = [{}] if shapes is None else [dict(shape) for shape in shapes]
        if not sizes or not given:
            raise ValueError(f"there is nothing to judge: {len(sizes)} world sizes, {len(given)} shapes")
        self.seeds = "seed" in parameters or all("seed" in shape for shape in given)
        by_size = [(shape, exactly_once(shape) if callable(exactly_once) else exactly_once) for shape in given]
        by_size.sort(key=lambda entry: len(entry[1]))
        self.trials = [Trial(self, shape, once, size) for size in sizes for shape, once in by_size]
        self.found: dict[int, Violation] = {}
        self.checks = dict.fromkeys(RULES, 0)
        self.noted: dict[str, list[str]] = {}

    def judge(self, number: int, rule: Callable[[Trial], Checks]) -> None:
        """Run a rule over the trials, from the smallest on, up to its first violation."""
        for trial in self.trials:
            try:
                finding = self._first_finding(number, rule(trial))
            except Fault as fault:
                finding = Finding(str(fault), trial.here)
            if finding:
                name, meaning = RULES[number]
                message = f"Rule {number}, {name}: {finding.at}: {finding.text}."
                message += f"\n  In a training run: {finding.means or meaning}."
                self.found[number] = Violation(number, name, message, finding.at)
                return

    def _first_finding(self, number: int, checks: Checks) -> Finding | None:
        for finding in checks:
            if finding:
                return finding
            self.checks[number] += 1
        return None

    def trials_of(self, shape: Shape) -> list[Trial]:
        return [trial for trial in self.trials if trial.shape is shape]

    def note(self, kind: str, detail: str) -> None:
        details = self.noted.setdefault(kind, [])
        if detail not in details:
            details.append(detail)

    def report(self) -> ConformanceReport:
        judged = [trial for trial in self.trials if trial.recorded()]
        if not judged and not self.found:
            raise ValueError(f"nothing was judged, all was refused: {self.noted['refused'][0]}")
        missing = [text for trial in judged for text in trial.offers.missing()]
        if not self.seeds:
            missing.append("no keyword seed of the factory: rule 5 is not judged between seeds")
        for trial in judged:
            if trial.secondary:
                text = "indices outside exactly_once were taken for a second stream, which is cycled"
                self.note(text, listed(sorted(trial.secondary)))
            first = next(other for other in judged if other.shape is trial.shape)
            if trial is first and trial.unshuffled and len(trial.once) > 3:
                self.note("does not shuffle, so rules 5 and 6 asked for no other order", str(trial.at()))
        for number, needed in ((8, {7}), (9, {1, 4, 7})):
            if needed & set(self.found) and any(trial.offers.state for trial in judged):
                broken = named_rules(sorted(needed & set(self.found)))
                self.note(f"the resumes of rule {number} were not judged", f"they rest on {broken}")
        notes = [
            f"{kind}: {details[0]}" + (f" (and {len(details) - 1} more)" if len(details) > 1 else "")
            for kind, details in self.noted.items()
        ]
        violations = tuple(self.found[number] for number in sorted(self.found))
        return ConformanceReport(violations, tuple(dict.fromkeys(missing)), tuple(notes), self.checks)
