"""Is a training script right, before it costs a night? It is rehearsed, unchanged, and what it did is judged.

    report = rehearse_script("train.py", ["--epochs", "90"])
    print(report)

The checks are those of :func:`rehearse.rehearse`, by the same names, on the journal of the rehearsal.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib._words import counted, first_of, int_of_at_least
from rehearse._processes import ended_in_order
from rehearse.checks.scripts.changes import judge_changes
from rehearse.checks.scripts.dealing import judge_dealing
from rehearse.checks.scripts.horizon import judge_horizon
from rehearse.checks.scripts.length import judge_length
from rehearse.checks.scripts.no_sync import judge_no_sync
from rehearse.checks.scripts.order import judge_order
from rehearse.checks.scripts.setup import judge_setup
from rehearse.checks.scripts.validation import judge_validation
from rehearse.checks.scripts.window import judge_windows
from rehearse.report import (
    CHAPTERS,
    Judgement,
    Kind,
    RehearsalReport,
    Unjudged,
    checked,
    guarded,
    not_applicable,
    not_judged,
    report_of,
)
from rehearse.scripts.journal import CUT, ENDED, FAILED, REFUSED, Comparison, Journal
from rehearse.scripts.player import Play, play_each, stage_each

SCRIPT_CHECKS = tuple(dict.fromkeys((*CHAPTERS, "validation")))
UNSEEN = {
    "workers": "a rehearsal starts no workers: take the loader to rehearse_loop",
    "bad_step": "a rehearsal computes no gradients that could be bad",
    "growth": "a rehearsal holds no graphs",
    "resume": "a rehearsal of a script stops nowhere",
}
"""The checks that ask for what a rehearsal leaves out."""
EXPECTATIONS = ("final_lr",)
MOST_FLIPS = 4
"""Lines that are rehearsed with the other answer."""
STEERING = ("callback", "handler", "stop", "finder")
"""In the path of a library's file: what may end or turn a run, as ignite/handlers/early_stopping.py does."""
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
    picture: str | os.PathLike[str] | None = None,
) -> RehearsalReport:
    """Judge a training script by rehearsing it to its end in another process; its files stay as they are.

    Args:
        path: The script, which stays unchanged.
        args: Its own arguments.
        seconds: Of CPU time that a rehearsal may take. What takes longer is judged up to there, and length and horizon
            are not. Those with other answers of deciding values may take as much in all.
        expect: What is meant so: ``final_lr`` (the rate of the last step, or the one that it leaves).
        skip: Names of checks to leave out; the report says so.
        allow_unjudged: Names of checks that may fail to be judged.
        ranks: How many processes the run has, for a script that torchrun starts; one of them is rehearsed, and another
            to hold what they are dealt against each other.
        picture: Where the picture of the run is written to, a PNG.

    Raises:
        FileNotFoundError: There is no such script.
        NotRehearsed: The script fails, refuses its arguments, or never steps.
        ValueError: An argument names a check or an expectation that does not exist.
    """
    wanted = checked(SCRIPT_CHECKS, EXPECTATIONS, expect, skip, allow_unjudged, seconds)
    ranks = int_of_at_least(1, "ranks", ranks)
    began = time.monotonic()
    kept = Path(tempfile.gettempdir(), f"rehearsal-{secrets.token_hex(8)}")
    asked = Play(path, tuple(map(str, args)), seconds, ranks, folder=kept)
    try:
        with ended_in_order():
            journal, again = play_each([asked, dataclasses.replace(asked, folder=None)])
            _refuse_what_did_not_play(journal, Path(path).name, seconds)
            others = others_of(journal, again, asked, skip)
            judgement = judged(journal, others, final_lr=wanted.get("final_lr"))
            if journal.trainer and not set(CHAPTERS) <= set(skip):
                add_fit(judgement, fit_of(journal, asked, skip))
            report = report_of(SCRIPT_CHECKS, judgement, skip, allow_unjudged, time.monotonic() - began)
            if picture is not None:
                from rehearse.scripts.picture import draw_night

                findings = [(f"{one.check}: {one.says}", one.micro_batch) for one in report.findings]
                draw_night(journal, picture, findings)
    except BaseException:
        shutil.rmtree(kept, ignore_errors=True)
        raise
    return report


def fit_of(journal: Journal, asked: Play, skip: Collection[str]) -> RehearsalReport | str:
    """What :func:`rehearse.rehearse` says of the script's first fit; or why it says nothing."""
    options = {"module": journal.trainer, "skip": [name for name in skip if name in CHAPTERS]}
    asked = dataclasses.replace(asked, ranks=1, folder=None, stage="rehearse.fits", options=options)
    [(report, why_not)] = stage_each([asked])
    return why_not if report is None else report


