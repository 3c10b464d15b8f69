"""Plans of what a batch sampler deals by a rule of its own: other sizes at an epoch's end, other epochs than the first.

A sampler says of an epoch which batches it has (:class:`Dealing`); the windows over them are those of every plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, groupby
from typing import NamedTuple

from course_lib._arguments import int_of_at_least
from course_lib.steps.arguments import (
    PerEpoch,
    at_epoch,
    by_epoch,
    checked_short_window,
    checked_stops,
    refuse_within_an_epoch,
)
from course_lib.steps.epochs import EqualEpochs, ShortWindow
from course_lib.steps.plan import StepPlan, spans_from


class EqualBatches(NamedTuple):
    """Steps of an epoch, one after the other, that are alike; a step is one batch on every rank."""

    steps: int
    largest: int
    """Samples in the batch of a rank that has most."""
    total: int
    """Samples of all ranks in a step, of those that the epoch is to cover."""


class Dealing(NamedTuple):
    """What a sampler deals to the ranks in an epoch, or in the rest of one."""

    num_samples: int
    """Samples that it is to cover."""
    batches: tuple[EqualBatches, ...]


def equal_batches(steps: Iterable[tuple[int, int]]) -> tuple[EqualBatches, ...]:
    """Those that are alike together, of the largest batch and the total of each step."""
    return tuple(EqualBatches(len(list(alike)), *of_each) for of_each, alike in groupby(steps))


@dataclass(frozen=True, kw_only=True)
class DealtEpochs(EqualEpochs):
    """Epochs that are alike, of batches that may differ: what is asked for each window is looked up in prefix sums.

    Samples of one rank are counted batch by batch, each that of the rank that has most. Where the ranks' batches
    differ, no rank may have as many.
    """

    dealt: tuple[EqualBatches, ...]
    """All batches of an epoch, also those behind ``limit_train_batches``."""

    @cached_property
    def batches_dealt(self) -> int:
        return self._batches_before[-1]

    def samples_up_to(self, batch: int) -> int:
        number, inside = self._place_of(batch)
        return self._samples_before[number] + (inside * self.dealt[number].largest if inside else 0)

    def samples_of_all_ranks(self, batch: int) -> int:
        number, inside = self._place_of(batch)
        return self._totals_before[number] + (inside * self.dealt[number].total if inside else 0)

    def _place_of(self, batch: int) -> tuple[int, int]:
        """In which of the equal batches this one is, and how many of them come before it."""
        number = bisect_right(self._batches_before, batch) - 1
        return number, batch - self._batches_before[number]

    def in_words(self) -> str:
        return f"in batches of at most {self.per_rank_batch_size:,}"

    @cached_property
    def _batches_before(self) -> list[int]:
        """Micro-batches of one rank before each of the equal batches, and in the whole epoch."""
        return [0, *accumulate(equal.steps for equal in self.dealt)]

    @cached_property
    def _samples_before(self) -> list[int]:
        """Samples of a rank before each of the equal batches, and in the whole epoch."""
        return [0, *accumulate(equal.steps * equal.largest for equal in self.dealt)]

    @cached_property
    def _totals_before(self) -> list[int]:
        return [0, *accumulate(equal.steps * equal.total for equal in self.dealt)]


def plan_dealt(
    deal: Callable[[int, int], Dealing],
    *,
    epochs_alike: bool,
    world_size: int,
    drop_last: bool,
    accumulate_grad_batches: PerEpoch = 1,
    max_epochs: int | None = None,
    max_steps: int = -1,
    limit_train_batches: int | float = 1.0,
    short_window: ShortWindow = "step",
    steps_done: int = 0,
    samples_done: int = 0,
) -> StepPlan:
    """Plan a run over what ``deal(epoch, position)`` says of each epoch; see ``plan_steps``.

    Where the epochs are not alike each is asked for, as many as the run has.
    """
    short_window = checked_short_window(short_window)
    ks = by_epoch("accumulate_grad_batches", accumulate_grad_batches, before_first=1)
    max_epochs, max_steps, limit = checked_stops(max_epochs, max_steps, limit_train_batches)
    steps_done = int_of_at_least(0, "steps_done", steps_done)
    epoch, position, num_samples = _standing(deal, int_of_at_least(0, "samples_done", samples_done), epochs_alike)
    refuse_within_an_epoch(position, num_samples, limit, short_window)

    def alike(first_epoch: int, stop_epoch: int | None, position: int) -> EqualEpochs:
        dealing = deal(first_epoch, position)
        return DealtEpochs(
            first_epoch=first_epoch,
            stop_epoch=stop_epoch,
            num_samples=dealing.num_samples,
            world_size=world_size,
            per_rank_batch_size=max((equal.largest for equal in dealing.batches), default=1),
            accumulate_grad_batches=at_epoch(ks, first_epoch),
            drop_last=drop_last,
            limit_train_batches=limit,
            short_window=short_window,
            dealt=dealing.batches,
        )

    def one_by_one() -> Iterator[EqualEpochs]:
        steps, at = steps_done, position
        for number in count(epoch):
            # A run without a last epoch goes on until its steps are made; an epoch without one ends the search.
            last = alike(number, number + 1, at)
            steps, at = steps + last.steps, 0
            yield last
            if max_epochs == -1 and not last.steps:
                yield alike(number + 1, None, 0)
                return
            if number + 1 == max_epochs or not last.batches or 0 <= max_steps <= steps:
                return

    if epochs_alike or max_epochs in range(epoch + 1):
        spans: Iterable[EqualEpochs] = spans_from(alike, epoch, position, ks, max_epochs)
    else:
        spans = one_by_one()
    return StepPlan.of_spans(
        spans,
        num_samples=num_samples,
        world_size=world_size,
        drop_last=drop_last,
        short_window=short_window,
        max_epochs=max_epochs,
        max_steps=max_steps,
        steps_done=steps_done,
        samples_done=samples_done,
    )


def _standing(deal: Callable[[int, int], Dealing], samples_done: int, epochs_alike: bool) -> tuple[int, int, int]:
    """The epoch and the position in it after some samples, and how many that epoch has."""
    num_samples = deal(0, 0).num_samples
    if epochs_alike:
        return *divmod(samples_done, num_samples), num_samples
    epoch = 0
    while samples_done >= num_samples > 0:
        samples_done, epoch = samples_done - num_samples, epoch + 1
        num_samples = deal(epoch, 0).num_samples
    return epoch, samples_done, num_samples
