"""What a run with windows and without ExactResume is told: nobody is to lose a night at its end."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from course_lib._lightning import TIME_BETWEEN_SAVES
from course_lib.callbacks._refused_resumes import begun_window
from course_lib.callbacks._trainer import callbacks_of_kind, longest_window
from course_lib.callbacks.exact_resume import ExactResume


class TellsOfWindows(Callback):
    """Of several in one run, the first speaks."""

    def tell_of_windows(self, trainer: Trainer) -> None:
        """At a run's start, where a checkpoint may be saved within a window."""
        savers = [one for one in trainer.checkpoint_callbacks if _may_save_within_a_window(one, trainer)]
        if (longest := longest_window(trainer)) > 1 and savers and self._speaks(trainer):
            rank_zero_warn(
                f"{type(savers[0]).__name__} may save within a window of {longest} micro-batches, whose begun part "
                "such a checkpoint does not hold: a run that is resumed from it loses those samples, and draws other "
                "random numbers. Add course_lib.callbacks.ExactResume() to the callbacks, and it goes on as if it had "
                "not been stopped"
            )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._speaks(trainer) and (lost := begun_window(trainer, checkpoint)):
            rank_zero_warn(lost)

    def _speaks(self, trainer: Trainer) -> bool:
        return callbacks_of_kind(trainer, TellsOfWindows)[0] is self and not callbacks_of_kind(trainer, ExactResume)


def _may_save_within_a_window(saver: Any, trainer: Any) -> bool:
    on_exception = isinstance(saver, OnExceptionCheckpoint) or getattr(saver, "save_on_exception", False)
    by_batches = trainer.val_check_interval not in (None, 1.0)
    return on_exception or by_batches or TIME_BETWEEN_SAVES.of_set(saver, None) is not None
