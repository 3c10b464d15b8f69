"""window: what each micro-batch of a rehearsed script counts in its step, what is lost, and what counts twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from course_lib._words import counted
from rehearse.checks.scripts.between import averaged_too_often, clipped
from rehearse.report import Judgement, not_applicable
from rehearse.scripts.events import Backward, Step
from rehearse.scripts.journal import ENDED, Journal, LossWeight
from rehearse.scripts.lapse import MOST_REAL
from rehearse.scripts.windows import OptimizerWindows, Pass, windows_of

ROUNDING = 1e-3


def judge_windows(journal: Journal, *, short_is_a_fault: bool = False) -> Judgement:
    """The first fault that an optimizer's steps have, and what is worth knowing.

    ``short_is_a_fault``: a short window that is divided as the others are; a note else.
    """
    windows = windows_of(journal)
    judgement = Judgement()
    if not any(of.windows for of in windows):
        backwards = journal.counts()["backward passes"]
        if not journal.optimizers or not backwards:
            return not_applicable("window", "the script makes no step of an optimizer")
        return judgement.find(
            "window",
            f"The script makes {counted(backwards, 'backward pass', 'backward passes')} and no optimizer step.",
            "Nothing is trained.",
            "Call optimizer.step() once for each window.",
        )
    if _no_pass(judgement, windows, journal):
        return judgement
    for number, of in enumerate(windows):
        if not of.windows:
            if _never_steps(judgement, of, number, journal):
                return judgement
            continue
        kind, name = journal.optimizers[number].name, journal.optimizer_name(number)
        calls = journal.closure_calls.get(number, [1])
        if max(calls, default=0) > 1 or (not calls and kind == "LBFGS"):
            here = f"{calls[-1]:,} times" if calls else "once, as it first steps behind the real micro-batches"
            judgement.notes.append(
                f"window: a step of {name} calls its closure as often as values ask for, here {here}; the run's own "
                "counts of forwards and backward passes are others"
            )
        if any(isinstance(event, Step) and event.within and event.optimizer == number for event in journal.events):
            judgement.notes.append(f"window: {name} is stepped by another optimizer, whose windows are its own")
            continue
        if of.assigned:
            why = f"the script makes the gradients of {name} itself, of those that its backward passes leave, as for a "
            judgement.add(not_applicable("window", f"{why}projection or a clip of each sample"))
            continue
        if _without_gradients(judgement, of, name, journal):
            return judgement
        if journal.optimizers[number].gradients_of_zero:
            judgement.notes.append(
                f"window: in the real micro-batches, every gradient that {name} holds is 0: their losses teach it "
                "nothing, as a cross-entropy over one class never does"
            )
        if (
            _of_an_evaluation(judgement, of, name)
            or _stale(judgement, of, name)
            or _cleared(judgement, of, name, journal)
            or clipped(judgement, journal, number)
            or _tail(judgement, of, journal)
            or _short_at_the_start(judgement, of, journal)
        ):
            return judgement
        if kind != "LBFGS" and _undivided(judgement, of, journal):
            return judgement
        short = _short(of, journal)
        if short is None:
            _unequal(judgement, of, journal)
        elif short_is_a_fault and short.is_known:
            judgement.find(
                "window",
                f"{short.says[0].upper()}{short.says[1:]}.",
                "An update goes by its samples less than by those of the other windows.",
                "Divide each loss by the micro-batches that its window holds, or use "
                "course_lib.accumulation.accumulate with backward=self.manual_backward.",
                at=short.micro_batch,
            )
            return judgement
        else:
            judgement.notes.append(f"window: {short.says}")
    averaged_too_often(judgement, journal)
    return judgement


def judge_own_windows(journal: Journal) -> Judgement:
    """Of a fit whose module steps by its own code: a short window is a fault there, as it is of a Trainer's own."""
    if not journal.counts()["backward passes"]:
        return not_applicable("window", "the module's own code sets the gradients, or makes none")
    return judge_windows(journal, short_is_a_fault=True)


