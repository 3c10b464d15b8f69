"""Is a run right, before it costs a night?

Most mistakes between samples and optimizer raise nothing: the run is shorter than its schedule, two ranks train the
same samples, every epoch has one order. The rule: *try it on a copy, and count.*

    report = rehearse(trainer, model, data)
    print(report)  # findings with their numbers, what could not be judged, and the run's facts

What is tried stands in ``checks``, a file for each; on what, in ``runs``: a Trainer's run, and the copies of it that
the trials are made on.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rehearse._checkpoints import is_by_the_author
from rehearse._own_files import landlock_version
from rehearse.checks.bad_step import one_bad_batch
from rehearse.checks.changes import judge_changes
from rehearse.checks.dealing import judge_dealing
from rehearse.checks.dealt import Dealt, dealt_to, draws_found
from rehearse.checks.first_steps import first_steps
from rehearse.checks.growth import growth_over_steps
from rehearse.checks.horizon import judge_horizon
from rehearse.checks.last_batch import judge_last_batch, may_be_smaller
from rehearse.checks.length import judge_length, judge_promised_length
from rehearse.checks.no_sync import averages_counted
from rehearse.checks.order import judge_order
from rehearse.checks.restart import judge_restarts
from rehearse.checks.resume import Stop, go_on, judge_resume, stop
from rehearse.checks.scripts.window import judge_own_windows
from rehearse.checks.setup import (
    judge_counting,
    judge_refusal,
    judge_setup,
)
from rehearse.checks.validation import judge_validation, validation_of
from rehearse.checks.window import judge_windows
from rehearse.checks.workers import judge_workers
from rehearse.report import (
    CHAPTERS,
    Judgement,
    Kind,
    NotReady,
    RehearsalReport,
    Unjudged,
    checked,
    guarded,
    not_applicable,
    not_judged,
    report_of,
)
from rehearse.runs.copies import Answer, now_trying, progress_shown, try_on_copies
from rehearse.runs.few_samples import FEWEST, Trial, judged_by, with_few_samples
from rehearse.runs.lightning_run import SHORT_EPOCH, LightningRun, is_trainer
from rehearse.runs.played import judged_as_a_script
from rehearse.runs.run import Settings, Started

CHECKS = tuple(CHAPTERS)
"""The names of the checks, in the order in which they are made."""
STEPPING = ("workers", "window", "no_sync", "bad_step")
"""Those that run a few micro-batches of any run."""
BY_FIRST_STEPS = {"setup", "horizon", *STEPPING, "growth"}
"""Those that ask what the first windows show, or how long a sample takes."""
EPOCHS = 4
"""Epochs that are dealt to the run's own ranks."""
MOST_RANKS = 8
TRIED_WORLD_SIZES = (1, 2, 3)
"""The numbers of ranks that its batches are dealt to, beside its own."""
DEEP = "deep=True (in a shell: --deep)"
EXPECTATIONS = ("final_lr", "frozen", "repeats")


def rehearse(
    trainer: Any,
    model: Any,
    data: Any = None,
    val_dataloaders: Any = None,
    *,
    deep: bool = False,
    expect: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
    allow_unjudged: Collection[str] = (),
    seconds: float = 20.0,
) -> RehearsalReport:
    """Judge a run that is about to start, by trying it on copies; afterwards it is as it was before.

    Args:
        trainer: The Trainer that will fit.
        model: The LightningModule.
        data: A data module, the training loader, or ``None`` where the model has its own. A data module's
            ``prepare_data`` is not called, as it may download: call it before.
        val_dataloaders: As for ``Trainer.fit``. Without them, a validation that neither the data module nor the model
            has loaders for is not tried.
        deep: Try what takes longer as well: growth, and what a checkpoint holds.
        expect: What is meant so: ``final_lr`` (the rate of the last step, or the one that it leaves), ``frozen``
            (prefixes of parameter names that are not to be trained), ``repeats`` (why samples come
            more than once).
        skip: Names of checks to leave out; the report says so.
        allow_unjudged: Names of checks that may fail to be judged, by an error or for time; without it, ``report.ok``
            is None then, and the report names them.
        seconds: The CPU time that each trial may take, with its workers; a check whose trial takes longer, or waits for
            some seconds for what does not come, is not judged.

    Raises:
        ValueError: An argument is no Trainer, or names a check or an expectation that does not exist.
    """
    if not is_trainer(trainer):
        raise ValueError(f"trainer must be a Lightning Trainer, got {type(trainer).__name__}; see rehearse_loop")
    if val_dataloaders is not None and hasattr(data, "prepare_data"):
        raise ValueError(f"val_dataloaders are given beside {type(data).__name__}, which has its own; leave them out")
    expect = checked(CHECKS, EXPECTATIONS, expect, skip, allow_unjudged, seconds)
    if isinstance(expect.get("frozen"), str):
        raise ValueError(f"expect['frozen'] must be prefixes of names in a list, got {expect['frozen']!r}")
    run = LightningRun(trainer, model, data, val_dataloaders)
    began = time.monotonic()
    with progress_shown():
        judgement = _judged_one_by_one(run, deep, expect, skip, seconds)
    if not landlock_version():
        told = "this system has no Landlock: what C code and subprocesses write was not kept from the files here"
        judgement.notes.append(f"setup: {told}")
    return report_of(CHECKS, judgement, skip, allow_unjudged, time.monotonic() - began)


