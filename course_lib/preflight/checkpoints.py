"""When a Trainer's checkpoint callbacks save, as far as their settings say it before the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from course_lib.preflight.lightning_run import is_any_of

MOST_UPDATES = 100_000
"""How far a multiple of ``every_n_train_steps`` that is no epoch's end is looked for."""


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
        if self.any_batch:
            some = batches // 2
            if window > 1 and some % window == 0 and some + 1 < batches:
                some += 1  # it may fall within a window as well
            return (0, some) if some else None
        if self.every_updates:
            updates = math.ceil(batches / window)
            for update in range(self.every_updates, MOST_UPDATES, self.every_updates):
                epoch, number = divmod(update - 1, updates)
                if number + 1 < updates:
                    return epoch, (number + 1) * window
                if epoch and update % updates == 0 and self.every_updates % updates == 0:
                    return None
            return None
        every = self.every_batches
        step = max(1, int(batches * every)) if isinstance(every, float) else every
        for batch in range(step, MOST_UPDATES if self.across_epochs else batches, step or 1):
            epoch, number = divmod(batch - 1, batches)
            if number + 1 < batches:
                return epoch, number + 1
            if step % batches == 0:
                return None
        return None

    def may_cut_a_window(self, batches: int, window: int) -> bool:
        """Whether it may save between the micro-batches of one update."""
        if window == 1 or batches < 2 or self.every_updates:
            return False
        if self.any_batch:
            return True
        step = max(1, int(batches * self.every_batches)) if isinstance(self.every_batches, float) else self.every_batches
        return bool(step and step % window and (self.across_epochs or step < batches))


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
    updates = int(callback._every_n_train_steps)
    if updates:
        yield Saves(f"ModelCheckpoint(every_n_train_steps={updates})", every_updates=updates)
    if callback._train_time_interval is not None:
        seconds = callback._train_time_interval.total_seconds()
        yield Saves(f"ModelCheckpoint(train_time_interval=timedelta(seconds={seconds:g}))", any_batch=True)
    if not callback._every_n_epochs:
        return
    if not _validates(trainer, model):
        yield Saves("ModelCheckpoint")  # at the ends of epochs
        return
    interval = trainer.val_check_interval
    says = f"val_check_interval={interval!r} with ModelCheckpoint"
    if callback._save_on_train_epoch_end or (interval == 1.0 and isinstance(interval, float)):
        yield Saves("ModelCheckpoint")
    elif getattr(trainer, "_val_check_time_interval", None) is not None:
        yield Saves(says, any_batch=True)
    else:
        yield Saves(says, every_batches=interval, across_epochs=trainer.check_val_every_n_epoch is None)


def _validates(trainer: Any, model: Any) -> bool:
    """Whether there is a ``validation_step``; its data may only be given to ``fit``."""
    own = not type(model).validation_step.__module__.endswith("core.module")
    return own and trainer.limit_val_batches != 0