def _no_pass(judgement: Judgement, windows: list[OptimizerWindows], journal: Journal) -> bool:
    """Steps, and not one backward pass: neither the script nor a closure has made gradients in another way."""
    made = [window for of in windows for window in of.windows]
    if journal.end != ENDED or journal.counts()["backward passes"] or not all(window.cleared for window in made):
        return False
    judgement.find(
        "window",
        f"The script makes {counted(len(made), 'optimizer step')} and no backward pass.",
        "Nothing is trained.",
        "Call loss.backward() ahead of optimizer.step().",
        at=made[0].micro_batch,
    )
    return True


def _never_steps(judgement: Judgement, of: OptimizerWindows, number: int, journal: Journal) -> bool:
    """An optimizer without a step, whose parameters are no other one's and get gradients that no step uses."""
    passes = len(of.lost) + len(of.left_over)
    stepping = {event.optimizer for event in journal.events if isinstance(event, Step)}
    shared = any(number in held and held & stepping for held in journal.optimizers_of)
    if shared or journal.end != ENDED:
        return False
    name = journal.optimizer_name(number)
    if passes < 2:
        if any(isinstance(event, Backward) and number in event.reached for event in journal.events):
            judgement.notes.append(f"window: {name} makes no step, and what it holds gets gradients")
        return False
    judgement.find(
        "window",
        f"{name} makes no step, and {counted(passes, 'backward pass', 'backward passes')} give gradients to what it "
        "holds that no step uses.",
        "What it holds is not trained.",
        "Call its step(); or leave it out, and freeze what it holds (requires_grad_(False)).",
    )
    return True


def _without_gradients(judgement: Judgement, of: OptimizerWindows, name: str, journal: Journal) -> bool:
    """Steps of an optimizer that holds nothing that a pass has reached."""
    if of.lost or journal.end != ENDED or any(window.passes or not window.cleared for window in of.windows):
        return False
    backwards = counted(journal.counts()["backward passes"], "backward pass", "backward passes")
    judgement.find(
        "window",
        f"None of {backwards} gives a gradient to a parameter that {name} holds: all of its "
        f"{counted(len(of.windows), 'step')} are made without any.",
        "Nothing is trained by these steps.",
        "Make the optimizer from the parameters of the model that is trained: behind all that makes the model anew, or "
        "replaces its parameters (another model, load_state_dict(..., assign=True)).",
        at=of.windows[0].micro_batch,
    )
    return True


def _of_an_evaluation(judgement: Judgement, of: OptimizerWindows, name: str) -> bool:
    """Gradients that an evaluation takes, as for an attack on its inputs, and that the next step still finds."""
    found = [window for window in of.windows if any(one.of_evaluation for one in window.passes)]
    if not found:
        return False
    first = [one for one in found[0].passes if one.of_evaluation]
    judgement.find(
        "window",
        f"The gradients of an evaluation are in the step behind it: {len(found):,} of "
        f"{counted(len(of.windows), 'step')} of {name} {'is' if len(found) == 1 else 'are'} made with them, the first "
        f"with those of {counted(len(first), 'backward pass', 'backward passes')} ({first[0].line}).",
        "These steps go by samples that are evaluated.",
        "Call zero_grad() ahead of the first backward pass behind an evaluation; or take there the gradients of the "
        "inputs alone: torch.autograd.grad(loss, inputs).",
        at=found[0].micro_batch,
    )
    return True


def _stale(judgement: Judgement, of: OptimizerWindows, name: str) -> bool:
    stale = [window for window in of.windows if window.stale]
    if not stale or len(stale) < min(2, len(of.windows) - 1) or 2 * len(stale) < len(of.windows):
        return False
    last = stale[-1]
    judgement.find(
        "window",
        f"The gradients of {name} are not cleared: {len(stale):,} of {counted(len(of.windows), 'step')} are made with "
        "gradients that an earlier step has used, the last with those of "
        f"{counted(last.stale, 'backward pass', 'backward passes')} before its own (micro-batch "
        f"{stale[0].micro_batch:,} is the first).",
        "Every step adds the gradients of all steps before it, so that it goes by the sum and not by its own batch.",
        "Call optimizer.zero_grad() once for each step, after it or before the window's first backward pass.",
        at=stale[0].micro_batch,
    )
    return True


