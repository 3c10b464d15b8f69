"""What a run that is resumed owes to the callbacks of Lightning's that average weights."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from course_lib._lightning import AVERAGE, AVERAGED_UNTIL, AVERAGING_SCHEDULE
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


def average_the_epoch_that_ended(trainer: Trainer, pl_module: LightningModule) -> None:
    """For a run that goes on behind an epoch's last batch: no hook comes for that epoch's end any more."""
    for callback in callbacks_of_kind(trainer, WeightAveraging):
        if callback.should_update(epoch_idx=trainer.current_epoch - 1):
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
        state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        before = [dict(group) for group in groups]
        callback.on_train_epoch_start(trainer, pl_module)
        pl_module.load_state_dict(state)
        for group, own in zip(groups, before, strict=True):
            group.update(own)
