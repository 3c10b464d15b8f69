"""window, where a module's own code steps (manual optimization): what each of its updates is made of.

Its gradient cannot be held against that of one big batch, as nobody but the code knows when it steps. But each backward
pass can be followed into the gradients that a step applies. What is found there: a pass that an earlier step has also
applied, four mean losses that nobody has divided by four, or passes that are left over from the epoch before.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from course_lib._words import counted, first_of
from rehearse.checks.applied import TOLERANCE, Step
from rehearse.checks.followed import HEAD, FollowedBatches, Loss, followed_batches
from rehearse.report import Judgement, not_applicable, not_judged
from rehearse.runs.run import TrainingRun


def judge_own_windows(run: TrainingRun) -> Callable[[Path], Judgement]:
    """A trial: run some micro-batches of two epochs, and follow each backward pass into the steps."""

    def trial(folder: Path) -> Judgement:
        followed = followed_batches(run, folder)
        if not followed.applied.steps:
            return not_judged("window", f"no optimizer stepped in {_told(len(followed.sizes))}")
        return judge_steps(followed)

    return trial


class Unknown(Exception):
    """Why the windows of an optimizer are not judged."""


CHANGED = "the gradients are changed between the backward passes and the step, as by clipping"


@dataclass(frozen=True)
class AppliedWindow:
    """What one step was made with."""

    batches: tuple[tuple[int, int], ...]
    """Epoch and number of each micro-batch."""
    sums: tuple[float, ...]
    """For each term of the loss: what the micro-batches count together. 1 is a mean, their number a sum."""
    alike: bool = True
    """Whether each of them counts the same."""
    changed: bool = False
    """Whether somebody multiplied the gradients before the step."""

    @property
    def carried(self) -> int:
        """Micro-batches of an epoch before the step's own."""
        return sum(epoch < self.batches[-1][0] for epoch, _ in self.batches)

    @property
    def averages(self) -> bool:
        return any(_close(total, 1) for total in self.sums)

    @property
    def adds_up(self) -> bool:
        return any(_close(total, len(self)) for total in self.sums)

    def is_part_of(self, other: AppliedWindow) -> bool:
        """Whether each micro-batch counts as much as those of the other."""
        share = len(self) / len(other)
        return all(_close(mine, share * its) for mine, its in zip(self.sums, other.sums, strict=True))

    def __len__(self) -> int:
        return len(self.batches)


def judge_steps(followed: FollowedBatches) -> Judgement:
    """Say what is wrong with the steps of each optimizer."""
    steps = followed.applied.steps
    for step in steps:
        if step.again:
            return _applied_again([s for s in steps if s.optimizer == step.optimizer])
    for zeroed in (_zeroed_too_early, _zeroed_at_the_end):
        judgement = zeroed(followed)
        if judgement.findings:
            return judgement
    for optimizer in sorted({step.optimizer for step in steps}):
        try:
            judgement.add(_of_optimizer([step for step in steps if step.optimizer == optimizer], followed))
        except Unknown as why:
            judgement.add(not_applicable("window", str(why)))
    if judgement.findings:
        judgement.not_judged.clear()
    return judgement


def _of_optimizer(steps: list[Step], followed: FollowedBatches) -> Judgement:
    if not all(step.passes for step in steps):
        raise Unknown("the module's own code sets the gradients")
    if silent := set(followed.sizes) - _of_passes(followed):
        raise Unknown(
            f"{_told(len(silent))} of {len(followed.sizes)} made no backward pass: a loss that is added to that of "
            "another one is not seen"
        )
    lengths = Counter(len(_micro_batches(step)) for step in steps)
    if max(lengths) == 1:
        return Judgement()  # what the losses of one micro-batch weigh is a choice
    within = Counter(len(_micro_batches(step)) for step in steps if len({one.epoch for one in step.passes}) == 1)
    usual = max(within or lengths, key=lambda length: (within[length], length))
    judgement = Judgement()
    if not followed.ends or (followed.left_out and HEAD % usual):
        judgement.notes.append(f"window: with windows of {usual} micro-batches, the end of an epoch was not tried")
    if followed.left_out and HEAD % usual:
        steps = list(itertools.takewhile(_within_head, steps))
        if not steps:
            raise Unknown(f"a window holds more micro-batches than are tried ({HEAD})")
    places = {one.place for step in steps for one in step.passes}
    if len(places) > 1 or any(len(_micro_batches(step)) < len(step.passes) for step in steps):
        raise Unknown("a step applies gradients of several losses")
    [place] = places
    constant = _constant_factors(followed, place)
    windows = [_window(step, constant) for step in steps]
    kind = _kind(followed, place)
    judgement.add(_leaked(windows, usual))
    if judgement.findings:
        windows = [window for window in windows if not window.carried or len(window) <= usual]
    if kind == "mean":
        judgement.add(_of_means(windows, usual, followed))
    elif kind != "sum" and not judgement.findings:
        raise Unknown("whether the loss is a mean over the samples could not be seen")
    return judgement


