"""When a Trainer's checkpoint callbacks save, as far as their settings say it before the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rehearse import _lightning

MOST_MOMENTS = 1_000
"""How often a run is asked whether it saves before it is taken to save at the ends of epochs only."""


@dataclass(frozen=True)
class Saves:
    """One way in which a run comes to save."""

    setting: str
    """What asks for it, as it is written in the run."""
    every_updates: int = 0
    every_batches: int | float = 0
    """Micro-batches of an epoch; a float is the share of an epoch."""
    across_epochs: bool = False
    """Whether the batches are counted through the whole run."""
    any_batch: bool = False
    """Whether time or chance decides."""

    def first_within_epoch(self, batches: int, window: int) -> tuple[int, int] | None:
        """``(epoch, micro-batches of it that are done)`` at the first save before an epoch's end.

        Args:
            batches: Micro-batches of an epoch.
            window: Micro-batches of an update.
        """
        return next(self._within_epochs(batches, window), None)

    def may_cut_a_window(self, batches: int, window: int) -> bool:
        """Whether it may save between the micro-batches of one update."""
        if self.any_batch:
            return window > 1 and batches > 1
        return any(batch % window for _, batch in self._within_epochs(batches, window))

    def _within_epochs(self, batches: int, window: int) -> Iterator[tuple[int, int]]:
        if self.any_batch:
            some = batches // 2
            if window > 1 and some % window == 0 and some + 1 < batches:
                some += 1  # it may fall within a window as well
            if some:
                yield 0, some
            return
        updates, saved_at = math.ceil(batches / window), 0
        for epoch, batch in self._moments(batches, window, updates):
            # Updates of the whole run: the last window of an epoch may be short, and steps as well.
            update = epoch * updates + (updates if batch == batches else batch // window)
            if update != saved_at:  # a Trainer saves once after an update
                saved_at = update
                if batch < batches:
                    yield epoch, batch

    def _moments(self, batches: int, window: int, updates: int) -> Iterator[tuple[int, int]]:
        """Where it is asked whether to save."""
        if self.every_updates:
            for update in range(self.every_updates, MOST_MOMENTS * self.every_updates, self.every_updates):
                epoch, number = divmod(update - 1, updates)
                yield epoch, min((number + 1) * window, batches)
        elif self.every_batches:
            share = isinstance(self.every_batches, float)
            step = max(1, int(batches * self.every_batches)) if share else int(self.every_batches)
            for moment in range(1, MOST_MOMENTS):
                if self.across_epochs:
                    epoch, number = divmod(moment * step - 1, batches)
                    yield epoch, number + 1
                elif step <= batches:
                    epoch, number = divmod(moment - 1, batches // step)
                    yield epoch, (number + 1) * step


def saves_of(trainer: Any, model: Any) -> list[Saves]:
    """Each way in which the run saves; none where it has no checkpoint callback. To be asked before a trial starts."""
    found: list[Saves] = []
    for callback in trainer.callbacks:
        if is_any_of(callback, {"ModelCheckpoint"}):
            found += _of_model_checkpoint(callback, trainer, model)
        elif is_any_of(callback, {"Checkpoint"}):
            found.append(Saves(type(callback).__name__, any_batch=True))
    return found


def _of_model_checkpoint(callback: Any, trainer: Any, model: Any) -> Iterator[Saves]:
    if getattr(callback, "save_on_exception", False):
        yield Saves("ModelCheckpoint(save_on_exception=True)", any_batch=True)
    if callback.save_top_k == 0 and not callback.save_last:
        return
    updates = int(_lightning.SAVES_EVERY_STEPS.of(callback))
    if updates:
        yield Saves(f"ModelCheckpoint(every_n_train_steps={updates})", every_updates=updates)
    if (time_between := _lightning.SAVES_BY_TIME.of(callback)) is not None:
        seconds = time_between.total_seconds()
        yield Saves(f"ModelCheckpoint(train_time_interval=timedelta(seconds={seconds:g}))", any_batch=True)
    if not _lightning.SAVES_EVERY_EPOCHS.of(callback):
        return
    if not validates(trainer, model):
        yield Saves("ModelCheckpoint")  # at the ends of epochs
        return
    interval = trainer.val_check_interval
    says = f"val_check_interval={interval!r} with ModelCheckpoint"
    if _lightning.SAVES_AFTER_TRAINING.of(callback) or (interval == 1.0 and isinstance(interval, float)):
        yield Saves("ModelCheckpoint")
    elif _lightning.VALIDATION_SECONDS.of(trainer) is not None:
        yield Saves(says, any_batch=True)
    else:
        yield Saves(says, every_batches=interval, across_epochs=trainer.check_val_every_n_epoch is None)


def validates(trainer: Any, model: Any) -> bool:
    """Whether there is a ``validation_step``; its data may only be given to ``fit``."""
    return not is_lightnings(model, "validation_step") and trainer.limit_val_batches != 0


def is_any_of(callback: Any, names: set[str]) -> bool:
    """Whether it is of a class of some of these names, whichever package of Lightning that comes from."""
    return any(cls.__name__ in names for cls in type(callback).__mro__)


def is_lightnings(module: Any, hook: str) -> bool:
    """Whether a module has not written this hook itself: it is the function that LightningModule has."""
    packages = ("lightning", "pytorch_lightning")
    own = type(module)
    base = next(
        cls for cls in own.__mro__ if cls.__name__ == "LightningModule" and cls.__module__.split(".")[0] in packages
    )
    return getattr(own, hook) is getattr(base, hook)


def is_by_the_author(module: str) -> bool:
    """Whether a module of Python is the run's author's: none of torch's, of Lightning's, or of this project's."""
    return module.split(".")[0] not in ("torch", "lightning", "pytorch_lightning", "course_lib", "rehearse")
