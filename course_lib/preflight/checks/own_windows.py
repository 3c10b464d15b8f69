"""window, where a module's own code steps (manual optimization): what each of its updates is made of.

Its gradient cannot be held against that of one big batch, as nobody but the code knows when it steps. But each backward
pass can be followed into the gradients that a step applies. What is found there: a pass that an earlier step has also
applied, four mean losses that nobody has divided by four, or passes that are left over from the epoch before.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from course_lib._words import counted, first_of
from course_lib.preflight.checks.applied import TOLERANCE, Applied, Factors, Step, factors_of
from course_lib.preflight.checks.window import MOST_BATCHES, put_together, size_of, stop_drawing
from course_lib.preflight.report import Judgement, not_applicable, not_judged
from course_lib.preflight.runs.run import Enough, TrainingRun, seed_as_another_process

HEAD = MOST_BATCHES // 2
"""Micro-batches of a long epoch that are run before its end is: a multiple of most windows."""
MOST_RUN = MOST_BATCHES + HEAD
"""Micro-batches that are run at most."""
MOST_LEFT_OUT = 10_000
"""Micro-batches of an epoch up to which its end is run; those in between take a Trainer a moment each."""


@dataclass
class FollowedBatches:
    """Some micro-batches of two epochs, and the steps that their backward passes were followed into."""

    applied: Applied = field(default_factory=Applied)
    first: Any = None
    """The first micro-batch of all, once it has begun."""
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Samples by epoch and micro-batch."""
    of_one: list[Loss] = field(default_factory=list)
    """The losses that training_step gives to its backward passes, of one micro-batch."""
    of_two: list[Loss] = field(default_factory=list)
    """The same of that micro-batch twice in one."""
    size: int = 0
    """Of that micro-batch."""
    left_out: int = 0
    """Micro-batches of an epoch that were not run, after the first :data:`HEAD`."""
    ends: set[tuple[int, int]] = field(default_factory=set)
    """The last micro-batch of each epoch that was run to its end."""


@dataclass(frozen=True)
class Loss:
    """What was handed to a backward pass."""

    value: float
    factors: Factors | None


def judge_own_windows(run: TrainingRun) -> Callable[[Path], Judgement]:
    """A trial: run some micro-batches of two epochs, and follow each backward pass into the steps."""

    def trial(folder: Path) -> Judgement:
        followed = _followed(run, folder)
        if not followed.applied.steps:
            return not_judged("window", f"no optimizer stepped in {_told(len(followed.sizes))}")
        return judge_steps(followed)

    return trial


def _followed(run: TrainingRun, folder: Path) -> FollowedBatches:
    followed = FollowedBatches()
    # Clipping would hide by what the gradients are divided.
    run.model.clip_gradients = lambda *_, **__: None
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(torch.nn.utils, name, lambda *_, **__: torch.zeros(()))

    def few(loader: Any) -> Any:
        batches = None if run.settings.is_limited or run.settings.overfits else _all_batches(loader)
        if batches is None or len(batches) <= MOST_BATCHES:
            return None
        left = len(batches) % HEAD
        followed.left_out = len(batches) - HEAD - left
        # A Trainer passes over a batch that is None; the others keep their numbers.
        picked = [*batches[:HEAD], *([] for _ in range(followed.left_out)), *batches[len(batches) - left :]]
        collate = loader.collate_fn
        return DataLoader(
            loader.dataset, batch_sampler=picked, collate_fn=lambda samples: collate(samples) if samples else None
        )

    def begin(trainer: Any, model: Any) -> None:
        if followed.left_out and len(run.loaders()) > 1:
            raise ValueError("several loaders with more micro-batches than are tried")

    def begin_batch(trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        applied = followed.applied
        applied.epoch, applied.batch = trainer.current_epoch, batch_idx
        applied.watch(trainer.optimizers)
        if not followed.sizes:
            followed.first = batch
        followed.sizes[trainer.current_epoch, batch_idx] = size_of(batch)

    def end_batch(trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        of_epoch = sum(epoch == trainer.current_epoch for epoch, _ in followed.sizes)
        if of_epoch >= (HEAD if trainer.current_epoch else MOST_BATCHES):
            raise Enough

    def end_epoch(trainer: Any, model: Any) -> None:
        followed.ends.add(max(place for place in followed.sizes if place[0] == trainer.current_epoch))
        if trainer.current_epoch:
            raise Enough

    with followed.applied.watching():
        run.start(
            folder,
            prepare_loader=few,
            on_train_start=begin,
            on_train_batch_start=begin_batch,
            on_train_batch_end=end_batch,
            on_train_epoch_end=end_epoch,
        )
    if followed.sizes:
        stop_drawing(run.model)
        followed.size = size_of(followed.first)
        followed.of_one = _losses(run, followed.first)
        with contextlib.suppress(ValueError):
            followed.of_two = _losses(run, put_together([followed.first] * 2))
    return followed


def _all_batches(loader: Any) -> list[Any] | None:
    """The indices of an epoch; ``None`` where they cannot be had, or are too many."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    batches = list(itertools.islice((list(batch) for batch in loader.batch_sampler), MOST_LEFT_OUT + 1))
    return batches if len(batches) <= MOST_LEFT_OUT else None


def _losses(run: TrainingRun, batch: Any) -> list[Loss]:
    """The losses that training_step hands to its backward passes, none of which is made."""
    losses, model = [], run.model

    def keep(tensors: Any, *_: Any, **__: Any) -> None:
        if not isinstance(tensors, Tensor):
            raise TypeError("several losses in one backward pass")
        losses.append(Loss(tensors.item(), factors_of(tensors)))

    for parameter in model.parameters():
        parameter.grad = None  # no optimizer steps then
    attributes, backward = dict(vars(model)), torch.autograd.backward
    torch.autograd.backward = keep
    seed_as_another_process(0)
    try:
        with contextlib.suppress(Exception):  # own code may want the gradients
            run.training_step(model, batch)
    finally:
        torch.autograd.backward = backward
        vars(model).clear()
        vars(model).update(attributes)  # its counters
    return losses


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
    judgement = _zeroed_too_early(followed)
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
    cure = (
        "Step at the last micro-batch as well (self.trainer.is_last_batch) and divide by what the window holds, or "
        "call zero_grad when an epoch begins."
    )
    return Judgement().find("window", says, means, cure)


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


def _zeroed_too_early(followed: FollowedBatches) -> Judgement:
    """Backward passes that no step was made with, though steps were made in later micro-batches."""
    applied = followed.applied
    used = {one for step in applied.steps for one in step.passes}
    lost = applied.zeroed - used
    batches = {(one.epoch, one.batch) for one in lost} - {(one.epoch, one.batch) for one in used}
    if len(batches) < max(2, len(followed.sizes) // 3):
        return Judgement()
    return Judgement().find(
        "window",
        f"The gradients of {len(batches):,} of {_told(len(followed.sizes))} are zeroed before a step takes them.",
        "They are computed and thrown away: an update is that of its last micro-batch alone.",
        "Call zero_grad after each step, or before the first backward pass of a window, and not in each micro-batch.",
    )


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
