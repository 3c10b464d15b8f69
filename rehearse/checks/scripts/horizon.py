"""horizon: where each schedule of a rehearsed script ended, and where it meant to end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib._words import counted
from rehearse.checks.horizon import (
    Calls,
    WalkedSchedule,
    faults,
    is_meant_to_end_there,
    said_of_its_function,
)
from rehearse.report import Judgement
from rehearse.scripts.events import Backward, Delivered, Forward, ScheduleStep, StateLoaded, Step
from rehearse.scripts.journal import ENDED, Journal, SchedulePlayed
from rehearse.scripts.windows import passes_of


def judge_horizon(journal: Journal, *, final_lr: float | None = None) -> Judgement:
    judgement = Judgement()
    rates = [rate[0] for rate in journal.rates() if rate]
    if not journal.schedules:
        if _never_stepped(judgement, journal):
            return judgement
        steps = [event for event in journal.events if isinstance(event, Step) and event.rates]
        if len({(step.optimizer, step.rates) for step in steps}) > len({step.optimizer for step in steps}):
            if final_lr is None and _set_by_hand(judgement, steps):
                return judgement
        else:
            how = "steps" if journal.never_stepped else "has"
            judgement.notes.append(f"horizon: the script {how} no schedule, its rate is constant")
    behind = rates[-1:]  # what a decay that ends with the run comes to
    for number, schedule in enumerate(journal.schedules):
        if schedule.follows_metric:
            judgement.notes.append(f"horizon: {schedule.name} follows a metric, which only the run itself shows")
            continue
        calls = _calls(journal, number, schedule)
        behind += [rate[0] for rate in schedule.rates[calls.calls.made : calls.calls.made + 1]]
        heir = _heir(journal, number)
        if heir:
            made = counted(calls.calls.made, "call")
            judgement.notes.append(f"horizon: {schedule.name} ends after {made}, and {heir} goes on behind it")
            continue
        if _is_gone_on_with(journal, schedule.optimizer):
            judgement.notes.append(f"horizon: {schedule.name} is gone on with, by an optimizer whose state was loaded")
            continue
        if _of_an_optimizer_that_never_steps(judgement, journal, schedule, calls.calls.made):
            return judgement
        left_by, late = _left_behind(journal, number, schedule)
        if left_by and _only_rises(schedule, calls.calls.made):
            own = journal.optimizers[schedule.optimizer].name
            judgement.notes.append(
                f"horizon: {schedule.name} only rises while {own} steps, and {left_by} goes on: a test of rates"
            )
            continue
        if late > 1 and _without_its_optimizer(judgement, journal, schedule, left_by, late):
            return judgement
        if _at_its_end(judgement, journal, schedule, calls):
            return judgement
        if _is_stepped_twice(calls):
            judgement.notes.append(f"horizon: {_twice_in_words(schedule, calls)}, and it ends where it is to end")
        elif calls.at_once > 1:
            judgement.notes.append(f"horizon: {_twice_in_words(schedule, calls)}")
    if final_lr is not None and rates and min(abs(rate - final_lr) for rate in behind) > 0.01 * max(rates):
        judgement.find(
            "horizon",
            f"The last step has the rate {rates[-1]:.3g}, and {final_lr:.3g} was expected.",
            "The run does not end with the rate that it was meant to end with.",
            "Change the schedule's horizon or its last rate, or what is expected.",
        )
    return judgement


def _set_by_hand(judgement: Judgement, steps: list[Step]) -> bool:
    """Rates that the script itself sets: whether they still rise at the end, or are in the middle of a fall."""
    most = max({step.optimizer for step in steps}, key=lambda number: sum(step.optimizer == number for step in steps))
    rates: Any = np.array([step.rates[0] for step in steps if step.optimizer == most])
    peak, last, top = float(rates.max()), float(rates[-1]), int(np.argmax(rates))
    share = f"{100 * last / peak:.0f} % of its peak" if peak else "0"
    fall = rates[top:]
    means = "The run ends in the middle of its schedule."
    cure = "Is the number of steps by which the script sets its rate that of the run? Else say what is meant: final_lr."
    if _warms_up_again(judgement, rates):
        return True
    if last == peak and len(rates) > 2 and rates[-1] > rates[-2] > rates[-3]:
        says = (
            f"The rate that the script sets still rises when the run ends, after {len(rates):,} steps, at {last:.3g}."
        )
        judgement.find("horizon", says, means, cure)
        return True
    half, end = len(fall) // 2, max(1, len(fall) // 50)
    if half >= 4 and fall[-1] < fall[-2]:
        before, behind = (fall[0] - fall[half]) / half, (fall[half] - fall[-1]) / (len(fall) - 1 - half)
        now = (fall[-1 - end] - fall[-1]) / end
        # A cosine that comes to its end falls slower and slower; one that is left on its way, faster; a line as ever.
        if last > 0.35 * peak and behind > 0.9 * before and now > 0.5 * behind:
            says = f"The rate that the script sets ends at {last:.3g}, {share}, and falls as fast as before."
            judgement.find("horizon", says, means, cure)
            return True
    judgement.notes.append(f"horizon: the script sets the rate itself: it ends at {last:.3g}, {share}")
    return False


def _warms_up_again(judgement: Judgement, rates: Any) -> bool:
    """Rates that fall at once and rise to that again, more than once: a restart jumps up, and this falls down."""
    falls = [at for at in range(1, len(rates)) if rates[at] < 0.5 * rates[at - 1] and rates[at:].max() >= rates[at - 1]]
    if len(falls) < 2:
        return False
    first = falls[0]
    judgement.find(
        "horizon",
        f"The rate that the script sets falls back {len(falls):,} times and rises again, first at step {first + 1:,}: "
        f"from {rates[first - 1]:.3g} to {rates[first]:.3g}.",
        "A warm-up begins anew, and the run trains with rates that were meant for its beginning.",
        "Is the warm-up counted by the step within an epoch? Then count the steps of the whole run.",
    )
    return True


def _never_stepped(judgement: Judgement, journal: Journal) -> bool:
    """A schedule that was made and forgotten, of an optimizer whose rate stays as it was at first."""
    for schedule in journal.never_stepped:
        steps = [one for one in journal.events if isinstance(one, Step) and one.optimizer == schedule.optimizer]
        if _of_an_optimizer_that_never_steps(judgement, journal, schedule, 0):
            return True
        if len(steps) > 1 and len({step.rates for step in steps}) == 1 and journal.end == ENDED:
            judgement.find(
                "horizon",
                f"{schedule.name} is made and never stepped: the rate is {steps[0].rates[0]:.3g} in all of "
                f"{counted(len(steps), 'step')} of {journal.optimizers[schedule.optimizer].name}.",
                "The rate stays as it is at first, also where that is the beginning of a warm-up.",
                "Call its step() where its horizon counts: behind each optimizer step, or each epoch.",
            )
            return True
    return False


def _of_an_optimizer_that_never_steps(
    judgement: Judgement, journal: Journal, schedule: SchedulePlayed, made: int
) -> bool:
    """A schedule of an optimizer in whose place another one, of a constant rate, steps on the same weights."""
    steps = [event for event in journal.events if isinstance(event, Step)]
    own = schedule.optimizer
    held = set[int]().union(*(held for held in journal.optimizers_of if own in held)) - {own}
    others = [step for step in steps if step.optimizer in held]
    by_optimizer = {(step.optimizer, step.rates) for step in others}
    if own < 0 or journal.end != ENDED or any(step.optimizer == own for step in steps) or len(others) < 2:
        return False
    if len(by_optimizer) > len({number for number, _ in by_optimizer}):
        return False  # the script itself sets the rate there, by what the schedule says maybe
    judgement.find(
        "horizon",
        f"The optimizer of {schedule.name}, {journal.optimizers[own].name} {own}, makes no step; "
        f"{journal.optimizers[others[0].optimizer].name} {others[0].optimizer} steps on the same weights, with the "
        f"rate {others[0].rates[0]:.3g} in all of its steps (calls of the schedule: {made:,}).",
        "The rate of what is trained does not follow the schedule.",
        "Make the schedule of the optimizer that steps, and behind it.",
    )
    return True


@dataclass(frozen=True)
class _Made:
    """How a schedule was stepped."""

    calls: Calls
    at_once: int
    """Calls directly behind another, with nothing computed between the two."""
    steps: int
    """Of its optimizer."""
    places: list[int]
    """The micro-batch of each call."""


def _calls(journal: Journal, number: int, schedule: SchedulePlayed) -> _Made:
    made = before_last = at_once = steps = 0
    computed, places, micro_batch = True, [], 0
    trained = journal.trained()
    for at, event in enumerate(journal.events):
        if isinstance(event, ScheduleStep) and event.schedule == number:
            made, at_once, computed = made + 1, at_once + (not computed), False
            places.append(micro_batch)
        elif isinstance(event, Step) and event.optimizer == schedule.optimizer:
            before_last, steps, computed = made, steps + 1, True
        elif isinstance(event, Forward | Backward):
            computed = True
            micro_batch += isinstance(event, Backward) and not trained
        elif isinstance(event, Delivered):
            micro_batch += at in trained
    return _Made(Calls(made, before_last), at_once, steps, places)


def _heir(journal: Journal, number: int) -> str:
    """The schedule that sets the same optimizer's rates long after this one's last call; empty where none does."""
    mine = journal.schedules[number]
    heir, steps, longest = "", 0, 1  # steps since its last call, and most between two of its calls
    for event in journal.events:
        if isinstance(event, Step):
            steps += event.optimizer == mine.optimizer
        elif isinstance(event, ScheduleStep) and event.schedule == number:
            longest = max(longest, steps)
            heir, steps = "", 0
        elif isinstance(event, ScheduleStep) and steps > 2 * longest:
            other = journal.schedules[event.schedule]
            heir = other.name if other.optimizer == mine.optimizer else heir
    return heir


def _is_gone_on_with(journal: Journal, optimizer: int) -> bool:
    """Whether, behind its last step, another optimizer is given a state and steps, as in a run that is continued."""
    loaded: set[int] = set()
    goes_on = False
    for event in journal.events:
        if isinstance(event, StateLoaded):
            loaded.add(event.optimizer)
        elif isinstance(event, Step) and event.optimizer == optimizer:
            loaded, goes_on = set(), False
        elif isinstance(event, Step):
            goes_on |= event.optimizer in loaded
    return goes_on


def _left_behind(journal: Journal, number: int, schedule: SchedulePlayed) -> tuple[str, int]:
    """What steps behind its optimizer's last step, and how often the schedule is called from there on."""
    other, late, own_steps, others_steps = "", 0, 0, 0
    for event in journal.events:
        if isinstance(event, Step) and event.optimizer == schedule.optimizer:
            other, late, own_steps, others_steps = "", 0, own_steps + 1, 0
        elif isinstance(event, Step) and event.optimizer < len(journal.optimizers):
            others_steps += 1
            other = journal.optimizers[event.optimizer].name if own_steps and others_steps > 1 else ""
        elif isinstance(event, ScheduleStep) and event.schedule == number and other:
            late += 1
    return other, late


