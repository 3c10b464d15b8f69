"""horizon: where each schedule ends when it is stepped through the whole run, and where it meant to end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from course_lib._words import counted
from course_lib.steps import StepPlan
from rehearse.checks.first_steps import FirstSteps
from rehearse.report import Judgement, not_applicable, not_judged
from rehearse.runs.run import Started
from rehearse.runs.walks import ROUNDING, Rates, WalkedSchedule


def judge_horizon(started: Started, steps: FirstSteps | None, *, final_lr: float | None = None) -> Judgement:
    """Hold the rates of each schedule against the plan.

    ``steps``: the first windows, which show who steps a schedule; None where they could not be run. ``final_lr``: what
    the last step should be made with, or leave behind it.
    """
    plan = started.plan
    judgement = Judgement() if steps is None else _stepped_otherwise(started, steps)
    if judgement.findings:
        return judgement
    by_module = steps is not None and bool(steps.schedules_of_its_own or steps.rates_changed)
    if plan is None:
        if not by_module or "horizon" not in judgement.facts:
            judgement.add(not_applicable("horizon", started.why_no_plan))
        return judgement
    if not started.schedules and not by_module:
        judgement.notes.append("horizon: the run has no schedule, its rate is constant")
    for schedule in started.schedules:
        if schedule.follows_metric:
            judgement.notes.append(f"horizon: {schedule.name} follows a metric, which only the run itself shows")
            continue
        calls = calls_of(schedule, plan)
        if len(schedule.rates[0]) <= calls.before_last_step and not schedule.refused:
            why = f"{len(schedule.rates[0]) - 1:,} of the {calls.made:,} calls of {schedule.name} were made in time"
            judgement.add(not_judged("horizon", why))
            continue
        _judge_schedule(judgement, started, schedule, plan, calls, final_lr)
    return judgement


@dataclass(frozen=True)
class Calls:
    """How often a run steps a schedule."""

    made: int
    before_last_step: int
    """When the last optimizer step is made: the rate of that step."""


def calls_of(schedule: WalkedSchedule, plan: StepPlan) -> Calls:
    """Count them as a Trainer makes them: after a window, or an epoch, whose number the frequency divides."""
    if schedule.interval == "epoch":
        # Epochs: the last step has the rate that the ends of all epochs before its own have made.
        before_last = plan.windows[-1].epoch if plan.total_steps else 0
        return Calls(plan.epochs_completed // schedule.frequency, before_last // schedule.frequency)
    if schedule.frequency == 1:
        return Calls(plan.total_steps, max(0, plan.total_steps - 1))
    # A Trainer holds the frequency against the micro-batches of the epoch that are done (batch_idx + 1).
    made = [window.stop % schedule.frequency == 0 for window in plan.windows]
    return Calls(sum(made), sum(made[:-1]))


def _stepped_otherwise(started: Started, steps: FirstSteps) -> Judgement:
    """Schedules that are stepped by the module's own code, beside the Trainer or alone."""
    judgement = Judgement()
    windows = max(1, steps.windows)
    for name, calls, expected in steps.schedules_stepped:
        if calls > expected:
            by = (
                f"{expected:,} of them by the Trainer"
                if expected
                else "none of them by the Trainer, which steps it too"
            )
            judgement.find(
                "horizon",
                f"{name} is stepped {counted(calls, 'time')} in the first {counted(windows, 'window')}, {by}.",
                "The schedule runs ahead: its rate ends, or turns up again, long before the run does.",
                "Leave out scheduler.step() where the Trainer has the schedule, or use manual optimization and step it "
                "in one place.",
            )
            return judgement
    for schedule, (name, calls) in zip(started.own_schedules, steps.schedules_of_its_own, strict=False):
        batches = (started.batches or 0) * max(0, started.max_epochs)
        total = started.plan.micro_batches if started.plan is not None else batches
        if not calls or schedule.name != name or not total:
            continue
        made = calls * total // max(1, steps.batches)
        counts = Calls(made, max(0, made - 1))
        epochs = max(1, started.max_epochs)
        with_tails = epochs * math.ceil(calls * total / epochs / max(1, steps.batches))
        for rates in schedule.rates:
            last = rates[min(counts.before_last_step, len(rates) - 1)]
            shown = f"{rates[0]:.3g}, {last:.3g} ({name}, stepped by the module's own code)"
            judgement.facts["rate of the first, the last step"] = shown
            wrong = next(faults(schedule, rates, counts), None)
            # A step for the short window at an epoch's end, which the first micro-batches do not show.
            with_tail = Calls(with_tails, max(0, with_tails - 1))
            if wrong is not None and next(faults(schedule, rates, with_tail), None) is not None:
                says = f"{wrong.says[0].upper()}{wrong.says[1:]}, by the module's own code."
                cure = f"Give the schedule the {counted(made, 'call')} that the run makes."
                return judgement.find("horizon", says, wrong.means, cure)
    if steps.rates_changed and not any(calls for _, calls in steps.schedules_of_its_own):
        judgement.notes.append(f"horizon: the module's own code sets the rate ({steps.rates_changed}): not followed")
    return judgement


