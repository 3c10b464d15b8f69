"""Is a training script right, before it costs a night? It is rehearsed, unchanged, and what it did is judged.

    report = rehearse_script("train.py", ["--epochs", "90"])
    print(report)

The checks are those of :func:`rehearse.rehearse`, by the same names, on the journal of the rehearsal.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib._words import counted, int_of_at_least
from rehearse._processes import ended_in_order
from rehearse.checks.scripts.changes import judge_changes
from rehearse.checks.scripts.dealing import judge_dealing
from rehearse.checks.scripts.horizon import judge_horizon
from rehearse.checks.scripts.length import judge_length
from rehearse.checks.scripts.no_sync import judge_no_sync
from rehearse.checks.scripts.order import judge_order
from rehearse.checks.scripts.resume import judge_resume
from rehearse.checks.scripts.setup import judge_setup
from rehearse.checks.scripts.validation import judge_validation
from rehearse.checks.scripts.window import judge_windows
from rehearse.checks.scripts.workers import judge_workers
from rehearse.report import (
    CHAPTERS,
    Judgement,
    Kind,
    RehearsalReport,
    Unjudged,
    checked,
    guarded,
    not_judged,
    report_of,
)
from rehearse.scripts.events import Delivered, Event, Forward, PassBegun, PassEnded, ScheduleStep, Step
from rehearse.scripts.journal import CUT, ENDED, FAILED, REFUSED, Journal
from rehearse.scripts.lives import SecondLife, second_life
from rehearse.scripts.player import Play, play_each, stage_each

SCRIPT_CHECKS = tuple(dict.fromkeys((*CHAPTERS, "validation")))
UNSEEN = {
    "bad_step": "a rehearsal computes no gradients that could be bad",
    "growth": "a rehearsal holds no graphs",
}
"""The checks that ask for what a rehearsal leaves out."""
EXPECTATIONS = ("final_lr", "repeats")
LINES_OF_OUTPUT = 6


class NotRehearsed(RuntimeError):
    """A script that fails, or does nothing that could be judged; the text says why, and what to do."""


def rehearse_script(
    path: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    seconds: float = 300.0,
    expect: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
    allow_unjudged: Collection[str] = (),
    ranks: int = 1,
    resume_with: Sequence[str] = (),
    picture: str | os.PathLike[str] | None = None,
) -> RehearsalReport:
    """Judge a training script by rehearsing it to its end in another process; its files stay as they are.

    Args:
        path: The script, which stays unchanged.
        args: Its own arguments.
        seconds: Of CPU time that a rehearsal may take. What takes longer is judged up to there, and length and horizon
            are not. Those with other losses may take three times as long as it took, and ten seconds.
        expect: What is meant so: ``final_lr`` (the rate of the last step, or the one that it leaves), ``repeats`` (why
            ranks are given the same samples).
        skip: Names of checks to leave out; the report says so.
        allow_unjudged: Names of checks that may fail to be judged.
        ranks: How many processes the run has, for a script that torchrun starts; the first of them is rehearsed, and
            the last, to hold what they are dealt against each other.
        resume_with: What its arguments get more when it is started again behind a save: ``["--resume", "last.pt"]``. A
            script that looks for its checkpoint needs none, and the fit of a Trainer neither.
        picture: Where the picture of the run is written to, a PNG.

    Raises:
        FileNotFoundError: There is no such script.
        NotRehearsed: The script fails, refuses its arguments, or never steps.
        ValueError: An argument names a check or an expectation that does not exist.
    """
    wanted = checked(SCRIPT_CHECKS, EXPECTATIONS, expect, skip, allow_unjudged, seconds)
    ranks = int_of_at_least(1, "ranks", ranks)
    began = time.monotonic()
    asked = Play(path, tuple(map(str, args)), seconds, ranks)
    with ended_in_order():
        journal, *moved = play_each([asked, *(_moved(asked, way) for way in (1, -1))], others_seconds=_as_long_as)
        if journal.end == FAILED and journal.lapsed:  # of a loss that stands still, maybe
            journal = next((one for one in moved if one.end == ENDED), journal)
        _refuse_what_did_not_play(journal, Path(path).name, seconds)
        others = others_of(journal, moved, asked, skip, resume_with)
        judgement = judged(journal, others, final_lr=wanted.get("final_lr"))
        if wanted.get("repeats"):
            judgement.findings = [one for one in judgement.findings if one.check != "dealing"]
        if journal.trainer and not set(CHAPTERS) <= set(skip):
            add_fit(judgement, fit_of(journal, asked, skip), journal.fits)
        report = report_of(SCRIPT_CHECKS, judgement, skip, allow_unjudged, time.monotonic() - began, journal.printed)
        if picture is not None:
            from rehearse.scripts.picture import draw_night

            findings = [(f"{one.check}: {one.says}", one.micro_batch) for one in report.findings]
            draw_night(journal, picture, findings)
    return report


def fit_of(journal: Journal, asked: Play, skip: Collection[str]) -> RehearsalReport | str:
    """What :func:`rehearse.rehearse` says of the script's first fit; or why it says nothing."""
    options = {"module": journal.trainer, "skip": [name for name in skip if name in CHAPTERS]}
    asked = dataclasses.replace(asked, ranks=1, stage="rehearse.fits", options=options)
    [(report, why_not, _)] = stage_each([asked])
    return why_not if report is None else report


