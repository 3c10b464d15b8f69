"""The arithmetic of epochs that are alike: their micro-batches, their windows, and where a run of them ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

ShortWindow = Literal["step", "carry", "zero"]
"""What a short window at an epoch's end does: it steps, its gradients go on into the next epoch, or they are zeroed."""


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
    num_samples: int
    """Samples that all ranks together are to have in such an epoch: all, or what is left of one."""
    world_size: int
    per_rank_batch_size: int
    accumulate_grad_batches: int
    drop_last: bool
    limit_train_batches: int | float
    short_window: ShortWindow
    steps_before: int = 0
    """Optimizer steps of all earlier epochs."""
    carried_in: Carried = NOTHING

    @property
    def per_rank_samples(self) -> int:
        """Samples of one rank in an epoch: the ranks' shares are padded to equal length."""
        return -(-self.num_samples // self.world_size)

    @property
    def batches_dealt(self) -> int:
        """Micro-batches that a rank's loader has for an epoch."""
        full, short = divmod(self.per_rank_samples, self.per_rank_batch_size)
        return full + (short > 0 and not self.drop_last)

    @property
    def batches(self) -> int:
        """Micro-batches of one rank in a full epoch: those that ``limit_train_batches`` leaves."""
        if isinstance(self.limit_train_batches, float):
            # A Trainer's own arithmetic; but 1.0 is no share, and a float has 53 bits.
            share = self.limit_train_batches
            return self.batches_dealt if share == 1.0 else int(self.batches_dealt * share)
        return min(self.batches_dealt, self.limit_train_batches)

    @property
    def steps(self) -> int:
        """Optimizer steps of a full epoch."""
        full, short = divmod(self.batches, self.accumulate_grad_batches)
        return full + (short > 0 and self.short_window == "step")

    @property
    def batches_stepped(self) -> int:
        """Micro-batches of an epoch that are in a window of that same epoch."""
        return min(self.steps * self.accumulate_grad_batches, self.batches)

    @property
    def samples_stepped(self) -> int:
        """Samples of all ranks in an epoch that reach an optimizer step, be it in the next epoch."""
        return self.samples_of_all_ranks(self.batches_stepped if self.short_window == "zero" else self.batches)

    def samples_of_all_ranks(self, batch: int) -> int:
        """Samples that all ranks together have had before this batch of an epoch, repeated ones included."""
        # Rank r holds the positions r, r + G, r + 2G …: the first m positions of every rank are 0 … G·m - 1.
        return self.samples_up_to(batch) * self.world_size

    def samples_up_to(self, batch: int) -> int:
        """Samples that one rank has had before this batch of an epoch."""
        return min(batch * self.per_rank_batch_size, self.per_rank_samples)

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

    def in_words(self) -> str:
        """How an epoch's samples come in batches."""
        dropping = " (a short last batch is dropped)" if self.drop_last else ""
        return f"in batches of {self.per_rank_batch_size:,}{dropping}"

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
                f"accumulate_grad_batches={span.accumulate_grad_batches}, and short_window={span.short_window!r} steps "
                "on no short one; lower accumulate_grad_batches or give max_epochs"
            )
        count = None if span.stop_epoch is None else span.stop_epoch - span.first_epoch
        if max_steps != -1 and (count is None or count * span.steps >= steps_left):
            last = span.window(max_steps - 1)
            full_epochs = last.epoch - span.first_epoch
            micro_batches += full_epochs * span.batches + last.stop
            if span.short_window == "zero":
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
        if span.short_window == "carry":
            stepped = micro_batches - span.carried_out(count).micro_batches
        else:
            stepped += count * span.batches_stepped
    last_span = spans[-1]
    assert last_span.stop_epoch is not None
    steps = last_span.steps_before + last_span.steps * (last_span.stop_epoch - last_span.first_epoch)
    return EndOfRun(steps, epochs, micro_batches, stepped)