def _judge_schedule(
    judgement: Judgement,
    started: Started,
    schedule: WalkedSchedule,
    plan: StepPlan,
    calls: Calls,
    final_lr: float | None,
) -> None:
    for rates in schedule.rates:
        last = rates[min(calls.before_last_step, len(rates) - 1)]
        judgement.facts["rate of the first, the last step"] = f"{rates[0]:.3g}, {last:.3g} ({schedule.name})"
        wrong = next(faults(schedule, rates, calls, _counts_of(plan).values()), None)
        if wrong is None:
            behind = rates[min(calls.made, len(rates) - 1)]  # what a decay that ends with the run comes to
            if final_lr is not None and min(abs(last - final_lr), abs(behind - final_lr)) > 0.01 * max(rates):
                judgement.add(_not_as_expected(schedule, last, final_lr, calls))
                return
            continue
        if is_meant_to_end_there(schedule, wrong, calls, _counts_of(plan).values()):
            judgement.notes.append(said_of_its_function(wrong, calls))
            continue
        # One cause is one finding: a run that another setting cuts short has its finding there.
        for other in started.other_plans.values():
            if next(faults(schedule, rates, calls_of(schedule, other), _counts_of(other).values()), None) is None:
                return
        judgement.add(_not_at_its_end(schedule, wrong, calls, plan))
        return


@dataclass(frozen=True)
class Fault:
    """What is wrong with a schedule in a run: the call at which it ends by itself, and what that is."""

    end: int
    says: str
    means: str
    above_its_end: bool = False
    """Whether the rate had begun to fall, and is all that is wrong: some are meant to end so."""