def _cleared(judgement: Judgement, of: OptimizerWindows, name: str, journal: Journal) -> bool:
    skipped = MOST_REAL if journal.skipped_by_scaler else 0
    lost = [one for one in of.lost if one.number > skipped]
    used = {one.line for window in of.windows for one in window.passes}
    lost = [one for one in _untrained(lost, of) if one.line in used or not used]
    if not lost:
        return False
    empty = sum(window.cleared for window in of.windows)
    if 2 * empty > len(of.windows):
        says = f"The gradients of {name} are cleared between the backward pass and the step: {empty:,} of "
        says += f"{counted(len(of.windows), 'step')} are made without any."
        means = "Nothing is trained by these steps."
        cure = "Call zero_grad() after the step, or before the window's first backward pass."
    elif _are_tails(lost, of):
        per_epoch = Counter(one.epoch for one in lost)
        epochs = counted(len(per_epoch), "epoch")
        most = max(per_epoch.values())
        lost_ones = f"{counted(most, 'micro-batch', 'micro-batches')} of an epoch {'is' if most == 1 else 'are'} lost"
        says = (
            f"The last {lost_ones}: cleared before a step, in {epochs}, {len(lost):,} in all (micro-batch "
            f"{lost[0].micro_batch:,} is the first)."
        )
        means = "Their samples are computed and never trained in that epoch."
        cure = "Step after the last micro-batch of an epoch as well: if number % k == 0 or number == len(loader)."
    else:
        whole = sum(len(window.passes) for window in of.windows) + len(lost)
        says = (
            f"Of {counted(whole, 'backward pass', 'backward passes')}, {len(lost):,} are cleared before any step uses "
            f"them ({lost[0].line}, micro-batch {lost[0].micro_batch:,} first)."
        )
        means = "A window's step is made with a part of its micro-batches; the others are computed for nothing."
        cure = "Call zero_grad() once for each window, where it steps, and not for each micro-batch."
    judgement.find("window", says, means, cure, at=lost[0].micro_batch)
    return True


def _untrained(passes: list[Pass], of: OptimizerWindows) -> list[Pass]:
    """Those that are no second look at a micro-batch that was trained, as a closure that is called for its loss."""
    first = {one.micro_batch: one.number for window in reversed(of.windows) for one in reversed(window.passes)}
    return [one for one in passes if first.get(one.micro_batch, one.number) >= one.number]


def _are_tails(lost: list[Pass], of: OptimizerWindows) -> bool:
    """Whether what is lost came at the ends of epochs: after the last step there."""
    last_step: dict[int, int] = defaultdict(int)
    for window in of.windows:
        last_step[window.epoch] = max(last_step[window.epoch], window.micro_batch)
    return all(one.micro_batch > last_step[one.epoch] for one in lost)


