"""horizon: where each schedule ends when it is stepped through the whole run, and where it meant to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from course_lib._words import counted
from course_lib.preflight.report import Judgement, not_applicable, not_judged
from course_lib.preflight.runs.run import WALK_CALLS, Started, WalkedSchedule
from course_lib.steps import StepPlan


def judge_horizon(started: Started, *, final_lr: float | None = None) -> Judgement:
    """Hold the rates of each schedule against the plan; ``final_lr``: what the last step should be made with."""
    judgement = Judgement()
    plan = started.plan
    if plan is None:
        judgement.add(not_applicable("horizon", started.why_no_plan))
        return judgement
    if not started.schedules:
        judgement.notes.append("horizon: the run has no schedule, its rate is constant")
    for schedule in started.schedules:
        if schedule.follows_metric:
            judgement.notes.append(f"horizon: {schedule.name} follows a metric, which only the run itself shows")
            continue
        calls = calls_of(schedule, plan)
        if calls is None:
            judgement.add(not_judged("horizon", f"a run of {plan.total_steps:,} steps is too long to be walked"))
            continue
        _judge_schedule(judgement, started, schedule, plan, calls, final_lr)
    return judgement


@dataclass(frozen=True)
class Calls:
    """How often a run steps a schedule."""

    made: int
    before_last_step: int
    """When the last optimizer step is made: the rate of that step."""


def calls_of(schedule: WalkedSchedule, plan: StepPlan) -> Calls | None:
    """Count them as a Trainer makes them: after a window, or an epoch, whose number the frequency divides."""
    if plan.total_steps > WALK_CALLS:
        return None
    if schedule.interval == "epoch":
        # Epochs: the last step has the rate that the ends of all epochs before its own have made.
        before_last = plan.windows[-1].epoch if plan.total_steps else 0
        return Calls(plan.epochs_completed // schedule.frequency, before_last // schedule.frequency)
    if schedule.frequency == 1:
        return Calls(plan.total_steps, max(0, plan.total_steps - 1))
    # A Trainer holds the frequency against the micro-batches of the epoch that are done (batch_idx + 1).
    made = [window.stop % schedule.frequency == 0 for window in plan.windows]
    return Calls(sum(made), sum(made[:-1]))


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
        wrong = next(faults(schedule, rates, calls), None)
        if wrong is None:
            if final_lr is not None and abs(last - final_lr) > 0.01 * max(rates):
                judgement.add(_not_as_expected(schedule, last, final_lr, calls))
                return
            continue
        # One cause is one finding: a run that another setting cuts short has its finding there.
        for other in started.other_plans.values():
            longer = calls_of(schedule, other)
            if longer is not None and next(faults(schedule, rates, longer), None) is None:
                return
        judgement.add(_not_at_its_end(schedule, wrong, calls, plan))
        return


@dataclass(frozen=True)
class Fault:
    """What is wrong with a schedule in a run: the call at which it ends by itself, and what that is."""

    end: int
    says: str
    means: str


def faults(schedule: WalkedSchedule, rates: Sequence[float], calls: Calls) -> Iterator[Fault]:
    """What is wrong with these rates in a run of so many calls, the gravest first."""
    used = calls.before_last_step + 1
    if schedule.refused and len(rates) <= calls.made:
        held = len(rates) - 1
        yield Fault(
            held,
            f"{schedule.name} ends after {counted(held, 'call')} and raises at the next; the run makes {calls.made:,}",
            "The run ends with an exception on its way.",
        )
        return
    if schedule.cycles or used < 2:
        return
    end = end_of(rates, raised=bool(schedule.refused))
    last = rates[used - 1]
    if len(set(rates[:used])) == 1 and len(set(rates)) > 1:
        first = next(call for call, rate in enumerate(rates) if rate != rates[0])
        yield Fault(
            end or first,
            f"the rate never changes: {schedule.name} first moves at call {first:,}, and the run makes {calls.made:,}",
            f"The whole run has the rate {last:.3g}.",
        )
    elif end is None:
        return
    elif max(end, _peak(rates)) > used + 1:
        if _peak(rates) >= used and rates[0] < last:
            says = f"the warm-up is longer than the run: the rate still rises when it ends, at {last:.3g}"
        else:
            says = (
                f"the rate ends at {last:.3g}, {100 * last / max(rates):.0f} % of its peak, and not at {rates[end]:.3g}"
            )
        yield Fault(
            end,
            f"{says}: {schedule.name} needs {counted(end, 'call')}, and the run makes {calls.made:,}",
            "The run ends in the middle of its schedule.",
        )
    elif end < used - 2 and last > rates[end]:
        yield Fault(
            end,
            f"the rate falls to {rates[end]:.3g} by call {end:,} and turns up again, to {last:.3g} at the last step: "
            f"{schedule.name} is stepped {calls.made:,} times",
            "The run ends with a rate that throws it out of what the small rates had reached.",
        )
    elif end < used - max(2, used // 100) and _falls_smoothly(rates, end):
        yield Fault(
            end,
            f"the rate reaches its end, {rates[end]:.3g}, at call {end:,} of {calls.made:,}, and stays there",
            "The rest of the run trains with the last rate of the schedule, or with none at all.",
        )


def end_of(rates: Sequence[float], *, raised: bool) -> int | None:
    """The call at which a schedule has arrived: it stays there, turns up after a fall, or raises at the next.

    None where it has no end: it falls on, or it was not seen to end.
    """
    rounding = 1e-7 * max(rates)
    for call in range(_peak(rates) + 1, len(rates) - 1):
        if rates[call + 1] > rates[call] + rounding:
            return call
    settled = len(rates) - 1
    while settled > 0 and rates[settled - 1] == rates[-1]:
        settled -= 1
    # By a factor, until it is rounded to 0.
    falls_for_ever = settled > 0 and 0 < rates[settled - 1] < 1e-30 * max(rates)
    if settled < len(rates) - 1 and not falls_for_ever:
        return settled
    return len(rates) - 1 if raised else None


def _peak(rates: Sequence[float]) -> int:
    """The first call with the highest rate, but for rounding: torch's cosine comes back to a bit more than its peak."""
    return next(call for call, rate in enumerate(rates) if rate >= (1 - 1e-6) * max(rates))


