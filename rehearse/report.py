"""What a rehearsal says: its findings, what it could not judge, and the facts of the run."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import course_lib
from course_lib._words import counted

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
    "growth": "03_memory",
    "changes": "08_changing_batch_size",
    "setup": "10_check_your_run",
}
"""The checks, in the order in which they are made, and the chapter that explains each."""
COMPARED = {
    "length": "each loop over a loader with what len says of it",
    "horizon": "where each rate ends with where it was to end",
    "dealing": "what each rank is given with what the others are",
    "order": "the order of each epoch with those of the others",
    "resume": "a run that is stopped and goes on with one that is not",
    "workers": "what each worker gives with what the others do",
    "window": "the backward passes behind each step with the micro-batches of its window",
    "no_sync": "where gradients are averaged with where the ranks step",
    "bad_step": "what one batch of NaN leaves with what the run means to skip",
    "growth": "what is alive behind each step with what was before",
    "changes": "the lengths of the epochs with the one that is counted by",
    "setup": "what gets gradients with what optimizers hold, and modes with what they were",
    "validation": "the samples that are evaluated with those that are trained",
}
"""What a check that has passed has held against what."""


COLUMNS = 88
"""A notebook's cell and a narrow terminal show so many."""


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
    micro_batch: int | None = None
    """The first at which it shows, of a script that was rehearsed; None where it has no place in the run."""

    def __str__(self) -> str:
        parts = {"means": self.means, "cure": self.cure, "read": self.chapter}
        lines = [_filled(f"{self.check}: {self.says}", "  ")]
        lines += [_filled(f"  {name}: {text}", "      ") for name, text in parts.items()]
        return "\n".join(lines)


class Kind(Enum):
    """Why a check was not judged; the text is the report's heading."""

    FAILED = "Failed to be judged"
    """An error, or a limit of time or size: nobody knows what it would have found."""
    OPEN = "Nobody judged"
    """The run has what the check asks for, and it could not be tried, or hangs on what a rehearsal does not know."""
    NOT_APPLICABLE = "Not applicable to this run"
    LEFT_OUT = "Left out"
    """It takes longer, and was not asked for."""


@dataclass(frozen=True)
class Unjudged:
    """Why a check was not judged."""

    why: str
    kind: Kind = Kind.FAILED


@dataclass
class Judgement:
    """What one check has to say."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    not_judged: dict[str, Unjudged] = field(default_factory=dict)
    compared: dict[str, str] = field(default_factory=dict)
    """Of a check, what it has held against what, where it is more than :data:`COMPARED` says."""
    refuses: bool = False
    """Whether the run does not start at all, so that nothing else can be tried."""

    def find(
        self, check: str, says: str, means: str, cure: str, *, chapter: str | None = None, at: int | None = None
    ) -> Judgement:
        """Take up a finding; ``chapter``: where another one than the check's explains it. Gives this judgement."""
        self.findings.append(Finding(check, says, means, cure, chapter or CHAPTERS[check], at))
        self.not_judged.pop(check, None)
        return self

    def add(self, other: Judgement) -> None:
        self.findings += other.findings
        self.notes += [note for note in other.notes if note not in self.notes]
        self.facts.update(other.facts)
        self.not_judged.update(other.not_judged)
        self.compared.update(other.compared)


def not_judged(check: str, why: str, kind: Kind = Kind.FAILED) -> Judgement:
    """What a check says that was not made."""
    return Judgement(not_judged={check: Unjudged(why, kind)})


def not_applicable(check: str, why: str) -> Judgement:
    """What a check says that asks for something which this kind of run does not have."""
    return not_judged(check, why, Kind.NOT_APPLICABLE)


@dataclass(frozen=True)
class RehearsalReport:
    """What :func:`rehearse.rehearse` found."""

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    """The names of the checks that were made and found nothing."""
    not_judged: Mapping[str, str]
    """Check, and why it was not judged, whatever the kind: see ``failed``, ``open`` and ``left_out``."""
    notes: tuple[str, ...]
    """Choices, and what is worth knowing; they leave ``ok`` alone."""
    facts: Mapping[str, Any]
    """The run in numbers: its micro-batches, optimizer steps and epochs, and where the rate ends."""
    skipped: tuple[str, ...]
    """The checks that the caller left out."""
    seconds: float
    failed: tuple[str, ...] = ()
    """Those of ``not_judged`` that an error or a limit kept from being judged. Those that are in none of ``failed``,
    ``open`` and ``left_out`` ask for something that this kind of run does not have."""
    open: tuple[str, ...] = ()
    """Those of ``not_judged`` that ask for something which this run has, and which could not be tried."""
    left_out: tuple[str, ...] = ()
    """Those of ``not_judged`` that take longer, and were not asked for."""
    compared: Mapping[str, str] = field(default_factory=dict)
    """What each check that has passed has held against what."""
    allowed: tuple[str, ...] = ()
    """The checks that the caller accepts without a judgement (``allow_unjudged``)."""
    printed: str = ""
    """The end of what a script printed while it was rehearsed."""

    @property
    def ok(self) -> bool | None:
        """False where something was found; None where that is not known, as a check failed to be judged; else True."""
        if self.findings:
            return False
        return True if self.passed and not self.unknown else None

    @property
    def unknown(self) -> tuple[str, ...]:
        """What this run has and nobody judged, and is not allowed to be so."""
        return tuple(name for name in (*self.failed, *self.open) if name not in self.allowed)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.verdict} ({self.seconds:.1f} s)"]
        lines += [f"\n{finding}" for finding in self.findings]
        if self.facts:
            width = max(map(len, self.facts)) + 2
            lines += ["\nThe run:", *(f"  {name:<{width}}{_shown(value)}" for name, value in self.facts.items())]
        if self.passed:
            lines += ["\nNothing was found where these were held against each other:"]
            lines += [_filled(f"  {name}: {what}", "      ") for name, what in self.compared.items()]
        if self.skipped:
            lines += [_filled(f"Left out, as asked: {', '.join(self.skipped)}.", "  ")]
        others = [name for name in self.not_judged if name not in {*self.failed, *self.open, *self.left_out}]
        sections = {
            Kind.FAILED.value: self._reasons(self.failed),
            Kind.OPEN.value: self._reasons(self.open),
            Kind.NOT_APPLICABLE.value: self._reasons(others),
            Kind.LEFT_OUT.value: self._reasons(self.left_out),
            "Notes": self.notes,
        }
        for title, items in sections.items():
            if items:
                lines += [f"\n{title}:", *(_filled(f"- {item}", "  ") for item in items)]
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """``"Ready."``, ``"Ready, but nobody judged: order, resume."``, ``"Not ready: 2 findings."``"""
        if self.findings:
            return f"Not ready: {counted(len(self.findings), 'finding')}."
        if not self.passed:
            return "Not known: the run could not be tried." if self.unknown else "Nothing was judged."
        return f"Ready, but nobody judged: {', '.join(self.unknown)}." if self.unknown else "Ready."

    def _reasons(self, names: Iterable[str]) -> list[str]:
        """A line for each reason, with the checks that share it."""
        checks: dict[str, list[str]] = {}
        for name in names:
            accepted = " (accepted)" if name in self.allowed and name in (*self.failed, *self.open) else ""
            checks.setdefault(self.not_judged[name], []).append(f"{name}{accepted}")
        return [f"{', '.join(of)}: {why}" for why, of in checks.items()]