ALSO_SAID_AS = {"validation": "dealing"}
"""A check of a rehearsed script, and that of a fit which tells of the same."""


def add_fit(judgement: Judgement, fit: RehearsalReport | str) -> None:
    """Add what the fit's own checks found; what both find is told once, as the fit's checks say it."""
    if isinstance(fit, str):
        judgement.notes.append(f"The Trainer's fit could not be judged by itself: {fit}")
        return
    found = {finding.check for finding in fit.findings}
    played = [one for one in judgement.findings if not found & {one.check, ALSO_SAID_AS.get(one.check)}]
    judgement.findings = [*fit.findings, *played]
    for name, why in list(judgement.not_judged.items()):
        if name not in fit.not_judged and name in CHAPTERS:
            del judgement.not_judged[name]
        elif name in fit.failed:
            judgement.not_judged[name] = Unjudged(fit.not_judged[name])
        elif name in fit.left_out:
            judgement.not_judged[name] = Unjudged(fit.not_judged[name], Kind.LEFT_OUT)
        elif name in fit.not_judged and why.kind is Kind.NOT_APPLICABLE:
            judgement.not_judged[name] = Unjudged(fit.not_judged[name], Kind.NOT_APPLICABLE)
    judgement.notes += [note for note in fit.notes if note not in judgement.notes]
    judgement.facts = {**fit.facts, **judgement.facts}


@dataclass(frozen=True)
class Others:
    """The same script, played in other ways."""

    again: Journal | None = None
    other_rank: Journal | None = None
    turned: tuple[tuple[Comparison, bool, Journal], ...] = ()
    """A line that goes by a value, what it answers each time, and what is rehearsed then."""
    unplayed: tuple[Comparison, ...] = ()
    """Lines whose other answers were not rehearsed."""
    in_time: bool = True
    """Whether all that were chosen were rehearsed before the time was over."""


def others_of(journal: Journal, again: Journal, asked: Play, skip: Collection[str]) -> Others:
    """Rehearse it as another rank, and with the other answer in each line that goes by a value."""
    own = {Path(source).name for source in journal.sources}
    asked_for = [
        one
        for one in journal.comparisons.values()
        if one.place.rpartition(":")[0] in own or any(word in one.place for word in STEERING)
    ]
    if journal.end != ENDED:
        return Others(again)
    # Whether a run ends elsewhere than its schedule may hang on any of them.
    is_off = "horizon" not in skip and bool(guarded("horizon", judge_horizon, journal).findings)
    most = 3 * MOST_FLIPS if is_off else MOST_FLIPS
    lines = list(dict.fromkeys(one.line for one in asked_for))[:most]
    steers = [one for one in asked_for if one.line in lines][: 2 * most]
    ways = [(one, one.rarer) for one in steers]
    if is_off:  # with patience, the rarer answer may end it earlier still
        ways += [(one, not one.rarer) for one in steers if one.answers[one.rarer]]
    limit = 3 * journal.seconds + 10.0
    in_this_way = functools.partial(Play, asked.script, asked.arguments, limit, asked.ranks)
    other = None
    if journal.world_size > 1 and "dealing" not in skip:
        [other] = play_each([dataclasses.replace(asked, rank=1, folder=None)])
    plays = [in_this_way(turned=(one.place, answer)) for one, answer in ways]
    turned = tuple((*way, play) for way, play in zip(ways, _played_within(asked.seconds, plays), strict=False) if play)
    tried = [one for one, _, _ in turned]
    return Others(again, other, turned, tuple(one for one in asked_for if one not in tried), len(turned) == len(ways))


def _played_within(seconds: float, plays: Sequence[Play]) -> list[Journal | None]:
    """Their journals, as long as they take no longer in all; None for what was ended by that, and none for the rest."""
    journals: list[Journal | None] = []
    while len(journals) < len(plays) and seconds > 0:
        pair = plays[len(journals) :][:2]
        left = [dataclasses.replace(one, seconds=min(one.seconds, seconds / len(pair))) for one in pair]
        for whole, asked, journal in zip(pair, left, play_each(left), strict=True):
            journals.append(None if journal.end == CUT and asked.seconds < whole.seconds else journal)
            seconds -= journal.seconds or asked.seconds
    return journals


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
        "validation": lambda: judge_validation(journal),
    }
    judgement = Judgement(not_judged={name: Unjudged(why, Kind.NOT_APPLICABLE) for name, why in UNSEEN.items()})
    for name, check in checks.items():
        judgement.add(guarded(name, check))
    if journal.end != ENDED:
        counts = journal.counts()
        made = counted(counts["optimizer steps"], "optimizer step")
        if not journal.optimizers:
            made = counted(counts["backward passes"], "backward pass", "backward passes")
        why = f"the rehearsal was ended after {made}, before the script's end{_steered(journal)}"
        if journal.end != CUT:
            why = (
                f"the script fails after {made}. If it does not when it is run by itself, it asks for a value that "
                f"a rehearsal does not have:\n{journal.says}"
            )
        for name in ("length", "horizon"):
            judgement.findings = [finding for finding in judgement.findings if finding.check != name]
            judgement.add(not_judged(name, why))
    _leave_open_what_a_value_ends(judgement, journal, others)
    judgement.notes += journal.notes
    judgement.notes += _what_hangs_on_values(journal, others)
    if journal.output:
        judgement.notes.append(f"What the script printed is kept in {journal.output}")
    return judgement