def _within_head(step: Step) -> bool:
    return all(one.epoch == 0 and one.batch < HEAD for one in step.passes)


def _micro_batches(step: Step) -> tuple[tuple[int, int], ...]:
    return tuple(sorted({(one.epoch, one.batch) for one in step.passes}))


def _constant_factors(followed: FollowedBatches, place: int) -> list[list[bool]]:
    """For each factor of each term: whether it is a constant, and not the number of samples."""
    of_one, of_two = _losses_at(followed, place)
    if of_one.factors is None or of_two.factors is None:
        raise Unknown("the loss is multiplied by something else than a constant number")
    if list(map(len, of_one.factors)) != list(map(len, of_two.factors)):
        raise Unknown("the loss is made in another way for a batch of twice the size")
    constant = []
    for once, twice in zip(of_one.factors, of_two.factors, strict=True):
        constant.append([_close(one, two) for one, two in zip(once, twice, strict=True)])
        for one, two in zip(once, twice, strict=True):
            if not _close(one, two) and not (_close(one, 1 / followed.size) and _close(two, 0.5 / followed.size)):
                raise Unknown("the loss is divided by a number that depends on the batch, and is not its size")
    return constant


def _kind(followed: FollowedBatches, place: int) -> str:
    """Whether the loss is a ``"mean"`` or a ``"sum"`` over the samples; empty where it is neither."""
    of_one, of_two = (loss.value for loss in _losses_at(followed, place))
    if not of_one:
        return ""
    if _close(of_two, of_one):
        return "mean"
    return "sum" if _close(of_two, 2 * of_one) else ""


def _losses_at(followed: FollowedBatches, place: int) -> tuple[Loss, Loss]:
    if place >= min(len(followed.of_one), len(followed.of_two)):
        raise Unknown("training_step could not be called once more, with a batch of twice the size")
    return followed.of_one[place], followed.of_two[place]


def _window(step: Step, constant: list[list[bool]]) -> AppliedWindow:
    if step.factor is None:
        raise Unknown(CHANGED)
    weights = []
    for one in step.passes:
        if one.factors is None or list(map(len, one.factors)) != list(map(len, constant)):
            raise Unknown("the micro-batches of a window make their losses in different ways")
        of_terms = [math.prod(itertools.compress(*term)) for term in zip(one.factors, constant, strict=True)]
        weights.append([step.factor * weight for weight in of_terms])
    return AppliedWindow(
        batches=_micro_batches(step),
        sums=tuple(map(sum, zip(*weights, strict=True))),
        alike=all(_close(mine, its) for other in weights for mine, its in zip(other, weights[0], strict=True)),
        changed=not _close(step.factor, 1),
    )


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE)


def _leaked(windows: Sequence[AppliedWindow], usual: int) -> Judgement:
    """The epochs that begin with gradients of the one before, where all others windows are alike."""
    within = [window for window in windows if not window.carried and len(window) >= usual]
    longer = [window for window in windows if window.carried and len(window) > usual]
    alike = within and all(len(window) == usual and window.is_part_of(within[0]) for window in within)
    if not alike or not longer or not longer[0].is_part_of(within[0]):
        return Judgement()
    window = longer[0]
    says = (
        f"The first update of epoch {window.batches[-1][0]} is made with {len(window)} micro-batches, "
        f"{window.carried} of them left over from the epoch before, and the others with {usual}: its gradient is "
        f"{len(window) / usual:.3g} times as large."
    )
    means = (
        "An epoch's last micro-batches make no step; the next epoch applies them, and at weights that have moved on."
    )
    return Judgement().find("window", says, means, STEP_AT_THE_END)


def _of_means(windows: Sequence[AppliedWindow], usual: int, followed: FollowedBatches) -> Judgement:
    """Of losses that are means: what a window's micro-batches count together."""
    example = next(window for window in windows if len(window) == usual)
    if example.averages == example.adds_up:
        if any(window.changed for window in windows):
            raise Unknown(CHANGED)
        total = ", ".join(f"{total:.3g}" for total in example.sums)
        raise Unknown(f"a window of {usual} micro-batches counts {total} times a mean loss, which may be its weight")
    if example.adds_up:
        return _added_up(usual)
    judgement = Judgement()
    for window in windows:
        sizes = [followed.sizes[batch] for batch in window.batches]
        if window.averages:
            if window.alike and len(set(sizes)) > 1:
                judgement.notes.append(_uneven(sizes))
        elif not window.is_part_of(example):
            raise Unknown("the windows count their micro-batches in different ways")
        elif window.batches[-1] in followed.ends and not window.carried:
            judgement.add(_short(window, usual, sizes))
        elif window == windows[0]:
            judgement.notes.append(f"window: the first step of the run is made with {_told(len(window))}")
        else:
            raise Unknown("the windows hold different numbers of micro-batches, and are divided by one")
    return Judgement(findings=judgement.findings[:1], notes=judgement.notes[:1])


