"""The arithmetic of all plans: epochs as rows of equal batches, the windows over them, and where a run of them ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

from course_lib.steps.arguments import RunToPlan, ShortWindow, limited


class Window(NamedTuple):
    """The micro-batches behind one optimizer step."""

    optimizer_step: int
    """Which step of the run this is, from 0."""
    epoch: int
    start: int
    """First micro-batch, counted within the epoch."""
    stop: int
    """One past the last micro-batch."""
    carried: int
    """Micro-batches of earlier epochs whose gradient is in this step too (``short_window="carry"`` only)."""
    per_rank_samples: int
    """Samples in this window, the carried ones included, of the rank that has most in each batch."""

    @property
    def micro_batches(self) -> int:
        return self.carried + self.stop - self.start


@dataclass(frozen=True)
class EqualBatches:
    """Steps of an epoch, one after the other, that are alike; a step is one batch on every rank."""

    steps: int
    largest: int
    """Samples in the batch of a rank that has most."""
    total: int
    """Samples of all ranks in a step, of those that the epoch is to cover."""
    window_size: int = 1
    """Micro-batches of one rank in a full window."""


def first_steps(dealt: Iterable[EqualBatches], steps: int) -> tuple[EqualBatches, ...]:
    """What is dealt in so many steps at most."""
    kept = []
    for equal in dealt:
        if steps >= equal.steps:
            kept.append(equal)
        elif steps > 0:
            kept.append(replace(equal, steps=steps))
        steps -= equal.steps
    return tuple(kept)


class Carried(NamedTuple):
    """Micro-batches of earlier epochs whose gradient still waits, and their samples on one rank."""

    micro_batches: int
    per_rank_samples: int


NOTHING = Carried(0, 0)


class EqualWindows(NamedTuple):
    """Windows of one size within an epoch."""

    windows_before: int
    begin: int
    """The micro-batch with which the first of them begins; below 0 where it began ahead of what is planned."""
    size: int


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Consecutive epochs that are alike.

    Windows of another size begin where the window before is full: an epoch has at most one short window, its last.
    """

    first_epoch: int
    stop_epoch: int | None
    """One past the last epoch; ``None``: open end."""
    num_samples: int
    """Samples that all ranks together are to have in such an epoch: all, or what is left of one."""
    dealt: tuple[EqualBatches, ...]
    """The batches of such an epoch, as far as it runs."""
    in_batches: str = ""
    """Of how many samples, in words."""
    opened: int = 0
    """Micro-batches that the first window had before."""
    short_window: ShortWindow = "step"
    steps_before: int = 0
    """Optimizer steps of all earlier epochs."""
    carried_in: Carried = NOTHING

    @cached_property
    def batches(self) -> int:
        """Micro-batches of one rank in a full epoch."""
        return self._batches_before[-1]

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of a full epoch."""
        if not self.dealt:
            return 0
        last = self._windows[-1]
        full = (self.batches - last.begin) // last.size
        return last.windows_before + full + (self.short > 0 and self.short_window == "step")

    @property
    def short(self) -> int:
        """Micro-batches in the last window of an epoch, where it is short; else 0."""
        return (self.batches - self._windows[-1].begin) % self._windows[-1].size if self.dealt else 0

    @property
    def steps_after(self) -> int:
        """Optimizer steps of the run behind the last of these epochs, which must be one."""
        assert self.stop_epoch is not None
        return self.steps_before + (self.stop_epoch - self.first_epoch) * self.steps

    @cached_property
    def batches_stepped(self) -> int:
        """Micro-batches of an epoch that are in a window of that same epoch."""
        return self.batches if self.short_window == "step" else self.batches - self.short

    @property
    def samples_stepped(self) -> int:
        """Samples of all ranks in an epoch that reach an optimizer step, be it in the next epoch; repeated ones too."""
        return self.samples_of_all_ranks(self.batches_stepped if self.short_window == "zero" else self.batches)

    def batches_in_words(self) -> str:
        """Of how many samples they are."""
        return self.in_batches

    def samples_of_all_ranks(self, batch: int) -> int:
        """Samples that all ranks together have had before this batch of an epoch, repeated ones included."""
        return sum(equal.steps * equal.total for equal in first_steps(self.dealt, batch))

    def samples_up_to(self, batch: int) -> int:
        """Samples that one rank has had before this batch of an epoch, in each batch the rank that has most."""
        number, inside = self.place_of(batch)
        return self._samples_before[number] + (inside * self.dealt[number].largest if inside else 0)

    def place_of(self, batch: int) -> tuple[int, int]:
        """In which of the equal batches this one is, and how many of them come before it."""
        number = bisect_right(self._batches_before, batch) - 1
        return number, batch - self._batches_before[number]

    def carried_out(self, epochs: int) -> Carried:
        """What waits after this many of these epochs."""
        if self.short_window != "carry" or epochs == 0:
            return self.carried_in
        if self.steps:
            rest = self.samples_up_to(self.batches) - self.samples_up_to(self.batches_stepped)
            return Carried(self.batches - self.batches_stepped, rest)
        return Carried(
            self.carried_in.micro_batches + epochs * self.batches,
            self.carried_in.per_rank_samples + epochs * self.samples_up_to(self.batches),
        )

    def window(self, step: int) -> Window:
        """The window of the run's optimizer step ``step``, which must lie in these epochs."""
        epochs_before, window = divmod(step - self.steps_before, self.steps)
        alike = self._windows[bisect_right(self._windows, window, key=lambda alike: alike.windows_before) - 1]
        begin = alike.begin + (window - alike.windows_before) * alike.size
        start, stop = max(0, begin), min(begin + alike.size, self.batches)
        carried = self.carried_out(epochs_before) if window == 0 else NOTHING
        samples = carried.per_rank_samples + self.samples_up_to(stop) - self.samples_up_to(start)
        return Window(step, self.first_epoch + epochs_before, start, stop, carried.micro_batches, samples)

    def step_of(self, batch: int) -> int:
        """The optimizer step of the run that a micro-batch of the first epoch is for, which must be in a window."""
        alike = self._windows[bisect_right(self._windows, batch, key=lambda alike: alike.begin) - 1]
        return self.steps_before + alike.windows_before + (batch - alike.begin) // alike.size

    @cached_property
    def _batches_before(self) -> list[int]:
        """Micro-batches of one rank before each of the equal batches, and in the whole epoch."""
        return [0, *accumulate(equal.steps for equal in self.dealt)]

    @cached_property
    def _samples_before(self) -> list[int]:
        """Samples of a rank before each of the equal batches, and in the whole epoch."""
        return [0, *accumulate(equal.steps * equal.largest for equal in self.dealt)]

    @cached_property
    def _windows(self) -> list[EqualWindows]:
        windows: list[EqualWindows] = []
        windows_before, begin, end = 0, -self.opened, 0
        for size, alike in groupby(self.dealt, key=lambda equal: equal.window_size):
            windows.append(EqualWindows(windows_before, begin, size))
            end += sum(equal.steps for equal in alike)
            windows_before, begin = windows_before - (begin - end) // size, end  # the last of them may be short
        return windows


