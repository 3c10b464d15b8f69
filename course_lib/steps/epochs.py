"""The arithmetic of epochs that are alike: their micro-batches, their windows, and where a run of them ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Tail = Literal["step", "carry", "drop"]
"""What becomes of a short window at an epoch's end: it steps, its gradients go on into the next epoch, or are lost."""


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
    """Micro-batches of earlier epochs whose gradient is in this step too (``tail="carry"`` only)."""
    per_rank_samples: int
    """Samples of one rank in this window, the carried ones included."""

    @property
    def micro_batches(self) -> int:
        return self.carried + self.stop - self.start


class Carried(NamedTuple):
    """Micro-batches of earlier epochs whose gradient still waits, and their samples on one rank."""

    micro_batches: int
    per_rank_samples: int


NOTHING = Carried(0, 0)


@dataclass(frozen=True, kw_only=True)
class EqualEpochs:
    """Consecutive epochs in which neither the batch size nor the accumulation changes."""

    first_epoch: int
    stop_epoch: int | None
    """One past the last epoch; ``None``: open end."""
    per_rank_samples: int
    per_rank_batch_size: int
    accumulate_grad_batches: int
    drop_last: bool
    limit_train_batches: int | float
    tail: Tail
    steps_before: int = 0
    """Optimizer steps of all earlier epochs."""
    carried_in: Carried = NOTHING

    @property
    def batches(self) -> int:
        """Micro-batches of one rank in a full epoch."""
        full, short = divmod(self.per_rank_samples, self.per_rank_batch_size)
        batches = full + (short > 0 and not self.drop_last)
        if isinstance(self.limit_train_batches, float):
            return int(batches * self.limit_train_batches)
        return min(batches, self.limit_train_batches)

    @property
    def steps(self) -> int:
        """Optimizer steps of a full epoch."""
        full, short = divmod(self.batches, self.accumulate_grad_batches)
        return full + (short > 0 and self.tail == "step")

    @property
    def batches_stepped(self) -> int:
        """Micro-batches of an epoch that are in a window of that same epoch."""
        return min(self.steps * self.accumulate_grad_batches, self.batches)

    @property
    def samples_stepped(self) -> int:
        """Samples of one rank and epoch that reach an optimizer step, be it in the next epoch."""
        return self.samples_up_to(self.batches_stepped if self.tail == "drop" else self.batches)

    def samples_up_to(self, batch: int) -> int:
        return min(batch * self.per_rank_batch_size, self.per_rank_samples)

    def carried_out(self, epochs: int) -> Carried:
        """What waits after this many of these epochs."""
        if self.tail != "carry" or epochs == 0:
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
        start = window * self.accumulate_grad_batches
        stop = min(start + self.accumulate_grad_batches, self.batches)
        carried = self.carried_out(epochs_before) if window == 0 else NOTHING
        samples = carried.per_rank_samples + self.samples_up_to(stop) - self.samples_up_to(start)
        return Window(step, self.first_epoch + epochs_before, start, stop, carried.micro_batches, samples)


def in_a_row(spans: Iterable[EqualEpochs], steps_before: int = 0) -> Iterator[EqualEpochs]:
    """The same spans of epochs, each told what the earlier ones leave: their steps, and the micro-batches that wait."""
    carried = NOTHING
    for alone in spans:
        span = replace(alone, steps_before=steps_before, carried_in=carried)
        yield span
        if span.stop_epoch is not None:
            count = span.stop_epoch - span.first_epoch
            steps_before += span.steps * count
            carried = span.carried_out(count)


class EndOfRun(NamedTuple):
    """What a run has done when it stops; ``epochs`` are those in which every batch ran."""

    steps: int
    epochs: int
    micro_batches: int
    micro_batches_stepped: int


def end_of_run(spans: Sequence[EqualEpochs], max_steps: int) -> EndOfRun:
    """Walk the spans to where the run stops: at a step (``max_steps``), at an epoch's end, or for want of batches."""
    epochs, micro_batches, stepped = spans[0].first_epoch, 0, 0
    for span in spans:
        if 0 <= max_steps <= span.steps_before or span.batches == 0 or span.first_epoch == span.stop_epoch:
            return EndOfRun(span.steps_before, epochs, micro_batches, stepped)
        steps_left = max_steps - span.steps_before
        if span.stop_epoch is None and span.steps == 0:
            raise ValueError(
                f"max_steps={max_steps} is never reached: {span.batches} batches per epoch fill no window of "
                f"accumulate_grad_batches={span.accumulate_grad_batches}, and tail={span.tail!r} makes no short one; "
                "lower accumulate_grad_batches or give max_epochs"
            )
        count = None if span.stop_epoch is None else span.stop_epoch - span.first_epoch
        if max_steps != -1 and (count is None or count * span.steps >= steps_left):
            last = span.window(max_steps - 1)
            full_epochs = last.epoch - span.first_epoch
            micro_batches += full_epochs * span.batches + last.stop
            if span.tail == "drop":
                stepped += full_epochs * span.batches_stepped + last.stop
            else:
                stepped = micro_batches
            epochs += full_epochs
            if last.stop == span.batches:
                epochs += 1
            return EndOfRun(max_steps, epochs, micro_batches, stepped)
        assert count is not None, "a run without an end was refused in plan_steps"
        epochs += count
        micro_batches += count * span.batches
        if span.tail == "carry":
            stepped = micro_batches - span.carried_out(count).micro_batches
        else:
            stepped += count * span.batches_stepped
    last_span = spans[-1]
    assert last_span.stop_epoch is not None
    steps = last_span.steps_before + last_span.steps * (last_span.stop_epoch - last_span.first_epoch)
    return EndOfRun(steps, epochs, micro_batches, stepped)