def _falls_smoothly(rates: Sequence[float], end: int) -> bool:
    peak = _peak(rates[: end + 1])
    falls = sum(rates[call + 1] < rates[call] for call in range(peak, end))
    return end - peak >= 3 and falls >= 0.5 * (end - peak)


def _not_at_its_end(schedule: WalkedSchedule, fault: Fault, calls: Calls, plan: StepPlan) -> Judgement:
    says = f"{fault.says}{_what_it_counts(fault.end, plan, schedule)}."
    per_call = "epoch" if schedule.interval == "epoch" else "optimizer step"
    if schedule.interval == "epoch" and fault.end > calls.made and abs(fault.end - plan.total_steps) <= 1:
        cure = 'Lightning steps a schedule once an epoch unless told otherwise: return it with "interval": "step".'
    elif schedule.interval == "step" and fault.end == plan.epochs_completed:
        cure = f'The horizon counts epochs: set "interval": "epoch", or give it {calls.made:,} optimizer steps.'
    else:
        cure = (
            f"Give the schedule the {counted(calls.made, 'call')} that the run makes, one for each {per_call}: "
            "plan_steps(...).total_steps, or trainer.estimated_stepping_batches in configure_optimizers."
        )
    return Judgement().find("horizon", f"{says[0].upper()}{says[1:]}", fault.means, cure)


def _what_it_counts(end: int, plan: StepPlan, schedule: WalkedSchedule) -> str:
    units = {
        "micro-batches of the run": plan.micro_batches,
        "optimizer steps of the run": plan.total_steps,
        "epochs of the run": plan.epochs_completed,
    }
    own = "epochs of the run" if schedule.interval == "epoch" else "optimizer steps of the run"
    for unit, number in units.items():
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
