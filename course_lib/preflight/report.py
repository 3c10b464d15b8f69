"""What preflight says: its findings, what it could not judge, and the facts of the run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

CHAPTERS = {
    "length": "05_counting_steps",
    "horizon": "05_counting_steps",
    "dealing": "06_batch_samplers_ddp",
    "order": "06_batch_samplers_ddp",
    "resume": "06_batch_samplers_ddp",
    "workers": "02_dataloader_internals",
    "window": "04_gradient_accumulation",
    "no_sync": "04_gradient_accumulation",
    "bad_step": "07_skipping_steps",
    "memory": "03_memory",
    "growth": "03_memory",
    "changes": "08_changing_batch_size",
    "setup": "10_check_your_run",
}
"""The checks, in the order in which they are made, and the chapter that explains each."""


@dataclass(frozen=True)
class Finding:
    """One cause for which the run will not do what its settings promise."""

    check: str
    says: str
    """What was seen, in one sentence with its numbers."""
    means: str
    """What this does to the training run."""
    cure: str
    chapter: str
    """The chapter that explains it: ``"05_counting_steps"``."""

    def __str__(self) -> str:
        parts = {"means": self.means, "cure": self.cure, "read": self.chapter}
        lines = [_filled(f"{self.check}: {self.says}", "  ")]
        lines += [_filled(f"  {name}: {text}", "      ") for name, text in parts.items()]
        return "\n".join(lines)


@dataclass
class Judgement:
    """What one check has to say."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    not_judged: dict[str, str] = field(default_factory=dict)
    """Check, and why it could not be judged."""
    refuses: bool = False
    """Whether the run does not start at all, so that nothing else can be tried."""

    def find(self, check: str, says: str, means: str, cure: str, *, chapter: str | None = None) -> Judgement:
        """Take up a finding; ``chapter``: where another one than the check's explains it. Gives this judgement."""
        self.findings.append(Finding(check, says, means, cure, chapter or CHAPTERS[check]))
        return self

    def add(self, other: Judgement) -> None:
        self.findings += other.findings
        self.notes += [note for note in other.notes if note not in self.notes]
        self.facts.update(other.facts)
        self.not_judged.update(other.not_judged)


def not_judged(check: str, why: str) -> Judgement:
    """What a check says that could not be made."""
    return Judgement(not_judged={check: why})


@dataclass(frozen=True)
class PreflightReport:
    """What :func:`course_lib.preflight.preflight` found."""

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    """The names of the checks that were made and found nothing."""
    not_judged: Mapping[str, str]
    """Check, and why it could not be judged."""
    notes: tuple[str, ...]
    """Choices, and what is worth knowing; they leave ``ok`` alone."""
    facts: Mapping[str, Any]
    """The run in numbers: its micro-batches, optimizer steps and epochs, and where the rate ends."""
    skipped: tuple[str, ...]
    """The checks that the caller left out."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found; a check that was not judged counts as nothing found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        count = len(self.findings)
        if count:
            verdict = f"Not ready: {count} finding{'s' if count > 1 else ''}."
        elif self.passed:
            verdict = "Ready: nothing was found."
        else:
            verdict = "Nothing was judged."
        lines = [f"{verdict} ({self.seconds:.1f} s)"]
        lines += [f"\n{finding}" for finding in self.findings]
        if self.facts:
            width = max(map(len, self.facts)) + 2
            lines += ["\nThe run:", *(f"  {name:<{width}}{_shown(value)}" for name, value in self.facts.items())]
        if self.passed:
            lines += ["", _filled(f"Passed: {', '.join(self.passed)}.", "  ")]
        if self.skipped:
            lines += [_filled(f"Left out, as asked: {', '.join(self.skipped)}.", "  ")]
        sections = {
            "Not judged": [f"{check}: {why}" for check, why in self.not_judged.items()],
            "Notes": self.notes,
        }
        for title, items in sections.items():
            if items:
                lines += [f"\n{title}:", *(_filled(f"- {item}", "  ") for item in items)]
        return "\n".join(lines)


class NotReady(AssertionError):
    """A run in which preflight found something; ``report`` holds it."""

    def __init__(self, report: PreflightReport) -> None:
        super().__init__(f"\n{report}")
        self.report = report


def _filled(text: str, indent: str) -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
