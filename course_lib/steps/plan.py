"""What a reader asks first: :func:`plan_steps`, and the :class:`StepPlan` that it returns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, SupportsIndex, overload

from course_lib._arguments import int_of_at_least
from course_lib._words import counted
from course_lib.steps.arguments import (
    PerEpoch,
    at_epoch,
    by_epoch,
    checked_short_window,
    checked_stops,
    refuse_within_an_epoch,
)
from course_lib.steps.epochs import EqualEpochs, ShortWindow, Window, end_of_run, in_a_row


def plan_steps(
    num_samples: int | PlansItsSteps,
    batch_size: PerEpoch | PlansItself | None = None,
    *,
    accumulate_grad_batches: PerEpoch = 1,
    world_size: int | None = None,
    drop_last: bool = False,
    max_epochs: int | None = None,
    max_steps: int = -1,
    limit_train_batches: int | float = 1.0,
    short_window: ShortWindow = "step",
    steps_done: int = 0,
    samples_done: int = 0,
) -> StepPlan:
    """Plan the optimizer steps of a run, or of what is left of one.

    Args:
        num_samples: Samples in the dataset. The ranks share them as a Trainer's ``DistributedSampler`` does: each gets
            ``ceil(num_samples / world_size)``, the missing ones repeated from the start. One of your own with
            ``drop_last=True`` gives each the floor: plan ``num_samples // world_size * world_size``.
            Or a batch sampler of ``course_lib.samplers`` or ``course_lib.schedules``, alone, which is asked how it
            deals: batch size and the sampler's own ``tail`` are its own. Where its epochs have different numbers of
            batches, a Trainer runs at most as many as the first has: give that as ``limit_train_batches``. What a
            sampler of your own leaves out is known if it has ``num_samples``.
        batch_size: Samples in a micro-batch of one rank; ``{epoch: size}`` for a loader that is made again
            at those epochs (epoch 0 must be given); or a ``course_lib.schedules.SizeSchedule``, dealt by its sampler.
        accumulate_grad_batches: Micro-batches in a window; ``{epoch: k}`` as ``GradientAccumulationScheduler``
            takes it (1 before the first epoch given). A ``SizeSchedule`` says it itself.
        world_size: Number of ranks; default: 1, or that which a sampler finds.
        drop_last: Whether the *loader* leaves out its short last batch. A short *window* is what ``short_window`` is
            about. On several ranks the samples are dealt first, and each rank drops. accelerate, and with it HF's
            Trainer, drops first and then deals, which may give fewer batches.
        max_epochs: Epochs to run; ``None`` or -1: ``max_steps`` alone ends the run.
        max_steps: Optimizer steps to run; -1: ``max_epochs`` alone ends the run.
        limit_train_batches: A Trainer's flag: an int is a number of batches, a float a share of them.
        short_window: What the micro-batches behind the last full window of an epoch do. ``"step"``, the default: they
            step as a short window (Lightning, for all strategies that leave accumulation to it). ``"carry"``: they
            don't step, and their gradient stays for the first window of the next epoch (the loop
            ``if (i + 1) % k == 0: optimizer.step(); optimizer.zero_grad()``). ``"zero"``: their gradient is zeroed, and
            lost.
        steps_done, samples_done: For a run that goes on, also on another number of ranks: the optimizer steps that it
            has made, and how far it is in the data, over all ranks (``epoch * num_samples`` and the samples of the
            current epoch; a window ended there). ``world_size`` and the batch size are those of the rest. In a Trainer,
            ``course_lib.callbacks.run_so_far(trainer)`` has both.

    An epoch without a batch ends the run, as it ends a Trainer's.

    Raises:
        ValueError: An argument is out of its range; neither ``max_epochs`` nor ``max_steps`` is given; or
            ``max_steps`` can't be reached, because no epoch fills a window.
    """
    done = {
        "steps_done": int_of_at_least(0, "steps_done", steps_done),
        "samples_done": int_of_at_least(0, "samples_done", samples_done),
    }
    run = {"max_epochs": max_epochs, "max_steps": max_steps, "limit_train_batches": limit_train_batches}
    short_window = checked_short_window(short_window)
    if hasattr(num_samples, "plan_steps"):
        if batch_size is not None or drop_last:
            raise ValueError(
                f"{type(num_samples).__name__} says itself how it deals: leave batch_size and drop_last out, got "
                f"{batch_size!r} and {drop_last!r}"
            )
        windows = {"accumulate_grad_batches": accumulate_grad_batches, "short_window": short_window}
        return num_samples.plan_steps(world_size=world_size, **windows, **run, **done)
    world_size = 1 if world_size is None else int_of_at_least(1, "world_size", world_size)
    if batch_size is not None and hasattr(batch_size, "plan"):
        if accumulate_grad_batches != 1 or short_window != "step":
            raise ValueError(
                "a schedule of sizes says its windows itself, and a short one steps: leave accumulate_grad_batches and "
                f"short_window out, got {accumulate_grad_batches!r} and {short_window!r}"
            )
        sampler_tail = "drop" if drop_last else "spread"
        return batch_size.plan(num_samples, world_size=world_size, tail=sampler_tail, **run, **done)
    num_samples = int_of_at_least(1, "num_samples", num_samples)
    batch_sizes = by_epoch("batch_size", batch_size, before_first=None)  # type: ignore[arg-type]
    ks = by_epoch("accumulate_grad_batches", accumulate_grad_batches, before_first=1)
    max_epochs, max_steps, limit_train_batches = checked_stops(max_epochs, max_steps, limit_train_batches)
    epoch, position = divmod(done["samples_done"], num_samples)
    refuse_within_an_epoch(position, num_samples, limit_train_batches, short_window)

    def alike(first_epoch: int, stop_epoch: int | None, position: int) -> EqualEpochs:
        return EqualEpochs(
            first_epoch=first_epoch,
            stop_epoch=stop_epoch,
            num_samples=num_samples - position,
            world_size=world_size,
            per_rank_batch_size=at_epoch(batch_sizes, first_epoch),
            accumulate_grad_batches=at_epoch(ks, first_epoch),
            drop_last=bool(drop_last),
            limit_train_batches=limit_train_batches,
            short_window=short_window,
        )

    return StepPlan.of_spans(
        spans_from(alike, epoch, position, {*batch_sizes, *ks}, max_epochs),
        num_samples=num_samples,
        world_size=world_size,
        drop_last=bool(drop_last),
        short_window=short_window,
        max_epochs=max_epochs,
        max_steps=max_steps,
        **done,
    )


def max_steps_for(
    epochs: int, num_samples: int | PlansItsSteps, batch_size: PerEpoch | PlansItself | None = None, **loader: Any
) -> int:
    """The ``max_steps`` at which a run has made all the optimizer steps of ``epochs`` epochs.

    Takes the keywords of :func:`plan_steps` except the two stops::

        Trainer(max_steps=max_steps_for(10, len(dataset), 64, accumulate_grad_batches=8, world_size=2))
    """
    for stop in ("max_epochs", "max_steps"):
        if stop in loader:
            raise ValueError(f"max_steps_for takes the number of epochs first and no {stop}")
    epochs = int_of_at_least(0, "epochs", epochs)
    return plan_steps(num_samples, batch_size, max_epochs=epochs, **loader).total_steps


def spans_from(
    alike: Callable[[int, int | None, int], EqualEpochs],
    epoch: int,
    position: int,
    changes: Iterable[int],
    max_epochs: int,
) -> list[EqualEpochs]:
    """The epochs of a run from a position on, those between two changes together.

    ``alike`` makes them, from the first to one before the second (``None``: they go on), from a position in the first.
    """
    spans = []
    if position and epoch != max_epochs:
        spans.append(alike(epoch, epoch + 1, position))
        epoch += 1
    first_epochs = [epoch, *sorted(first for first in changes if first > epoch and not 0 <= max_epochs <= first)]
    stop_epochs = [*first_epochs[1:], None if max_epochs == -1 else max(epoch, max_epochs)]
    for first_epoch, stop_epoch in zip(first_epochs, stop_epochs, strict=True):
        spans.append(alike(first_epoch, stop_epoch, 0))
    return spans


@dataclass(frozen=True)
class StepPlan:
    """What :func:`plan_steps` found: the optimizer steps of a run and the micro-batches behind each.

    A value per epoch is an int, or ``{first epoch: value}`` where a schedule changes it on the way. Batches are
    those of one rank; samples are counted over all ranks.
    """

    num_samples: int
    world_size: int
    drop_last: bool
    short_window: ShortWindow
    max_epochs: int
    """-1: no limit."""
    max_steps: int
    """-1: no limit."""
    steps_done: int
    """Optimizer steps before those that are planned; 0 for a run from its start."""
    samples_done: int
    """How far the run is in the data before that, over all ranks."""
    spans: tuple[EqualEpochs, ...]
    """Consecutive epochs that are alike, one entry for each time that something changes."""
    total_steps: int
    """Optimizer steps of the whole run, those done included."""
    epochs_completed: int
    """Epochs in which every planned batch ran; a last epoch that ``max_steps`` cuts short does not count."""
    micro_batches: int
    """Forward passes of one rank in all that is planned."""
    micro_batches_unused: int
    """Those of ``micro_batches`` whose gradient reaches no optimizer step."""

    @classmethod
    def of_spans(cls, spans: Iterable[EqualEpochs], *, max_steps: int, steps_done: int, **told: Any) -> Self:
        """Put the epochs in a row, and count what a run over them does until it stops."""
        row = tuple(in_a_row(spans, steps_done))
        end = end_of_run(row, max_steps)
        return cls(
            spans=row,
            max_steps=max_steps,
            steps_done=steps_done,
            total_steps=end.steps,
            epochs_completed=end.epochs,
            micro_batches=end.micro_batches,
            micro_batches_unused=end.micro_batches - end.micro_batches_stepped,
            **told,
        )

    @property
    def batches_per_epoch(self) -> PerEpoch:
        """Micro-batches that one rank runs in a full epoch."""
        return self._per_epoch([span.batches for span in self.spans])

    @property
    def steps_per_epoch(self) -> PerEpoch:
        """Optimizer steps of a full epoch."""
        return self._per_epoch([span.steps for span in self.spans])

    @property
    def samples_dropped(self) -> PerEpoch:
        """Samples of the dataset that a full epoch leaves out (``drop_last``, a limit, or ``short_window="zero"``)."""
        return self._per_epoch([max(0, span.num_samples - span.samples_stepped) for span in self.spans])

    @property
    def samples_repeated(self) -> PerEpoch:
        """Samples that a full epoch trains twice, because the ranks' shares are padded to equal length."""
        return self._per_epoch([max(0, span.samples_stepped - span.num_samples) for span in self.spans])

    @property
    def windows(self) -> Windows:
        """The window behind each optimizer step that is planned: a lazy sequence."""
        return Windows(self.spans, range(self.steps_done, self.total_steps))

    def progress(self, step: int) -> float:
        """How much of the run is done after so many optimizer steps, from 0 to 1; for a schedule's rate.

        What was done counts by its share of the samples. So a rate that follows the progress goes on where it was, and
        ends where it should, when a run goes on with fewer or more ranks::

            LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * plan.progress(step))))
        """
        planned = self.total_steps - self.steps_done
        if planned <= 0 or step >= self.total_steps:
            return 1.0
        done = self.samples_done / self._samples_at_end() if self.steps_done else 0.0
        if step < self.steps_done:
            return done * step / self.steps_done
        return done + (1 - done) * (step - self.steps_done) / planned

    def batches_in_epoch(self, epoch: int) -> int:
        """Micro-batches that one rank runs in this epoch: 0 ahead of the plan's first one, and behind its last.

        The last epoch may be cut short.
        """
        epoch, per_epoch = int_of_at_least(0, "epoch", epoch), self.batches_per_epoch
        if self.spans and epoch < self.spans[0].first_epoch:
            return 0
        if epoch < self.epochs_completed:
            return per_epoch if isinstance(per_epoch, int) else at_epoch(per_epoch, epoch)
        stopped_inside = epoch == self.epochs_completed and len(self.windows) and self.windows[-1].epoch == epoch
        return self.windows[-1].stop if stopped_inside else 0

    def explain(self) -> str:
        """Say the plan in words, with every number's unit."""
        return "\n".join([*self.epochs_in_words(), *_end_in_words(self)])

    def epochs_in_words(self) -> Iterator[str]:
        """What an epoch is made of, in each span of epochs."""
        ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        for span in self.spans:
            since = f"From epoch {span.first_epoch:,} on: " if len(self.spans) > 1 else ""
            yield (
                f"{since}{counted(span.num_samples, 'sample')} {span.in_words()} make "
                f"{counted(span.batches, 'batch', 'batches')} per epoch{ranks}."
            )
            yield from _windows_in_words(span)

    def table(self) -> str:
        """Show the plan as aligned lines of a name and its value."""
        names = (
            "batches_per_epoch",
            "steps_per_epoch",
            "total_steps",
            "epochs_completed",
            "micro_batches",
            "micro_batches_unused",
            "samples_dropped",
            "samples_repeated",
        )
        return "\n".join(f"{name:<21} {_per_epoch_text(getattr(self, name))}" for name in names)

    def _samples_at_end(self) -> int:
        """How far the run is in the data when it ends."""
        last, samples = self.windows[-1], self.samples_done
        for span in self.spans:
            if span.stop_epoch is None or last.epoch < span.stop_epoch:
                trained = min(span.num_samples, span.samples_of_all_ranks(last.stop))
                return samples + (last.epoch - span.first_epoch) * span.num_samples + trained
            samples += (span.stop_epoch - span.first_epoch) * span.num_samples
        raise AssertionError("the last window lies in no span")

    def _per_epoch(self, values: list[int]) -> PerEpoch:
        if len(set(values)) == 1:
            return values[0]
        return {span.first_epoch: value for span, value in zip(self.spans, values, strict=True)}