ALSO_SAID_AS = {"validation": "dealing"}
"""A check of a rehearsed script, and that of a fit which tells of the same."""


OF_A_CHAIN = ("length", "horizon")
"""What is judged by the script's whole run where it fits several times."""


def add_fit(judgement: Judgement, fit: RehearsalReport | str, fits: int = 1) -> None:
    """Add what the fit's own checks found; what both find is told once, as the fit's checks say it."""
    if isinstance(fit, str):
        judgement.notes.append(f"The Trainer's fit could not be judged by itself: {fit}")
        return
    if fits > 1:
        of_one = tuple(finding for finding in fit.findings if finding.check not in OF_A_CHAIN)
        fit = dataclasses.replace(fit, findings=of_one, facts={})
        judgement.notes.append(f"Of {fits:,} fits, the first was tried by itself; the script's whole run was counted")
    found = {finding.check for finding in fit.findings}
    played = [one for one in judgement.findings if not found & {one.check, ALSO_SAID_AS.get(one.check)}]
    judgement.findings = [*fit.findings, *played]
    for name, why in list(judgement.not_judged.items()):
        if name not in fit.not_judged and name in CHAPTERS:
            del judgement.not_judged[name]
        elif name in fit.failed:
            judgement.not_judged[name] = Unjudged(fit.not_judged[name])
        elif name in fit.left_out and why.kind is not Kind.OPEN:
            judgement.not_judged[name] = Unjudged(fit.not_judged[name], Kind.LEFT_OUT)
        elif name in fit.not_judged and why.kind is Kind.NOT_APPLICABLE:
            judgement.not_judged[name] = Unjudged(fit.not_judged[name], Kind.NOT_APPLICABLE)
    judgement.notes += [note for note in fit.notes if note not in judgement.notes]
    judgement.facts = {**fit.facts, **judgement.facts}


@dataclass(frozen=True)
class Others:
    """The same script, rehearsed in other ways."""

    moved: tuple[Journal, ...] = ()
    """With other losses, those that do something else."""
    parts_at: tuple[str, ...] = ()
    """The lines at which the first of these and the rehearsal go different ways."""
    again: Journal | None = None
    """The same once more, where it does something else as well."""
    other_rank: Journal | None = None
    life: SecondLife | None = None


def _moved(asked: Play, way: int) -> Play:
    return dataclasses.replace(asked, values=way)


def _as_long_as(journal: Journal) -> float:
    return 3 * journal.seconds + 10.0


def others_of(
    journal: Journal, moved: Sequence[Journal], asked: Play, skip: Collection[str], resume_with: Sequence[str] = ()
) -> Others:
    """Rehearse it as another rank; and where other losses lead elsewhere, once more, and to the line where they do."""
    if journal.end != ENDED:
        return Others()
    other = again = None
    places: list[str] = []
    if journal.world_size > 1 and "dealing" not in skip:
        [other] = play_each([dataclasses.replace(asked, rank=journal.world_size - 1)])  # where uneven shares show
    ways = {1: moved[0], -1: moved[1]}
    parts = {way: parts_from(journal, one) for way, one in ways.items() if one.end in (ENDED, CUT)}
    parted = [way for way, at in parts.items() if at is not None]
    if parted:
        [once_more] = play_each([asked])
        if once_more.end == ENDED and parts_from(journal, once_more) is not None:
            again = once_more
        to_there = [dataclasses.replace(one, ends_at=parts[parted[0]]) for one in (asked, _moved(asked, parted[0]))]
        places = [one.line_asked_for for one in play_each(to_there)]
    life = None if again is not None or "resume" in skip else second_life(journal, asked, resume_with)
    return Others(tuple(ways[way] for way in parted), tuple(dict.fromkeys(filter(None, places))), again, other, life)