class NotReady(AssertionError):
    """A run in which a rehearsal found something, or of which it does not know; ``report`` holds it."""

    def __init__(self, report: RehearsalReport) -> None:
        super().__init__(f"\n{report}")
        self.report = report


def _filled(text: str, indent: str) -> str:
    return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value)


def report_of(
    checks: Collection[str],
    judgement: Judgement,
    skip: Collection[str],
    allowed: Collection[str],
    seconds: float,
    printed: str = "",
) -> RehearsalReport:
    """The report on a run to which these checks were made."""
    findings = tuple(finding for finding in judgement.findings if finding.check not in skip)
    found = {finding.check for finding in findings}
    passed = [name for name in checks if name not in {*found, *judgement.not_judged, *skip}]
    open_checks = {name: why for name, why in judgement.not_judged.items() if name not in found and name not in skip}
    return RehearsalReport(
        findings=findings,
        passed=tuple(passed),
        compared={name: judgement.compared.get(name, COMPARED[name]) for name in passed},
        not_judged={name: unjudged.why for name, unjudged in open_checks.items()},
        notes=tuple(dict.fromkeys(judgement.notes)),
        facts=judgement.facts,
        skipped=tuple(skip),
        seconds=seconds,
        failed=tuple(name for name, unjudged in open_checks.items() if unjudged.kind is Kind.FAILED),
        open=tuple(name for name, unjudged in open_checks.items() if unjudged.kind is Kind.OPEN),
        left_out=tuple(name for name, unjudged in open_checks.items() if unjudged.kind is Kind.LEFT_OUT),
        allowed=tuple(allowed),
        printed=printed,
    )


def checked(
    checks: Collection[str],
    expectations: Collection[str],
    expect: Mapping[str, Any] | None,
    skip: Collection[str],
    allowed: Collection[str],
    seconds: float,
) -> dict[str, Any]:
    """``expect`` as a dict; an argument that names what does not exist is a ValueError."""
    for argument, names in (("skip", skip), ("allow_unjudged", allowed)):
        for name in [names] if isinstance(names, str) else names:
            if name not in checks or isinstance(names, str):
                raise ValueError(f"{argument} must be names of checks ({', '.join(checks)}), got {name!r}")
    for name in expect or ():
        if name not in expectations:
            raise ValueError(f"expect must have some of the keys {', '.join(expectations)}, got {name!r}")
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds!r}")
    return dict(expect or {})


LIBRARY = Path(str(course_lib.__file__)).parent


def in_a_line(error: BaseException) -> str:
    """``"ValueError: … (model.py, line 7)"``: an exception, and the last line of code that is not a library's.

    One without a text is told by its place: ``"AssertionError (cli.py, line 240, in setup)"``, in whosever code.
    """
    text = " ".join(str(error).split())
    if len(text) > 300:
        text = f"{text[:300]}…"
    frames = traceback.extract_tb(error.__traceback__)
    if not text and frames:
        last = frames[-1]
        return f"{type(error).__name__} ({Path(last.filename).name}, line {last.lineno}, in {last.name})"
    own = [frame for frame in frames if "site-packages" not in frame.filename and not _is_ours(Path(frame.filename))]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}{where}"


def _is_ours(file: Path) -> bool:
    return file.is_relative_to(Path(__file__).parent) or file.is_relative_to(LIBRARY)


def guarded(check: str, judge: Callable[..., Judgement], *arguments: Any, **options: Any) -> Judgement:
    """What a check says of what was seen; one that fails for a fault of its own has judged nothing."""
    try:
        return judge(*arguments, **options)
    except Exception as error:
        return not_judged(check, f"the check itself failed: {in_a_line(error)}")
