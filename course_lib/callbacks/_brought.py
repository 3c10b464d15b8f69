"""ExactResume, in a Trainer that has a callback which needs it."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from course_lib.callbacks._trainer import callbacks_of_kind, refuse_another_lightning
from course_lib.callbacks.exact_resume import ExactResume


def bring_exact_resume(trainer: Trainer, pl_module: LightningModule, *, reseed: bool = True) -> None:
    """Have the Trainer use an ExactResume, unless it has one: for the ``setup`` of what needs it."""
    refuse_another_lightning("this callback", trainer)
    if not pl_module.automatic_optimization or trainer.strategy.handles_gradient_accumulation:
        return
    for callback in callbacks_of_kind(trainer, ExactResume):
        callback.reseed |= reseed and callback._brought
        return
    callback = ExactResume(reseed=reseed)
    callback._brought = True
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # Ahead of those that save, which come last, as it is where a reader names it. The Trainer calls its setup next.
    callbacks.insert(len(callbacks) - len(trainer.checkpoint_callbacks), callback)