def _only_rises(schedule: SchedulePlayed, made: int) -> bool:
    rates = [rates[0] for rates in schedule.rates[: made + 1] if rates]
    return len(rates) > 2 and all(before < after for before, after in itertools.pairwise(rates))


def _without_its_optimizer(
    judgement: Judgement, journal: Journal, schedule: SchedulePlayed, other: str, late: int
) -> bool:
    """A schedule that goes on behind the last step of its optimizer, for which another steps on the same weights."""
    held = [held for held in journal.optimizers_of if schedule.optimizer in held]
    if not any(len(optimizers) > 1 for optimizers in held):
        return False
    own = journal.optimizers[schedule.optimizer].name
    judgement.find(
        "horizon",
        f"{schedule.name} is stepped {counted(late, 'time')} behind the last step of its optimizer, {own}; {other} "
        "steps there.",
        "The rate of what is trained there does not follow the schedule.",
        "Make a schedule for the optimizer that steps, where that is made.",
    )
    return True


def _is_stepped_twice(made: _Made) -> bool:
    return made.at_once > 0 and 3 * made.at_once >= made.calls.made


def _twice_in_words(schedule: SchedulePlayed, made: _Made) -> str:
    return (
        f"{schedule.name} is stepped {counted(made.calls.made, 'time')}, {made.at_once:,} of them directly behind "
        f"another call, in {counted(made.steps, 'optimizer step')}"
    )


