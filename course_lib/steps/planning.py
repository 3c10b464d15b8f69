"""Plans of runs: :func:`plan_steps`, :func:`max_steps_for`, and the plan of whatever deals by a rule of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from course_lib._words import int_of_at_least
from course_lib.steps.arguments import PerEpoch, ShortWindow, at_epoch, by_epoch, checked_run, refuse_within_an_epoch
from course_lib.steps.counting import Epochs, EqualBatches
from course_lib.steps.plan import StepPlan


class PlansItsSteps(Protocol):
    """A batch sampler that knows how it deals: those of ``course_lib.samplers``."""

    @property
    def plan_steps(self) -> Callable[..., StepPlan]: ...


class PlansItself(Protocol):
    """A schedule that is finer than by epochs: ``course_lib.schedules.SizeSchedule``."""

    @property
    def plan(self) -> Callable[..., StepPlan]: ...


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
            ``ceil(num_samples / world_size)``, the missing ones repeated from the start.
            Or a batch sampler of ``course_lib.samplers`` or ``course_lib.schedules``, alone: it says how it deals.
            Where its epochs have different numbers of batches, a Trainer runs at most as many as the first has: give
            that as ``limit_train_batches``.
        batch_size: Samples in a micro-batch of one rank; ``{epoch: size}`` for a loader that is made again
            at those epochs (epoch 0 must be given); or a ``course_lib.schedules.SizeSchedule``, dealt by its sampler.
        accumulate_grad_batches: Micro-batches in a window; ``{epoch: k}`` as ``GradientAccumulationScheduler``
            takes it (1 before the first epoch given). A ``SizeSchedule`` says it itself.
        world_size: Number of ranks; default: 1, or that which a sampler finds.
        drop_last: Whether the *loader* of each rank leaves out its short last batch. (accelerate, and with it HF's
            Trainer, drops first and then deals, which may give fewer batches.)
        max_epochs: Epochs to run; ``None`` or -1: ``max_steps`` alone ends the run.
        max_steps: Optimizer steps to run; -1: ``max_epochs`` alone ends the run.
        limit_train_batches: A Trainer's flag: an int is a number of batches, a float a share of them.
        short_window: What the micro-batches behind the last full window of an epoch do. ``"step"``: they step as a
            short window, as in Lightning. ``"carry"``: their gradient stays for the first window of the next epoch
            (the loop ``if (i + 1) % k == 0: optimizer.step(); optimizer.zero_grad()``). ``"zero"``: it is zeroed.
        steps_done, samples_done: For a run that goes on, also on other ranks: the optimizer steps that it has made, and
            how far it is in the data, over all ranks (``epoch * num_samples`` and those of the current epoch, where a
            window ended). In a Trainer, ``course_lib.callbacks.run_so_far(trainer)`` has both.

    An epoch without a batch ends the run, as it ends a Trainer's.

    Raises:
        ValueError: An argument is out of its range; nothing ends the run; or no epoch fills a window, so that
            ``max_steps`` can't be reached.
    """
    run: dict[str, Any] = {
        "accumulate_grad_batches": accumulate_grad_batches,
        "max_epochs": max_epochs,
        "max_steps": max_steps,
        "limit_train_batches": limit_train_batches,
        "short_window": short_window,
        "steps_done": steps_done,
        "samples_done": samples_done,
    }
    if hasattr(num_samples, "plan_steps"):
        if batch_size is not None or drop_last:
            raise ValueError(
                f"{type(num_samples).__name__} says itself how it deals: leave batch_size and drop_last out, got "
                f"{batch_size!r} and {drop_last!r}"
            )
        return num_samples.plan_steps(world_size=world_size, **run)
    world_size = 1 if world_size is None else int_of_at_least(1, "world_size", world_size)
    if batch_size is not None and hasattr(batch_size, "plan"):
        return batch_size.plan(num_samples, world_size=world_size, tail="drop" if drop_last else "spread", **run)
    num_samples = int_of_at_least(1, "num_samples", num_samples)
    batch_sizes = by_epoch("batch_size", batch_size, before_first=None)  # type: ignore[arg-type]

    def deal(epoch: int, position: int) -> Dealing:
        return _share(num_samples - position, at_epoch(batch_sizes, epoch), world_size, drop_last)

    return plan_dealt(deal, epochs_alike=True, changes=batch_sizes, world_size=world_size, **run)


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


def _share(num_samples: int, batch_size: int, world_size: int, drop_last: bool) -> Dealing:
    """Equal shares in batches of one size, as a ``DistributedSampler`` and a loader make them."""
    full, short = divmod(-(-num_samples // world_size), batch_size)
    batches = [EqualBatches(full, batch_size, batch_size * world_size)] if full else []
    if short and not drop_last:
        batches.append(EqualBatches(1, short, short * world_size))
    dropping = " (a short last batch is dropped)" if drop_last else ""
    return Dealing(num_samples, tuple(batches), f"of {batch_size:,}{dropping}")


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
