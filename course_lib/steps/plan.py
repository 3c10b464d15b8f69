"""The :class:`StepPlan` of a run: what it says of the epochs that were put in a row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Self, SupportsIndex, overload

from course_lib._words import counted, int_of_at_least
from course_lib.steps.arguments import PerEpoch, RunToPlan
from course_lib.steps.counting import Epochs, Window, end_of_run, in_a_row


@dataclass(frozen=True, kw_only=True)
class StepPlan(RunToPlan):
    """What ``plan_steps`` found: the optimizer steps of a run and the micro-batches behind each.

    A value per epoch is an int, or ``{first epoch: value}`` where a schedule changes it on the way. Batches are
    those of one rank; samples are counted over all ranks.
    """

    num_samples: int
    world_size: int
    spans: tuple[Epochs, ...]
    """Consecutive epochs that are alike, one entry for each time that something changes."""
    total_steps: int
    """Optimizer steps of the whole run, those done included."""
    epochs_completed: int
    """Epochs in which every planned batch ran; a last epoch that ``max_steps`` cuts short does not count."""
    batches_of_last: int
    """Micro-batches that one rank runs in an epoch that is cut short; 0 if none is."""

    @classmethod
    def of_epochs(cls, epochs: Iterable[Epochs], run: RunToPlan, *, all_are_known: bool, **told: Any) -> Self:
        """Put the epochs in a row, see there, and find where a run over them stops."""
        row = tuple(in_a_row(epochs, run, all_are_known=all_are_known))
        return cls(spans=row, **end_of_run(row, run)._asdict(), **vars(run), **told)

    @property
    def micro_batches(self) -> int:
        """Forward passes of one rank in all that is planned."""
        return self._batches_before(self.epochs_completed, self.batches_of_last)

    @property
    def micro_batches_unused(self) -> int:
        """Those of ``micro_batches`` whose gradient reaches no optimizer step."""
        if self.short_window != "carry":
            spans = self._epochs_before(self.epochs_completed)
            return sum(epochs * (span.batches - span.batches_stepped) for span, epochs in spans)
        if self.total_steps == self.steps_done:
            return self.micro_batches
        last = self.windows[-1]
        return self.micro_batches - self._batches_before(last.epoch, last.stop)

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

        What was done counts by its share of the samples. So a rate that follows the progress, as in
        ``LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * plan.progress(step))))``, goes on where it was,
        and ends where it should, when a run goes on with fewer or more ranks.
        """
        planned = self.total_steps - self.steps_done
        if planned <= 0 or step >= self.total_steps:
            return 1.0
        done = self.samples_done / self._samples_at_end if self.steps_done else 0.0
        if step < self.steps_done:
            return done * step / self.steps_done
        return done + (1 - done) * (step - self.steps_done) / planned

    def batches_in_epoch(self, epoch: int) -> int:
        """Micro-batches that one rank runs in this epoch: 0 ahead of the plan's first one, and behind its last.

        The last epoch may be cut short.
        """
        epoch = int_of_at_least(0, "epoch", epoch)
        if epoch >= self.epochs_completed:
            return self.batches_of_last if epoch == self.epochs_completed else 0
        return self._batches_before(epoch + 1) - self._batches_before(epoch)

    def explain(self) -> str:
        """Say the plan in words, with every number's unit."""
        return "\n".join([*self.epochs_in_words(), *_end_in_words(self)])

    def epochs_in_words(self) -> Iterator[str]:
        """What an epoch is made of, in each span of epochs."""
        ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        for span in self.spans:
            since = f"From epoch {span.first_epoch:,} on: " if len(self.spans) > 1 else ""
            yield (
                f"{since}{counted(span.num_samples, 'sample')} in batches {span.batches_in_words()} make "
                f"{counted(span.batches, 'batch', 'batches')} per epoch{ranks}."
            )
            yield from _windows_in_words(self, span)

    @cached_property
    def _samples_at_end(self) -> int:
        """How far the run is in the data when it ends."""
        samples, last = self.samples_done, self.windows[-1]
        for span, epochs in self._epochs_before(last.epoch + 1):
            samples += epochs * span.num_samples
        return samples - span.num_samples + min(span.num_samples, span.samples_of_all_ranks(last.stop))

    def _batches_before(self, epoch: int, batch: int = 0) -> int:
        """Planned micro-batches of one rank before this one of an epoch."""
        return batch + sum(epochs * span.batches for span, epochs in self._epochs_before(epoch))

    def _epochs_before(self, epoch: int) -> Iterator[tuple[Epochs, int]]:
        """The spans that begin before an epoch, and how many epochs of each come before it."""
        for span in self.spans:
            if span.first_epoch < epoch:
                stop = epoch if span.stop_epoch is None else min(epoch, span.stop_epoch)
                yield span, stop - span.first_epoch

    def _per_epoch(self, values: list[int]) -> PerEpoch:
        if len(set(values)) == 1:
            return values[0]
        return {span.first_epoch: value for span, value in zip(self.spans, values, strict=True)}


class Windows(Sequence[Window]):
    """The windows of a plan, computed when asked for; slices are lazy as well."""

    def __init__(self, spans: tuple[Epochs, ...], steps: range) -> None:
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

    def __repr__(self) -> str:
        return f"<windows of the optimizer steps in {self._steps!r}>"


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
    if plan.batches_of_last:
        where += f" and {counted(plan.batches_of_last, 'batch', 'batches')} of the next"
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


def _windows_in_words(plan: StepPlan, span: Epochs) -> Iterator[str]:
    if span.dealt:
        *before, k = (size for size, _ in groupby(equal.window_size for equal in span.dealt))
        sizes = "".join(f"{size:,}, then " for size in before) + counted(k, "micro-batch", "micro-batches")
        yield f"Windows of {sizes} make {counted(span.steps, 'optimizer step')} per epoch."
        if span.short:
            fate = SHORT_WINDOW_IN_WORDS[plan.short_window]
            yield f"The last window of an epoch is short ({span.short:,} of {k:,} micro-batches) and {fate}."
    more = span.samples_stepped - span.num_samples
    if more < 0:
        yield f"An epoch leaves out {counted(-more, 'sample')} of the dataset."
    if more > 0:
        yield f"Padding to equal shares repeats {counted(more, 'sample')} per epoch."