def _tail(judgement: Judgement, of: OptimizerWindows, journal: Journal) -> bool:
    """Micro-batches that wait for a step behind an epoch's end, or behind the run's."""
    used = {one.line for window in of.windows for one in window.passes}
    # A rehearsal that did not come to its end may have ended within a window.
    left = [one for one in _untrained(of.left_over, of) if one.line in used and journal.end == ENDED]
    over = [window for window in of.windows if len({one.epoch for one in window.passes}) > 1]
    usual = of.usual
    larger = [window for window in over if len(window.passes) > usual]
    if over and not larger:
        ends = f", and the run's last {len(left):,} are in none" if left else ""
        judgement.notes.append(f"window: windows of {usual:,} micro-batches go on across the ends of epochs{ends}")
        return False
    if not left and not larger:
        return False
    says = ""
    if larger:
        tail = len(larger[0].passes) - usual
        says = (
            f"The gradients of an epoch's last {counted(tail, 'micro-batch', 'micro-batches')} wait for a step of the "
            f"next epoch, whose first window holds {len(larger[0].passes):,} in place of {usual:,}"
            f" (micro-batch {larger[0].micro_batch:,})"
        )
    if left:
        end = f"{counted(len(left), 'micro-batch', 'micro-batches')} at the end of the run "
        says = f"{says}, and {end}" if says else end[0].upper() + end[1:]
        says += "are used by no step" if len(left) > 1 else "is used by no step"
    judgement.find(
        "window",
        f"{says}.",
        "These samples count in another step than their own, with another weight, or in none.",
        "Step after the last micro-batch of an epoch as well: if number % k == 0 or number == len(loader).",
        at=(larger or left)[0].micro_batch,
    )
    return True


def _short_at_the_start(judgement: Judgement, of: OptimizerWindows, journal: Journal) -> bool:
    """A step behind the first micro-batches of each epoch, as ``if i % k == 0`` makes it."""
    firsts = {window.epoch: len(window.passes) for window in reversed(of.windows) if window.passes}
    usual = of.usual
    short = [epoch for epoch, length in firsts.items() if length < usual]
    weights = {round(weight.weight * usual, 3) for weight in journal.loss_weights}
    whole = sum(len(window.passes) == usual for window in of.windows)
    if len(short) < len(firsts) or weights != {1.0} or whole <= 2 * len(firsts):
        return False
    held = firsts[short[0]]
    judgement.find(
        "window",
        f"The first step of each epoch is made with {counted(held, 'micro-batch', 'micro-batches')} in place of "
        f"{usual:,}, divided by {usual:,} as the others: its samples count {held / usual:.3g} times as much "
        f"({len(short):,} of {counted(len(of.windows), 'step')}).",
        f"An epoch makes {counted(len(of.windows) // len(firsts), 'step')}, more than its whole windows: what is "
        "planned by their number ends early.",
        f"Is a step meant behind each {usual:,} micro-batches? Then ask for (i + 1) % {usual} == 0.",
        at=of.windows[0].micro_batch,
    )
    return True


def _undivided(judgement: Judgement, of: OptimizerWindows, journal: Journal) -> bool:
    """A loss that is a mean, added up over a window without being divided by its micro-batches."""
    for line in sorted({weight.line for weight in journal.loss_weights}):
        weights = [weight for weight in journal.loss_weights if weight.line == line]
        mine = [[one.micro_batch for one in window.passes if one.line == line] for window in of.windows]
        passes_seen = {weight.backward for weight in weights}
        seen = [
            numbers
            for window, numbers in zip(of.windows, mine, strict=True)
            if any(one.number - 1 in passes_seen for one in window.passes)
        ]
        passes, size = (
            Counter(map(len, of_windows)).most_common(1)[0][0] for of_windows in (seen or mine, map(set, seen or mine))
        )
        if len(weights) != len(passes_seen) or len({round(weight.weight, 6) for weight in weights}) > 1:
            if len(weights) > len(passes_seen):
                _note_terms(judgement, line, weights, size)
            continue
        if passes > size == 1 and weights[0].weight == 1:
            judgement.notes.append(
                f"window: the {passes:,} backward passes of a batch ({line}) are added up, as the losses of several "
                "tasks are; where each is the mean over a part of the batch, divide it by their number"
            )
        loaders = {len({one.loader for one in window.passes if one.line == line}) for window in of.windows}
        if min(loaders) > 1:
            judgement.notes.append(
                f"window: the micro-batches of a step come from {max(loaders)} loaders, and their losses are added up "
                f"({line}), as those of several tasks are"
            )
            continue
        factors = {window.factor for window in of.windows[MOST_REAL:]} or {1.0}
        divisor = 1 / (weights[0].weight * min(factors)) if weights[0].weight and min(factors) else 0.0
        whole = round(divisor)
        if size < 2 or whole < 1 or abs(divisor - whole) > ROUNDING * whole or whole == size:
            continue
        if whole > size:
            judgement.notes.append(
                f"window: the losses of a step's {size:,} micro-batches, which are means, are divided by {whole:,} "
                f"({line}): {size / whole:.3g} times that of one big batch, if that is not the loss's weight"
            )
            continue
        how = "is not divided" if whole == 1 else f"is divided by {whole:,}"
        judgement.find(
            "window",
            f"A step is made with {size:,} micro-batches, and the loss of each, a mean, {how} ({line}): the gradient "
            f"is {size / whole:.3g} times that of one big batch.",
            f"The run trains with {size / whole:.3g} times the rate that is set, where the optimizer does not undo it; "
            "clipping and weight decay go by the large gradient.",
            f"Divide the loss by the window's {size:,} micro-batches before its backward pass.",
            at=of.windows[0].micro_batch,
        )
        return True
    return False


