"""The trial behind window where a module's own code steps: micro-batches of two epochs, and the steps they end in.

Of a long epoch its beginning and its end are run. Each backward pass is followed into the gradients that a step
applies; and ``training_step`` is called once more, to see what it hands to its backward passes.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from rehearse.checks.applied import Applied, Factors, factors_of
from rehearse.checks.window import MOST_BATCHES, put_together, size_of, stop_drawing
from rehearse.runs.run import Enough, TrainingRun, seed_as_another_process

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

    @property
    def whole_run(self) -> bool:
        """Whether the run has one epoch, and has ended with it."""
        return bool(self.ends) and all(epoch == 0 for epoch, _ in self.sizes)


@dataclass(frozen=True)
class Loss:
    """What was handed to a backward pass."""

    value: float
    factors: Factors | None


def followed_batches(run: TrainingRun, folder: Path) -> FollowedBatches:
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