def _told(micro_batches: int) -> str:
    return counted(micro_batches, "micro-batch", "micro-batches")


def _uneven(sizes: Sequence[int]) -> str:
    return (
        f"window: micro-batches of {first_of(sizes)} samples count the same in a window, so a sample of a small one "
        "counts more than a sample of a large one"
    )


CURE = (
    "Divide each loss by the number of micro-batches that its window holds, or use course_lib.accumulation.accumulate "
    "with backward=self.manual_backward."
)


def _applied_again(steps: Sequence[Step]) -> Judgement:
    wrong = [step for step in steps if step.again]
    first, last = wrong[0], wrong[-1]
    again = len({(one.epoch, one.batch) for one in first.again})
    says = f"Gradients are not zeroed after a step: step {first.number} applies those of {_told(again)} once more"
    if last is not first:
        says += f", step {last.number} those of {len({(one.epoch, one.batch) for one in last.again})}"
    return Judgement().find(
        "window",
        f"{says}.",
        "An update is then the sum of old gradients, which were applied already, and new ones.",
        "Call zero_grad before the first backward pass of a window, or after each step.",
    )


STEP_AT_THE_END = (
    "Step at the last micro-batch as well (self.trainer.is_last_batch), and divide by what the window holds."
)


def _of_passes(followed: FollowedBatches) -> set[tuple[int, int]]:
    """The micro-batches that made a backward pass."""
    applied = followed.applied
    passes = applied.zeroed | applied.waiting() | {one for step in applied.steps for one in step.passes}
    return {(one.epoch, one.batch) for one in passes}


def _never_applied(followed: FollowedBatches) -> set[tuple[int, int]]:
    """Micro-batches whose gradients were zeroed before a step was made with them, or are left at the run's end."""
    used = {one for step in followed.applied.steps for one in step.passes}
    lost = (followed.applied.zeroed | (followed.applied.waiting() if followed.whole_run else set())) - used
    return {(one.epoch, one.batch) for one in lost} - {(one.epoch, one.batch) for one in used}


def _zeroed_too_early(followed: FollowedBatches) -> Judgement:
    """Backward passes that no step was made with, though steps were made in later micro-batches."""
    batches = _never_applied(followed)
    if len(batches) < max(2, len(followed.sizes) // 3) or _is_an_end(batches, followed):
        return Judgement()
    return Judgement().find(
        "window",
        f"The gradients of {len(batches):,} of {_told(len(followed.sizes))} are zeroed before a step takes them.",
        "They are computed and thrown away: an update is that of its last micro-batch alone.",
        "Call zero_grad after each step, or before the first backward pass of a window, and not in each micro-batch.",
    )


def _zeroed_at_the_end(followed: FollowedBatches) -> Judgement:
    """The last micro-batches of an epoch, which fill no window."""
    batches = _never_applied(followed)
    usual = max(len(_micro_batches(step)) for step in followed.applied.steps)
    if not _is_an_end(batches, followed) or (followed.left_out and HEAD % usual):
        return Judgement()
    count = len(batches) // len({epoch for epoch, _ in batches})
    which = (
        "The last micro-batch of an epoch makes" if count == 1 else f"The last {count} micro-batches of an epoch make"
    )
    then = "the run ends" if followed.whole_run else "the gradients are zeroed when the next epoch begins"
    return Judgement().find(
        "window",
        f"{which} no step, and {then}.",
        "They are computed and thrown away, in each epoch those of other samples.",
        STEP_AT_THE_END,
    )


def _is_an_end(batches: set[tuple[int, int]], followed: FollowedBatches) -> bool:
    """Whether they are, in each epoch of theirs, all that it has from some micro-batch on."""
    for epoch in {epoch for epoch, _ in batches}:
        lost = {one for one in batches if one[0] == epoch}
        last = {one for one in followed.sizes if one[0] == epoch and one >= min(lost)}
        if lost != last or max(lost) not in followed.ends:
            return False
    return bool(batches)


def _added_up(usual: int) -> Judgement:
    return Judgement().find(
        "window",
        f"A window adds up {usual} mean losses and divides by none: each update is {usual} times that of one big "
        "batch.",
        f"The run trains as if its rate were {usual} times as high, and clipping sees gradients that are too large.",
        CURE,
    )


def _short(window: AppliedWindow, usual: int, sizes: Sequence[int]) -> Judgement:
    share = f"{len(window) / usual:.3g} times"
    return Judgement().find(
        "window",
        f"The last window of an epoch, micro-batches of {first_of(sizes)} samples, steps with {share} the gradient of "
        f"one big batch: it holds {_told(len(window))} and is divided by {usual}.",
        f"Its samples count {share} as much as those of a window of {usual} micro-batches.",
        CURE,
    )