def _leave_open_what_a_value_ends(judgement: Judgement, journal: Journal, others: Others) -> None:
    """A run that a value has ended, as one that stops early: whether its schedule ends with it is not known."""
    steps = journal.counts()["optimizer steps"]
    found = [finding for finding in judgement.findings if finding.check == "horizon"]
    for asked, _, theirs in others.turned:
        more = theirs.counts()["optimizer steps"]
        if found and (theirs.end == CUT or more > steps):
            judgement.findings = [finding for finding in judgement.findings if finding.check != "horizon"]
            why = (
                f"how long the run is hangs on a value, by {asked.place}: {counted(steps, 'optimizer step')}, or "
                f"{more:,} with the other answer"
            )
            judgement.add(not_applicable("horizon", why))
            return


def _steered(journal: Journal) -> str:
    asked = max(journal.comparisons.values(), key=lambda one: one.answers.total(), default=None)
    return f"; it looks at a value in {asked.place}, which a rehearsal holds still" if asked else ""


COMPARED = ("micro-batches", "optimizer steps", "scheduler steps", "validations", "saves")


def _numbers(journal: Journal) -> dict[str, int]:
    numbers = journal.counts() | {"micro-batches": journal.micro_batches()}
    return {name: numbers[name] for name in COMPARED}


def _what_hangs_on_values(journal: Journal, others: Others) -> list[str]:
    notes = []
    mine = _numbers(journal)
    if others.again is not None and others.again.end == ENDED:
        for name, number in _numbers(others.again).items():
            if number != mine[name]:
                notes.append(
                    f"The script is not deterministic in what it does: a second rehearsal has {number:,} {name}, and "
                    f"the first has {mine[name]:,}"
                )
                break
    elsewhere: dict[str, str] = {}
    for asked, answer_of_it, journal_of_it in others.turned:
        theirs = _numbers(journal_of_it)
        moved = [
            f"{theirs[name]:,} {name} in place of {mine[name]:,}" for name in COMPARED if theirs[name] != mine[name]
        ]
        answers = " and ".join(f"{answer} ({counted(often, 'time')})" for answer, often in asked.answers.most_common())
        if journal_of_it.end == CUT:
            moved = ["the script does not come to its end"]
        elif journal_of_it.end in (FAILED, REFUSED):
            moved = [] if _only_guards_a_division(asked.place, journal_of_it) else ["the script ends there"]
        elif not moved:
            moved = _other_rates(journal, journal_of_it)
        if moved:
            other = f"with {answer_of_it} each time" if asked.answers[answer_of_it] else "with the other answer"
            holds = f"These counts hold while {asked.place} goes on answering {answers}"
            elsewhere[holds] = f"{elsewhere.get(holds, holds)}; {other}: {', '.join(moved)}"
    notes += elsewhere.values()
    if others.unplayed:
        places = [one.place for one in others.unplayed]
        why = "" if others.in_time else ", as the seconds given were over"
        notes.append(f"What the script does with another answer in {first_of(places, 20)} was not rehearsed{why}")
    return notes


def _other_rates(journal: Journal, turned: Journal) -> list[str]:
    """The first step whose rate is another one, of two plays that count alike."""
    for step, (mine, theirs) in enumerate(zip(journal.rates(), turned.rates(), strict=False), start=1):
        for rate, other in zip(mine, theirs, strict=False):
            if rate != other:
                return [f"optimizer step {step:,} has a rate of {other:g} in place of {rate:g}"]
    return []


def _only_guards_a_division(place: str, turned: Journal) -> bool:
    """Whether a line asks so that it need not divide by 0, as it does where it is answered the other way round."""
    file, _, line = place.partition(",")[0].rpartition(":")
    return "ZeroDivisionError" in turned.says and f"  {Path(file).name}, line {line}:" in turned.says


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
    try:
        lines = Path(journal.output).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(["\nIts output ends with:", *(f"  {line}" for line in lines[-LINES_OF_OUTPUT:])]) if lines else ""