def _judged_one_by_one(
    run: LightningRun, deep: bool, expect: Mapping[str, Any], skip: Collection[str], seconds: float
) -> Judgement:
    now_trying("the start and the first windows (length, horizon, setup)")
    judgement, started, stepped = _judged_by_start(run, expect, skip, seconds)
    if started is None:
        return judgement
    if judgement.refuses:
        rest = [name for name in CHECKS if name != "setup"]
        judgement.not_judged |= dict.fromkeys(rest, Unjudged("the run is refused, see setup", Kind.NOT_APPLICABLE))
        return judgement
    judgement.add(_judged_by_steps(run, started, stepped, deep, expect, skip, seconds))
    if not {"dealing", "order", "length", "changes"} <= set(skip):
        now_trying("what the ranks are given (dealing, order, changes)")
        judgement.add(_judged_by_dealing(run, expect, skip, seconds))
    if "resume" not in skip:
        now_trying("a stop and a resume (resume)")
        judgement.add(_judged_by_resuming(run, deep, seconds))
    return judgement


def assert_ready(trainer: Any, model: Any, data: Any = None, val_dataloaders: Any = None, **options: Any) -> None:
    """Raise the report, as an ``AssertionError``, unless :func:`rehearse` says that the run is ready; for a test.

    A check that failed to be judged is named as well; ``allow_unjudged={"workers"}`` accepts that.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    report = rehearse(trainer, model, data, val_dataloaders, **options)
    if not report.ok:
        raise NotReady(report)


def _judged_by_start(
    run: LightningRun, expect: Mapping[str, Any], skip: Collection[str], seconds: float
) -> tuple[Judgement, Settings | None, Answer]:
    """What the run says when it has started, and what its first windows show, which is the answer, empty if unasked.

    And its settings then; None where it does not start at all, and nothing says that it is meant to be refused.
    """
    if {"length", *BY_FIRST_STEPS} <= set(skip):
        return Judgement(), run.settings, Answer()
    if set(skip) >= BY_FIRST_STEPS:
        [began] = try_on_copies([run.started], seconds=seconds)
        judgement = not_judged("length", began.error) if began.error else guarded("length", judge_length, began.value)
        return judgement, run.settings if began.error else began.value, Answer()
    few = with_few_samples(run, first_steps(run), FEWEST)
    began, stepped = try_on_copies([run.started, few], seconds=seconds)
    judgement = _of_start(run, began, stepped, expect)
    if not stepped.timed_out and (stepped.error or any(found.check == "setup" for found in judgement.findings)):
        [whole] = try_on_copies([first_steps(run)], seconds=seconds)
        if stepped.error or not whole.timed_out:
            stepped = whole
            judgement = _of_start(run, began, stepped, expect)
    if began.error and stepped.error and not stepped.refused:
        return judgement, None, stepped
    return judgement, run.settings if began.error else began.value, stepped


def _of_start(run: LightningRun, began: Answer, stepped: Answer, expect: Mapping[str, Any]) -> Judgement:
    if began.error and stepped.error and not stepped.refused:
        judgement = Judgement(not_judged=dict.fromkeys(CHECKS, Unjudged(stepped.error)))
        prepare = getattr(getattr(run, "data", None), "prepare_data", None)
        if prepare is not None and is_by_the_author(str(prepare.__module__)):
            judgement.notes.append(
                "setup: the data module's prepare_data() was not called; call it before the rehearsal"
            )
        return judgement
    judgement = Judgement()
    if began.error:
        judgement.not_judged |= dict.fromkeys(("length", "horizon"), Unjudged(began.error))
    else:
        seen = None if stepped.error else stepped.value
        judgement.add(guarded("length", judge_length, began.value))
        judgement.add(guarded("horizon", judge_horizon, began.value, seen, final_lr=expect.get("final_lr")))
    if stepped.refused:
        judgement.add(judge_refusal(stepped.refused))
        judgement.refuses = True
    elif stepped.error:
        judgement.add(not_judged("setup", stepped.error))
    else:
        judgement.add(guarded("setup", judge_setup, stepped.value, run.settings, expect.get("frozen", ())))
        if not began.error:
            judgement.add(guarded("setup", judge_counting, stepped.value, began.value))
    return judgement


def _judged_by_steps(
    run: LightningRun,
    started: Settings,
    stepped: Answer,
    deep: bool,
    expect: Mapping[str, Any],
    skip: Collection[str],
    seconds: float,
) -> Judgement:
    """The checks that run a few micro-batches, each in its own way and on its own copy."""
    window = _longest(started.accumulate_grad_batches)
    if started.automatic:
        compared = judge_windows(run, started.accumulate_grad_batches, started.limit_train_batches)
        windows = Trial("window", compared, 4 * window if window > 1 else 0)
    else:
        windows = Trial("window", judged_as_a_script(run, judge_own_windows, seconds))
    trials = [
        windows,
        Trial("workers", judge_workers(run)),
        Trial("no_sync", averages_counted(run), 2 * window),
        Trial("bad_step", one_bad_batch(run), 4),
    ]
    judgement = Judgement()
    if why := run.cannot_count_averages:
        judgement.add(not_applicable("no_sync", why))
    if deep:
        trials.append(Trial("growth", growth_over_steps(run)))
    else:
        judgement.add(not_judged("growth", f"it takes longer: {DEEP}", Kind.LEFT_OUT))
    trials = [trial for trial in trials if trial.check not in {*skip, *judgement.not_judged}]
    if not stepped.hung:  # else they would do nothing either, for as long
        trials += _trials_of_an_epoch(run, started, skip)
    if not trials:
        return judgement
    now_trying(f"some windows, each in another way ({', '.join(dict.fromkeys(trial.check for trial in trials))})")
    size = started.per_rank_batch_size if isinstance(started, Started) else None
    seconds_a_sample = 0.0 if stepped.value is None else stepped.value.seconds_a_sample
    answers = judged_by(run, trials, seconds_a_sample, size, seconds=seconds)
    for trial, answer in zip(trials, answers, strict=True):
        judgement.add(not_judged(trial.check, answer.error) if answer.error else answer.value)
    return judgement


def _longest(window: int | Mapping[int, int]) -> int:
    return window if isinstance(window, int) else max(window.values())


def _trials_of_an_epoch(run: LightningRun, started: Settings, skip: Collection[str]) -> Iterator[Trial]:
    """What an epoch's last batch and its validation show, under setup, length and dealing."""
    if isinstance(started, Started) and may_be_smaller(started) and "setup" not in skip:
        yield Trial("setup", judge_last_batch(run), 1)
    validation = validation_of(run)
    if validation is not None and not {"setup", "length", "dealing"} <= set(skip):
        plan = started.plan if isinstance(started, Started) else None
        epochs = None if plan is None else plan.epochs_completed
        yield Trial("setup", judge_validation(run, validation, epochs), 2 * SHORT_EPOCH)


