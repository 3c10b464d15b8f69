"""What a run that is resumed owes to the callbacks of Lightning's that average weights."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from course_lib._lightning import (
    AVERAGE,
    AVERAGED_EPOCH,
    AVERAGED_UNTIL,
    AVERAGING_SCHEDULE,
    EPOCHS_BEFORE_AVERAGING,
    SWAP_AVERAGE,
)
from course_lib.callbacks._progress import count_the_last_epoch_as_ended
from course_lib.callbacks._trainer import callbacks_of_kind


def trained_state(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """The state of the module that trains; where WeightAveraging has saved already, ``state_dict`` is the average."""
    state: dict[str, Tensor] = checkpoint.get("current_model_state", checkpoint["state_dict"])
    return state


def an_average_lags(trainer: Trainer) -> bool:
    """Whether the last update is still to go into an average: between the step and the batch's last hook."""
    step = trainer.global_step
    averages = callbacks_of_kind(trainer, WeightAveraging)
    return any(step > AVERAGED_UNTIL.of(one) and one.should_update(step_idx=step - 1) for one in averages)


def averaged_epoch(trainer: Trainer, before: int | None) -> int:
    """The last one at whose end an average took in the weights; ``before`` this process, if it is known; -1: none."""
    averages = callbacks_of_kind(trainer, WeightAveraging)
    return max(-1 if before is None else before, *(AVERAGED_EPOCH.of(average) for average in averages), -1)


def average_the_epoch_that_ended(trainer: Trainer, pl_module: LightningModule, epoch: int) -> None:
    """For a run that goes on behind an epoch's last batch: no hook comes for that epoch's end any more."""
    for callback in callbacks_of_kind(trainer, WeightAveraging):
        if callback.should_update(epoch_idx=epoch):
            AVERAGE.of(callback).update_parameters(pl_module)


def begin_averaging_again(trainer: Trainer, pl_module: LightningModule) -> None:
    """Put StochasticWeightAveraging's schedule, or its epoch for BatchNorm's statistics, where it was.

    It does that when an epoch starts, which a run that is resumed within one does not pass; and its schedule, made
    again, sets the rate to that of a run that begins.
    """
    for callback in callbacks_of_kind(trainer, StochasticWeightAveraging):
        within_epoch = trainer.fit_loop.restarted_mid_epoch
        scheduled = AVERAGING_SCHEDULE.of(callback) is not None and trainer.current_epoch <= callback.swa_end
        if not within_epoch and not scheduled:
            continue
        state = copy.deepcopy(pl_module.state_dict())
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        before = [dict(group) for group in groups]
        callback.on_train_epoch_start(trainer, pl_module)
        pl_module.load_state_dict(state)
        for group, own in zip(groups, before, strict=True):
            group.update(own)


def refuse_a_second_fit(trainer: Trainer) -> None:
    """StochasticWeightAveraging makes its schedule once; and where an exception has ended a fit, it adds an epoch more
    to ``max_epochs``, or leaves the Trainer without backward passes."""
    for callback in callbacks_of_kind(trainer, StochasticWeightAveraging):
        if EPOCHS_BEFORE_AVERAGING.of_set(callback, None) is not None:
            raise MisconfigurationException(
                "this StochasticWeightAveraging has been in a fit before: in a second one it has no schedule, and "
                "counts the epochs of both. Make a new one, and a new Trainer"
            )


def refuse_two_averages(trainer: Trainer) -> None:
    """Each WeightAveraging saves the module's weights under one name, and takes what it finds there for its own."""
    averages = [type(one).__name__ for one in callbacks_of_kind(trainer, WeightAveraging)]
    if len(averages) > 1:
        raise MisconfigurationException(
            f"{' and '.join(averages)} in one run: a checkpoint has room for the average of one, and in a validation "
            "each would put the other's away. Take one"
        )


def end_a_run_that_was_over(trainer: Trainer, pl_module: LightningModule, averaged: int | None) -> None:
    """What the averages owe to a run that is resumed behind its last step: Lightning returns before training starts.

    ``averaged`` is the epoch at whose end an average took in the weights last, if the checkpoint says it.
    """
    progress: Any = trainer.fit_loop.epoch_progress.current
    ahead_of_its_end = progress.processed < progress.started  # of the last epoch, as max_steps may have it
    last_epoch = progress.processed - (not ahead_of_its_end)
    last_is_missing = ahead_of_its_end if averaged is None else averaged < last_epoch
    for callback in callbacks_of_kind(trainer, WeightAveraging):
        if last_is_missing:
            callback.on_train_epoch_end(trainer, pl_module)
        callback.on_train_end(trainer, pl_module)
    count_the_last_epoch_as_ended(trainer)
    for averaging in callbacks_of_kind(trainer, StochasticWeightAveraging):
        averaging.on_train_end(trainer, pl_module)


class CountedSwaps:
    """Of one WeightAveraging: at an odd number, a validation has put the average into the module.

    An exception there leaves it in the module, and the trained weights in the place of the average.
    """

    def __init__(self, callback: WeightAveraging) -> None:
        self.number = 0
        self._callback, self._swap = callback, SWAP_AVERAGE.of(callback)
        SWAP_AVERAGE.put(callback, self)

    def __call__(self, pl_module: LightningModule) -> None:
        self._swap(pl_module)
        self.number += 1

    def end(self, pl_module: LightningModule) -> None:
        """Put the trained weights back into the module, and count no longer."""
        if self.number % 2:
            self(pl_module)
        vars(self._callback).pop(SWAP_AVERAGE.name, None)


def counted_swaps(trainer: Trainer) -> list[CountedSwaps]:
    return [CountedSwaps(callback) for callback in callbacks_of_kind(trainer, WeightAveraging)]