def _at_its_end(judgement: Judgement, journal: Journal, schedule: SchedulePlayed, made: _Made) -> bool:
    rows: dict[Any, Any] = {row: np.array(row) for row in zip(*schedule.rates, strict=True)}
    calls = made.calls
    arrays: Any = tuple(rows.values())
    counts = _units(journal, made).values()
    walked = WalkedSchedule(schedule.name, "step", 1, False, arrays, schedule.refused, schedule.numbers)
    for row in arrays:
        fault = next(faults(walked, row, calls, counts), None)
        if fault is not None and is_meant_to_end_there(walked, fault, calls, counts):
            judgement.notes.append(said_of_its_function(fault, calls))
            continue
        if fault is not None and _is_stepped_twice(made):
            judgement.find(
                "horizon",
                f"{_twice_in_words(schedule, made)}: {fault.says}.",
                "The schedule runs ahead: its rate ends, or turns up again, before the run does.",
                "Is it meant to be stepped in one place? The script calls it, and so may what wraps it.",
                at=made.places[0],
            )
            return True
        if fault is not None:
            meant = _unit_of_horizon(journal, fault.end, made)
            which = f" ({meant[1]:,} is the number of {meant[0]} of the run)" if meant else ""
            if not meant and fault.end == _batches_of_an_epoch(journal) > 1:
                which = f" ({fault.end:,} is the number of batches of one epoch)"
            says = f"{fault.says[0].upper()}{fault.says[1:]}{which}."
            last = min(fault.end or calls.made, calls.made)
            at = made.places[last - 1] if 0 < last <= len(made.places) else None
            judgement.find("horizon", says, fault.means, _cure(journal, made, meant), at=at)
            return True
    return False


def _units(journal: Journal, made: _Made) -> dict[str, int]:
    return {
        "optimizer steps": made.steps,
        "micro-batches": journal.micro_batches(),
        "epochs": len(passes_of(journal, training=True)),
    }


def _batches_of_an_epoch(journal: Journal) -> int:
    epochs = len(passes_of(journal, training=True))
    return journal.micro_batches() // epochs if epochs > 1 else 0


def _unit_of_horizon(journal: Journal, end: int | None, made: _Made) -> tuple[str, int] | None:
    """What the run has as many of as the schedule needs calls, and how many."""
    for unit, number in _units(journal, made).items():
        if end is not None and number > 1 and number != made.calls.made and abs(end - number) <= 1:
            return unit, number
    return None


def _cure(journal: Journal, made: _Made, meant: tuple[str, int] | None) -> str:
    unit = next((unit for unit, number in _units(journal, made).items() if abs(number - made.calls.made) <= 1), "")
    per = f", one for each of its {unit}" if unit else ""
    give = f"Give the schedule the {counted(made.calls.made, 'call')} that the run makes{per}"
    return f"{give}; or step it in each of the {meant[0]}." if meant else f"{give}."