def parts_from(journal: Journal, other: Journal) -> int | None:
    """The first event in which they differ by what is done, whatever samples and losses it is done with."""
    both = itertools.zip_longest(journal.events, other.events)
    return next((number for number, (mine, its) in enumerate(both) if _what(mine) != _what(its)), None)


def _what(event: Event | None) -> tuple[Any, ...]:
    match event:
        case Step():
            return Step, event.optimizer, event.rates
        case ScheduleStep():
            return ScheduleStep, event.schedule
        case Forward():
            return Forward, event.module, event.training
        case Delivered() | PassBegun() | PassEnded():
            return type(event), event.loader
    return (type(event),)


def judged(journal: Journal, others: Others, *, final_lr: float | None = None) -> Judgement:
    """What all checks say; one that fails by itself leaves what the others say."""
    why_no_other = "no other rank was rehearsed"
    other = others.other_rank
    if other is not None and other.end != ENDED:
        why_no_other = f"rank {other.rank} could not be rehearsed: {other.says or other.end}"
        other = None
    checks: dict[str, Callable[[], Judgement]] = {
        "length": lambda: judge_length(journal),
        "horizon": lambda: judge_horizon(journal, final_lr=final_lr),
        "dealing": lambda: judge_dealing(journal, other, why_no_other),
        "order": lambda: judge_order(journal),
        "window": lambda: judge_windows(journal),
        "no_sync": lambda: judge_no_sync(journal),
        "changes": lambda: judge_changes(journal),
        "setup": lambda: judge_setup(journal),
        "validation": lambda: judge_validation(journal, other),
        "workers": lambda: judge_workers(journal),
        "resume": lambda: judge_resume(journal, others.life, _why_no_second_life(journal, others)),
    }
    judgement = Judgement(not_judged={name: Unjudged(why, Kind.NOT_APPLICABLE) for name, why in UNSEEN.items()})
    for name, check in checks.items():
        judgement.add(guarded(name, check))
    found = {finding.check for finding in judgement.findings}
    if other is not None and {"dealing", "validation"} <= found:  # of a split that each rank draws for itself
        judgement.findings = [finding for finding in judgement.findings if finding.check != "dealing"]
    if journal.end != ENDED:
        counts = journal.counts()
        made = counted(counts["optimizer steps"], "optimizer step")
        if not journal.optimizers:
            made = counted(counts["backward passes"], "backward pass", "backward passes")
        why = f"the rehearsal was ended after {made}, before the script's end"
        if journal.end != CUT:
            why = (
                f"the script fails after {made}. If it does not when it is run by itself, it asks for a value that "
                f"a rehearsal does not have:\n{journal.says}"
            )
        for name in ("length", "horizon"):
            judgement.findings = [finding for finding in judgement.findings if finding.check != name]
            judgement.add(not_judged(name, why))
    _leave_open_what_a_value_ends(judgement, journal, others)
    if "workers" in found:  # the loader is longer than its len because of them
        judgement.findings = [finding for finding in judgement.findings if finding.check != "length"]
    if any(finding.check in ("workers", "resume") for finding in judgement.findings):
        _leave_the_end_open(judgement, "the number of its calls is in doubt, see above")
    judgement.notes += journal.notes
    judgement.notes += _what_hangs_on_values(journal, others)
    return judgement


def _why_no_second_life(journal: Journal, others: Others) -> str:
    """Why none was tried of a script that saves; empty where one was, or where nothing is saved."""
    if not journal.counts()["saves"]:
        if any(one.counts()["saves"] for one in others.moved):
            return f"whether it saves hangs on a value{_where(others)}"
        return ""
    if journal.end != ENDED:
        return "the rehearsal did not come to the script's end"
    if others.again is not None:
        return "the script does something else each time that it is run"
    return ""