def _note_terms(judgement: Judgement, line: str, weights: list[LossWeight], size: int) -> None:
    """A loss of several means says nothing for sure: one of them may have been multiplied by the window's length."""
    terms = sorted((one.weight for one in weights if one.backward == weights[0].backward), reverse=True)
    if size > 1 and abs(terms[0] * size - 1) > ROUNDING:
        shown = " and ".join(f"{term:.3g}" for term in terms[:4])
        judgement.notes.append(
            f"window: the means in the loss ({line}) count {shown} in each of a step's {size:,} micro-batches; whether "
            f"the loss is divided by {size:,} is not judged"
        )


def _unequal(judgement: Judgement, of: OptimizerWindows, journal: Journal) -> None:
    """Micro-batches of other sizes in one window, each of which counts as much."""
    by_line: dict[str, set[float]] = defaultdict(set)
    for weight in journal.loss_weights:
        by_line[weight.line].add(round(weight.weight, 6))
    if any(len(weights) > 1 for weights in by_line.values()):
        return  # what a mean counts goes by its batch: the script weighs it, by its labels maybe
    for window in of.windows:
        lengths = {one.samples for one in window.passes if one.samples}
        if len(window.passes) > 1 and len(lengths) > 1 and journal.loss_weights:
            shown = ", ".join(str(one.samples) for one in window.passes[:6])
            judgement.notes.append(
                f"window: micro-batches of {shown} samples count alike in one step (micro-batch "
                f"{window.micro_batch:,}), if the script does not weigh them; course_lib.accumulation.accumulate does"
            )
            return


class ShortWindow(NamedTuple):
    says: str
    is_known: bool
    """Whether it was seen by what its losses are divided."""
    micro_batch: int


def _short(of: OptimizerWindows, journal: Journal) -> ShortWindow | None:
    """The first window that is shorter than the others, and divided by as much as far as that is known."""
    usual = of.usual
    shorter = [window for window in of.windows if 0 < len(window.passes) < usual]
    if not shorter or {round(weight.weight * usual, 3) for weight in journal.loss_weights} != {1.0}:
        return None
    later = {weight.backward: weight.weight for weight in journal.later_weights}
    for window in shorter:
        held = len(window.passes)
        known = [later[one.number - 1] for one in window.passes if one.number - 1 in later]
        is_known = len(known) == held
        if is_known and abs(sum(known) - held / usual) > ROUNDING:
            continue  # it is divided by what it holds
        says = (
            f"a short window of {counted(held, 'micro-batch', 'micro-batches')} (micro-batch {window.micro_batch:,}): "
            f"{'' if is_known else 'if it is '}divided by {usual:,} as the others are, its samples count "
            f"{held / usual:.3g} times as much"
        )
        return ShortWindow(says, is_known, window.micro_batch)
    return None