def in_a_row(epochs: Iterable[Epochs], run: RunToPlan, *, all_are_known: bool) -> Iterator[Epochs]:
    """The epochs of a run, each as far as it runs, and told what the earlier ones leave.

    They are asked for as the run comes to them; where ``all_are_known``, those behind ``max_steps`` as well.
    """
    steps, carried = run.steps_done, NOTHING
    for number, alone in enumerate(epochs):
        stop_epoch = alone.stop_epoch
        if run.max_epochs != -1:
            stop_epoch = run.max_epochs if stop_epoch is None else min(stop_epoch, run.max_epochs)
            stop_epoch = max(stop_epoch, alone.first_epoch)
        span = replace(
            alone,
            stop_epoch=stop_epoch,
            dealt=first_steps(alone.dealt, limited(alone.batches, run.limit_train_batches)),
            short_window=run.short_window,
            steps_before=steps,
            carried_in=carried,
        )
        yield span
        if stop_epoch is None or stop_epoch in (run.max_epochs, span.first_epoch):
            return
        steps, carried = span.steps_after, span.carried_out(stop_epoch - span.first_epoch)
        if not all_are_known and (not span.batches or 0 <= run.max_steps <= steps):
            return
        if not all_are_known and run.max_epochs == -1 and number:
            refuse_without_a_step(span, run)  # which would be asked for the next epoch without end


class EndOfRun(NamedTuple):
    """Where a run stops, as a ``StepPlan`` says it."""

    total_steps: int
    epochs_completed: int
    batches_of_last: int


def end_of_run(row: Iterable[Epochs], run: RunToPlan) -> EndOfRun:
    """A run stops at a step (``max_steps``), at an epoch's end (``max_epochs``), or at an epoch without a batch."""
    for span in row:
        if 0 <= run.max_steps <= span.steps_before or not span.batches or span.first_epoch == span.stop_epoch:
            return EndOfRun(span.steps_before, span.first_epoch, 0)
        if span.stop_epoch is None or 0 <= run.max_steps <= span.steps_after:
            refuse_without_a_step(span, run)
            last = span.window(run.max_steps - 1)
            if last.stop == span.batches:
                return EndOfRun(run.max_steps, last.epoch + 1, 0)
            return EndOfRun(run.max_steps, last.epoch, last.stop)
    assert span.stop_epoch is not None
    return EndOfRun(span.steps_after, span.stop_epoch, 0)


def refuse_without_a_step(span: Epochs, run: RunToPlan) -> None:
    if not span.steps:
        raise ValueError(
            f"max_steps={run.max_steps} is never reached: {span.batches} batches per epoch fill no window of "
            f"accumulate_grad_batches={span.dealt[0].window_size}, and short_window={run.short_window!r} steps on no "
            "short one; lower accumulate_grad_batches or give max_epochs"
        )