def faults(schedule: WalkedSchedule, rates: Rates, calls: Calls, counts: Iterable[int] = ()) -> Iterator[Fault]:
    """What is wrong with these rates in a run of so many calls, the gravest first.

    ``counts``: of micro-batches, steps and epochs of the run.
    """
    used = calls.before_last_step + 1
    if schedule.refused and len(rates) <= calls.made:
        held = len(rates) - 1
        yield Fault(
            held,
            f"{schedule.name} ends after {counted(held, 'call')} and raises at the next; the run makes {calls.made:,}",
            "The run ends with an exception on its way.",
        )
        return
    if used < 2:
        yield from _at_one_rate(schedule, rates, calls, counts)
        return
    run = rates[:used]
    peak, last = float(run.max()), float(run[-1])
    if not np.isfinite(run).all():
        first = int(np.argmin(np.isfinite(run)))
        yield Fault(
            first,
            f"the rate is {run[first]} from call {first:,} of {calls.made:,} on, by {schedule.name}",
            "The first step with such a rate destroys the weights.",
        )
        return
    if schedule.cycles or peak == 0:
        return
    still_rises = _first_fall(rates, used - 1) if last == peak > rates[0] else 0
    top = still_rises or int(np.argmax(run >= (1 - ROUNDING) * peak))
    end = end_of(rates, peak=top, raised=bool(schedule.refused))
    # The first call from which on, to the run's end, the rate is as good as 0.
    vanished = used - int(np.argmax(run[::-1] > VANISHED * peak))
    if (run == run[0]).all() and (rates != rates[0]).any():
        first = int(np.argmax(rates != rates[0]))
        yield Fault(
            end or first,
            f"the rate never changes: {schedule.name} first moves at call {first:,}, and the run makes {calls.made:,}",
            f"The whole run has the rate {last:.3g}.",
        )
    elif still_rises > used + 1:
        yield Fault(
            max(end or 0, still_rises),
            f"the warm-up is longer than the run: the rate still rises when it ends, at {last:.3g}: {schedule.name} "
            f"needs {counted(max(end or 0, still_rises), 'call')}, and the run makes {calls.made:,}",
            "The run ends in the middle of its schedule.",
        )
    elif vanished < used - max(2, used // 20) and (end is None or end >= vanished):
        yield Fault(
            vanished,
            f"the rate falls to {last:.3g}, and is below {VANISHED:g} of its peak from call {vanished:,} of "
            f"{calls.made:,} on: {schedule.name} is stepped that often",
            "Nothing is trained from there on.",
        )
    elif end is None:
        return
    elif end > used + 1 and last - rates[end] > NEAR * peak:
        yield Fault(
            end,
            f"the rate ends at {last:.3g}, {100 * last / peak:.0f} % of its peak, and not at {rates[end]:.3g}: "
            f"{schedule.name} needs {counted(end, 'call')}, and the run makes {calls.made:,}",
            "The run ends in the middle of its schedule.",
            above_its_end=True,
        )
    elif end < used - 2 and last > rates[end] + NEAR * peak:
        if _starts_again(run[end:], peak):
            return
        yield Fault(
            end,
            f"the rate falls to {rates[end]:.3g} by call {end:,} and turns up again, to {last:.3g} at the last step: "
            f"{schedule.name} is stepped {calls.made:,} times",
            "The run ends with a rate that throws it out of what the small rates had reached.",
        )
    elif end < used - max(2, used // 100) and _falls_smoothly(run, end) and run[end:].max() <= run[end] + NEAR * peak:
        yield Fault(
            end,
            f"the rate reaches its end, {rates[end]:.3g}, at call {end:,} of {calls.made:,}, and stays there",
            "The rest of the run trains with the last rate of the schedule, or with none at all.",
        )


def _at_one_rate(schedule: WalkedSchedule, rates: Rates, calls: Calls, counts: Iterable[int]) -> Iterator[Fault]:
    """A schedule that the last step has not seen move, and that ends with the run's steps, micro-batches or epochs.

    It is stepped by epochs, in a run of one; a horizon that is none of the run's numbers says nothing there.
    """
    end = end_of(rates, peak=_first_fall(rates, 0), raised=bool(schedule.refused))
    if end is not None and end > calls.made + 1 and any(abs(end - count) <= 1 for count in counts):
        yield Fault(
            end,
            f"the rate never changes: {schedule.name} needs {counted(end, 'call')}, and the run makes {calls.made:,}",
            f"The whole run has the rate {rates[0]:.3g}.",
        )


def is_meant_to_end_there(schedule: WalkedSchedule, fault: Fault, calls: Calls, counts: Iterable[int]) -> bool:
    """Whether the run ends ahead of the schedule's end, at a number that its own function goes by.

    ``counts``: of micro-batches, steps and epochs of the run. A function that ends with one of them goes by that one: a
    product of epochs and batches holds the number of epochs as well.
    """
    if not fault.above_its_end or calls.made not in schedule.numbers:
        return False
    return all(abs(fault.end - count) > 1 for count in counts)


def said_of_its_function(fault: Fault, calls: Calls) -> str:
    return f"horizon: {fault.says}; its function goes by {calls.made:,}, so it seems to be meant to end there"


VANISHED = 1e-8
"""Of the peak: a step of such a rate changes no weight in single precision."""
NEAR = 1e-3
"""Of the peak: rates that lie closer are taken for one."""


def end_of(rates: Rates, *, peak: int, raised: bool) -> int | None:
    """The call at which a schedule has arrived: it stays there, turns up after a fall, or raises at the next.

    ``peak``: the first call with the highest rate, of the run, or behind it where the rate still rises then. None where
    the schedule has no end: it falls on, or it was not seen to end.
    """
    after = rates[peak:]
    rounding = ROUNDING * float(after[0])
    up = after > np.minimum.accumulate(after) + rounding
    if up.any():
        return peak + int(np.argmin(after[: int(np.argmax(up))]))
    at_zero = np.flatnonzero((np.abs(after[:-1]) <= rounding) & (after[1:] < -rounding))
    if at_zero.size:  # a line that comes to 0, and that nobody has stopped there
        return peak + int(at_zero[0])
    changes = np.flatnonzero(after[1:] != after[:-1])
    settled = int(changes[-1]) + 1 if changes.size else 0
    # By a factor, until it is rounded to 0.
    falls_for_ever = settled > 0 and 0 < after[settled - 1] < 1e-30 * float(after[0])
    if settled < len(after) - 1 and not falls_for_ever:
        return peak + settled
    return len(rates) - 1 if raised else None


def _first_fall(rates: Rates, call: int) -> int:
    """The call after this one up to which the rates rise."""
    rises = np.diff(rates[call:]) > 0
    return call + (len(rises) if rises.all() else int(np.argmin(rises)))


def _starts_again(rates: Rates, peak: float) -> bool:
    """Whether a rate that has come to its end jumps back to a high one: restarts, as somebody asked for."""
    return len(rates) > 1 and float(np.diff(rates).max()) > 0.8 * peak


def _falls_smoothly(rates: Rates, end: int) -> bool:
    peak = int(np.argmax(rates >= (1 - ROUNDING) * rates.max()))
    falls = int((np.diff(rates[peak : end + 1]) < 0).sum())
    return end - peak >= 3 and falls >= 0.5 * (end - peak)


def _not_at_its_end(schedule: WalkedSchedule, fault: Fault, calls: Calls, plan: StepPlan) -> Judgement:
    says = f"{fault.says}{_what_it_counts(fault.end, plan, schedule)}."
    per_call = "epoch" if schedule.interval == "epoch" else "optimizer step"
    if schedule.interval == "epoch" and fault.end > calls.made and abs(fault.end - plan.total_steps) <= 1:
        cure = (
            'Does "interval": "step" stand inside the dict under "lr_scheduler", beside "scheduler"? Lightning steps a '
            "schedule once an epoch otherwise."
        )
    elif schedule.interval == "step" and fault.end == plan.epochs_completed:
        cure = f'The horizon counts epochs: set "interval": "epoch", or give it {calls.made:,} optimizer steps.'
    else:
        cure = (
            f"Give the schedule the {counted(calls.made, 'call')} that the run makes, one for each {per_call}: "
            "plan_steps(...).total_steps, or in a Trainer trainer.estimated_stepping_batches."
        )
    return Judgement().find("horizon", f"{says[0].upper()}{says[1:]}", fault.means, cure)


def _counts_of(plan: StepPlan) -> dict[str, int]:
    return {
        "micro-batches of the run": plan.micro_batches,
        "optimizer steps of the run": plan.total_steps,
        "epochs of the run": plan.epochs_completed,
    }


def _what_it_counts(end: int, plan: StepPlan, schedule: WalkedSchedule) -> str:
    own = "epochs of the run" if schedule.interval == "epoch" else "optimizer steps of the run"
    for unit, number in _counts_of(plan).items():
        if unit != own and number == end and number > 1:
            return f" ({end:,} is the number of {unit})"
    return ""


def _not_as_expected(schedule: WalkedSchedule, last: float, final_lr: float, calls: Calls) -> Judgement:
    return Judgement().find(
        "horizon",
        f"The last step has the rate {last:.3g}, and {final_lr:.3g} was expected: {schedule.name} is stepped "
        f"{counted(calls.made, 'time')}.",
        "The run does not end with the rate that it was meant to end with.",
        "Change the schedule's horizon or its last rate, or what is expected.",
    )
