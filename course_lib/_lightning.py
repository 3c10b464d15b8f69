"""What is private to Lightning and is used all the same, in one place.

A name with an underscore may move in any release of Lightning. The rule: *each is written here once, with what it is
used for and the version that it was read in; where it has moved, that is what the error says.*

    if not SHOULD_ACCUMULATE.of(trainer.fit_loop.epoch_loop)():
        ...  # the window's last micro-batch

Lightning is imported inside functions only: whatever imports this file can do without it.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple


class LightningMoved(AttributeError):
    """A private of Lightning is not where it was when it was read."""


class Private(NamedTuple):
    """An attribute, method or function that is private to Lightning."""

    owner: str
    """The class or module of Lightning's that has it."""
    name: str
    used_for: str
    read_in: str = "2.6.6"
    user: str = "course_lib"
    """The package that uses it, and has it in its ``_lightning.py``."""

    def of(self, holder: Any) -> Any:
        """Its value, in an object of the owner's.

        Raises:
            LightningMoved: The object has no such attribute.
        """
        try:
            return getattr(holder, self.name)
        except AttributeError:
            missing = object()  # a property that is there may fail for a reason of its own
            if inspect.getattr_static(holder, self.name, missing) is missing:
                raise LightningMoved(self.moved()) from None
            raise

    def put(self, holder: Any, value: Any) -> None:
        """Set it, where it is."""
        self.of(holder)
        setattr(holder, self.name, value)

    def of_set(self, holder: Any, otherwise: Any) -> Any:
        """Its value where Lightning sets it at some moment of a run, and ``otherwise`` before that moment."""
        return getattr(holder, self.name, otherwise)

    def moved(self) -> str:
        """What is said where it is not there any more."""
        return (
            f"Lightning has moved {self.owner}.{self.name}, which {self.user} uses for {self.used_for}; it was read in "
            f"Lightning {self.read_in}. Install that version, or tell {self.user}/_lightning.py where it is now"
        )


SHOULD_ACCUMULATE = Private(
    "_TrainingEpochLoop", "_should_accumulate", "whether a micro-batch is the last one of its window"
)
LAST_BATCH_REACHED = Private("_TrainingEpochLoop", "_num_ready_batches_reached", "whether an epoch has had all batches")
BATCHES_THAT_STEPPED = Private("_TrainingEpochLoop", "_batches_that_stepped", "the loggers' step in a checkpoint")
VALIDATION_IS_DUE = Private("_TrainingEpochLoop", "_should_check_val_fx", "a validation that a checkpoint is ahead of")
EVALUATION_STAGE = Private("_EvaluationLoop", "_restart_stage", "the same, which is made when the run is resumed")
RESULTS = Private("_TrainingEpochLoop", "_results", "the metrics of which an epoch has gathered a part")
COMBINED_LOADER = Private("_FitLoop", "_combined_loader", "the training loaders, and how many batches of each are read")
DATA_FETCHER = Private("_FitLoop", "_data_fetcher", "counting an epoch again, in a run that changed its ranks")
RESTARTING = Private("_FitLoop", "_restarting", "a run that goes on with the next epoch, and not within the last one")
RESUMING = Private(
    "_FitLoop", "_resuming_from_checkpoint", "a second fit, behind one that was over when it was resumed"
)
STATES_TO_LOAD = Private("_FitLoop", "_combined_loader_states_to_load", "loaders, which go on from their states")
LOADED_CHECKPOINT = Private("_CheckpointConnector", "_loaded_checkpoint", "what a run that is resumed had done")
CHECKPOINT_CONNECTOR = Private("Trainer", "_checkpoint_connector", "the checkpoint that a Trainer has loaded")
AVERAGE = Private("WeightAveraging", "_average_model", "whether an average has moved behind a clean point")
TIME_BETWEEN_SAVES = Private("ModelCheckpoint", "_train_time_interval", "whether it may save within a window")
PARSE_NUM_BATCHES = Private(
    "lightning.pytorch.trainer.connectors.data_connector",
    "_parse_num_batches",
    "the batches that limit_train_batches leaves of a loader's length",
)


def count_limited(length: float, limit: float) -> float:
    """The batches that ``limit_train_batches`` leaves of a training loader's length."""
    from lightning.pytorch.trainer.connectors import data_connector
    from lightning.pytorch.trainer.states import RunningStage

    return PARSE_NUM_BATCHES.of(data_connector)(RunningStage.TRAINING, length, limit)  # type: ignore[no-any-return]


def loaded_checkpoint(trainer: Any) -> dict[str, Any]:
    """The checkpoint that a Trainer goes on from, while it is being set up; empty afterwards, and without one."""
    return LOADED_CHECKPOINT.of(CHECKPOINT_CONNECTOR.of(trainer)) or {}
