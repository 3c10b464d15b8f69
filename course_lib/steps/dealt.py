"""Plans of what is dealt, be it by a rule of its own: of each epoch, a deal says which batches it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from course_lib.steps.arguments import PerEpoch, at_epoch, by_epoch, checked_run, refuse_within_an_epoch
from course_lib.steps.epochs import Epochs, EqualBatches
from course_lib.steps.plan import StepPlan


class Dealing(NamedTuple):
    """What is dealt to the ranks in an epoch, or in the rest of one."""

    num_samples: int
    """Samples that it is to cover."""
    batches: tuple[EqualBatches, ...]
    in_batches: str = ""
    """Of how many samples, in words, where the largest does not tell it."""


def plan_dealt(
    deal: Callable[[int, int], Dealing],
    *,
    epochs_alike: bool,
    world_size: int,
    changes: Iterable[int] = (),
    accumulate_grad_batches: PerEpoch = 1,
    **run: Any,
) -> StepPlan:
    """Plan a run over what ``deal(epoch, position)`` says of each epoch; see ``plan_steps``.

    Where epochs are alike, they are so from each of ``changes`` to the next. Where they are not, each is asked for, as
    many as the run has.
    """
    ks = by_epoch("accumulate_grad_batches", accumulate_grad_batches, before_first=1)
    checked = checked_run(**run)
    epoch, position, num_samples = _standing(deal, checked.samples_done, epochs_alike)
    refuse_within_an_epoch(position, num_samples, checked)
    changes = sorted({*ks, *changes})

    def epochs(epoch: int, position: int) -> Iterator[Epochs]:
        stop: int | None = epoch
        while stop is not None:
            if position or not epochs_alike:
                stop = epoch + 1
            else:
                stop = next((first for first in changes if first > epoch), None)
            dealing, k = deal(epoch, position), at_epoch(ks, epoch)
            largest = max((equal.largest for equal in dealing.batches), default=1)
            yield Epochs(
                first_epoch=epoch,
                stop_epoch=stop,
                num_samples=dealing.num_samples,
                dealt=tuple(replace(equal, window_size=k) for equal in dealing.batches),
                in_batches=dealing.in_batches or f"of at most {largest:,}",
            )
            epoch, position = stop or epoch, 0

    return StepPlan.of_epochs(
        epochs(epoch, position), checked, all_are_known=epochs_alike, num_samples=num_samples, world_size=world_size
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