def _judged_by_dealing(
    run: LightningRun, expect: Mapping[str, Any], skip: Collection[str], seconds: float
) -> Judgement:
    """What 1, 2 and 3 ranks are given, and as many as the run has; without `dealing`, the first of its own ranks."""
    own_size = run.settings.world_size
    own = {own_size} if own_size <= MOST_RANKS else set()
    world_sizes = [] if "dealing" in skip else sorted({*TRIED_WORLD_SIZES} | own)
    ranks = {(rank, world_size) for world_size in world_sizes for rank in range(world_size)}
    places = sorted(ranks | {(0, size) for size in own}, key=lambda place: place[::-1])
    trials = [dealt_to(run, *place, epochs=EPOCHS if place[1] in (1, own_size) else 1) for place in places]
    with draws_found():
        dealt = dict(zip(places, map(_dealt_of, try_on_copies(trials, seconds=seconds)), strict=True))
    judgement = Judgement()
    repeats = bool(expect.get("repeats"))
    for world_size in world_sizes:
        of_ranks = [dealt[rank, world_size] for rank in range(world_size)]
        real = world_size == own_size
        judged = guarded("dealing", judge_dealing, dealt[0, 1], of_ranks, real=real, repeats=repeats)
        if judged.findings and world_size > 1:
            judged = _by_the_seed(run, dealt[0, 1], judged, world_size, seconds)
        judgement.add(judged)
    first = dealt.get((0, own_size))
    if first is None:
        why = Unjudged(f"{own_size} ranks are more than are tried ({MOST_RANKS})")
        judgement.not_judged |= dict.fromkeys(("dealing", "order", "workers", "window", "changes", "setup"), why)
        return judgement
    by_epochs = run.settings.ends_with_its_epochs
    judgement.add(guarded("length", judge_promised_length, first, epochs_end_the_run=by_epochs))
    judgement.add(guarded("order", judge_order, first))
    judgement.add(guarded("changes", judge_changes, first))
    return judgement