class Windows(Sequence[Window]):
    """The windows of a plan, computed when asked for; slices are lazy as well."""

    def __init__(self, spans: tuple[EqualEpochs, ...], steps: range) -> None:
        self._spans = spans
        self._steps = steps
        self._steps_before = [span.steps_before for span in spans]

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Window: ...
    @overload
    def __getitem__(self, index: slice) -> Windows: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Window | Windows:
        if isinstance(index, slice):
            return Windows(self._spans, self._steps[index])
        return self._window(self._steps[index])

    def _window(self, step: int) -> Window:
        # Spans without a step share their steps_before with the next one: the last of them is the one that steps.
        return self._spans[bisect_right(self._steps_before, step) - 1].window(step)

    def __iter__(self) -> Iterator[Window]:
        return map(self._window, self._steps)

    def __repr__(self) -> str:
        # len() would refuse more than 2**63 windows; a range does not.
        count = max(0, -((self._steps.start - self._steps.stop) // self._steps.step))
        shown = ", ".join(map(repr, self[:2]))
        return f"<{count:,} windows: {shown}{', …' if count > 2 else ''}>"


class PlansItsSteps(Protocol):
    """A batch sampler that knows how it deals: those of ``course_lib.samplers``."""

    @property
    def plan_steps(self) -> Callable[..., StepPlan]: ...


class PlansItself(Protocol):
    """A schedule that is finer than by epochs: ``course_lib.schedules.SizeSchedule``."""

    @property
    def plan(self) -> Callable[..., StepPlan]: ...


def _end_in_words(plan: StepPlan) -> Iterator[str]:
    if plan.total_steps == 0:
        yield "Nothing will train: this run makes 0 optimizer steps."
        return
    if plan.total_steps == plan.steps_done:
        yield f"Nothing is left to train: {counted(plan.steps_done, 'optimizer step')} were made before."
        return
    stopped_by_steps = plan.total_steps == plan.max_steps
    reason = f"max_steps={plan.max_steps:,}" if stopped_by_steps else f"max_epochs={plan.max_epochs:,}"
    if not stopped_by_steps and plan.epochs_completed != plan.max_epochs:
        reason = f"epoch {plan.epochs_completed:,}, which has no batch,"
    where = f"after {counted(plan.epochs_completed, 'full epoch')}"
    last = plan.windows[-1]
    if stopped_by_steps and last.epoch >= plan.epochs_completed:
        where += f" and {counted(last.stop, 'batch', 'batches')} of the next"
    yield f"{reason} ends the run {where}: {counted(plan.total_steps, 'optimizer step')} in all."
    if plan.steps_done:
        yield f"{counted(plan.steps_done, 'step')} of them were made before."
    if plan.micro_batches_unused:
        yield f"The gradients of {counted(plan.micro_batches_unused, 'micro-batch', 'micro-batches')} reach no step."


SHORT_WINDOW_IN_WORDS = {
    "step": "steps too",
    "carry": "waits and leaks into the first step of the next epoch",
    "zero": "is thrown away",
}


def _windows_in_words(span: EqualEpochs) -> Iterator[str]:
    k = span.accumulate_grad_batches
    windows = f"Windows of {counted(k, 'micro-batch', 'micro-batches')}"
    yield f"{windows} make {counted(span.steps, 'optimizer step')} per epoch."
    if short := span.batches % k:
        fate = SHORT_WINDOW_IN_WORDS[span.short_window]
        yield f"The last window of an epoch is short ({short:,} of {k:,} micro-batches) and {fate}."
    more = span.samples_stepped - span.num_samples
    if more < 0:
        yield f"An epoch leaves out {counted(-more, 'sample')} of the dataset."
    if more > 0:
        yield f"Padding to equal shares repeats {counted(more, 'sample')} per epoch."


def _per_epoch_text(value: PerEpoch) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(f"{number:,} from epoch {epoch:,}" for epoch, number in value.items())
