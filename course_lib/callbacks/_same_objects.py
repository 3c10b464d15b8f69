"""A run that is resumed with the objects of a fit that an exception has ended: what they keep."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from course_lib._lightning import (
    AVERAGED_EPOCH,
    LAST_STEP_SAVED,
    RESULTS,
    SAVE_IS_PUT_OFF,
    VALIDATION_HAS_RUN,
)
from course_lib.callbacks._trainer import callbacks_of_kind


def begin_as_in_a_new_process(trainer: Trainer) -> None:
    """Set what no checkpoint sets as it stands in objects that are new."""
    epoch_loop = trainer.fit_loop.epoch_loop
    # Else an epoch whose validation is over in the checkpoint ends the next one, too, ahead of its first batch.
    VALIDATION_HAS_RUN.put(epoch_loop.val_loop, False)
    RESULTS.of(epoch_loop).clear()
    for average in callbacks_of_kind(trainer, WeightAveraging):
        AVERAGED_EPOCH.put(average, -1)
    for saver in callbacks_of_kind(trainer, ModelCheckpoint):
        # Else it takes a step that is saved in no file of the resumed run for saved, and keeps no best of it.
        LAST_STEP_SAVED.put(saver, 0)
        SAVE_IS_PUT_OFF.put(saver, False)