def _leave_open_what_a_value_ends(judgement: Judgement, journal: Journal, others: Others) -> None:
    """A run that a value ends, as one that stops early: whether its schedule ends with it is not known."""
    steps = journal.counts()["optimizer steps"]
    theirs = [one.counts()["optimizer steps"] for one in others.moved]
    other = next((number for number in theirs if number != steps), None)
    if other is None:
        return
    made = f"{counted(steps, 'optimizer step')}, or {other:,} with other losses"
    _leave_the_end_open(judgement, f"how long the run is hangs on a value{_where(others)}: {made}")


def _leave_the_end_open(judgement: Judgement, why: str) -> None:
    found = [finding for finding in judgement.findings if finding.check == "horizon"]
    judgement.findings = [finding for finding in judgement.findings if finding not in found]
    if found:
        judgement.add(not_judged("horizon", why, Kind.OPEN))


NUMBERS = ("micro-batches", "optimizer steps", "scheduler steps", "validations", "saves")


def _numbers(journal: Journal) -> dict[str, int]:
    numbers = journal.counts() | {"micro-batches": journal.micro_batches()}
    return {name: numbers[name] for name in NUMBERS}


def _where(others: Others) -> str:
    return f" ({' and '.join(others.parts_at)})" if others.parts_at else ""


def _what_hangs_on_values(journal: Journal, others: Others) -> list[str]:
    if others.again is not None:
        moved = _moved_numbers(journal, others.again)
        return [f"The script does something else each time that it is run{_where(others)}: {moved}"]
    told = [_moved_numbers(journal, one) for one in others.moved]
    if not told:
        return []
    return [
        f"What the script does hangs on its losses{_where(others)}. With others: {'; or '.join(dict.fromkeys(told))}"
    ]


def _moved_numbers(journal: Journal, other: Journal) -> str:
    """What one has in place of the other's: its counts, or the first step of another rate."""
    if other.end == CUT:
        return "it does not come to its end in the time given"
    mine, theirs = _numbers(journal), _numbers(other)
    counts = [f"{theirs[name]:,} {name} in place of {mine[name]:,}" for name in NUMBERS if theirs[name] != mine[name]]
    if counts:
        return ", ".join(counts)
    for step, (rates, others) in enumerate(zip(journal.rates(), other.rates(), strict=False), start=1):
        for rate, its in zip(rates, others, strict=False):
            if rate != its:
                return f"optimizer step {step:,} has a rate of {its:g} in place of {rate:g}"
    return "the same in another order"


def _refuse_what_did_not_play(journal: Journal, name: str, seconds: float) -> None:
    """What fails in the lapse is judged up to there: it may go by the values of a trained network."""
    if journal.end in (FAILED, REFUSED) and journal.lapsed:
        return
    if journal.end == FAILED:
        cure = "\n(Nobody types at a rehearsal's terminal, and what it prints goes to a file.)"
        if journal.asked_for_gpu:
            cure = (
                "\nIt asks for a GPU, and there is none: let it use the CPU where torch.cuda.is_available() is False."
            )
        raise NotRehearsed(f"{name} fails by itself:\n{journal.says}{cure}{_output(journal)}")
    if journal.end == REFUSED:
        raise NotRehearsed(f"{name} ends by itself ({journal.says}):{_output(journal)}")
    if journal.end not in (ENDED, CUT):
        raise NotRehearsed(f"{name} could not be rehearsed: {journal.says}.{_output(journal)}")
    if journal.counts()["optimizer steps"] or journal.changed_by_hand or journal.counts()["backward passes"]:
        return
    if journal.end == CUT:
        raise NotRehearsed(
            f"{name} has not begun to train after {seconds:g} s of CPU time: give it more (seconds=), or less to "
            f"prepare.{_output(journal)}"
        )
    cure = journal.elsewhere or "give it the arguments with which it trains"
    raise NotRehearsed(f"{name} ended without a backward pass and without an optimizer step: {cure}.{_output(journal)}")


def _output(journal: Journal) -> str:
    """The last lines that the script printed."""
    lines = journal.printed.strip().splitlines()
    return "\n".join(["\nIts output ends with:", *(f"  {line}" for line in lines[-LINES_OF_OUTPUT:])]) if lines else ""