def _judged_by_resuming(run: LightningRun, deep: bool, seconds: float) -> Judgement:
    """The loader, stopped and resumed; with ``deep``, the whole run."""
    [stopped] = try_on_copies([stop(run)], seconds=seconds)
    if stopped.error:
        return not_judged("resume", stopped.error)
    judgement = Judgement()
    seen: Stop = stopped.value
    if seen.batches:
        [rest] = try_on_copies([go_on(run, seen)], seconds=seconds)
        judgement.add(
            not_judged("resume", rest.error) if rest.error else guarded("resume", judge_resume, seen, rest.value)
        )
    if judgement.findings or judgement.not_judged:
        return judgement
    if seen.saves and deep:
        places = {"within_epoch": bool(seen.saved_by), "inside_window": seen.inside_window}
        judgement.add(guarded("resume", judge_restarts, run, **places, seconds=seconds))
    elif seen.why_not is not None:
        judgement.not_judged["resume"] = seen.why_not
    elif seen.saves and seen.batches:
        judgement.notes.append(f"resume: the loader was resumed; what else a checkpoint holds is tried with {DEEP}")
    elif seen.saves:
        judgement.add(not_judged("resume", f"what a checkpoint holds takes longer to try: {DEEP}", Kind.LEFT_OUT))
    elif not seen.batches:
        judgement.add(not_applicable("resume", "the run saves no checkpoint"))
    return judgement


def _dealt_of(answer: Answer) -> Dealt:
    return Dealt(None, why_not=Unjudged(answer.error)) if answer.error else answer.value


def _by_the_seed(run: LightningRun, alone: Dealt, judged: Judgement, world_size: int, seconds: float) -> Judgement:
    """Where ranks that are seeded alike are dealt what is right, the fault is that they draw on global generators."""
    trials = [dealt_to(run, rank, world_size, seed=0) for rank in range(world_size)]
    alike = [_dealt_of(answer) for answer in try_on_copies(trials, seconds=seconds)]
    again = judge_dealing(alone, alike, real=True)
    if again.findings or again.not_judged:
        return judged
    [finding] = judged.findings
    said = f"{finding.says[0].lower()}{finding.says[1:]}"
    says = f"The ranks draw their orders on the global generators, which differ: {said}"
    cure = "Draw the order from SeedSequence([seed, epoch]) on every rank, or call seed_everything first."
    return Judgement().find("order", says, finding.means, cure)
