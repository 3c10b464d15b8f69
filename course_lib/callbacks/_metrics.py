"""What a run that is resumed owes to what goes by a metric: ``ReduceLROnPlateau``, ``EarlyStopping``.

A Trainer's checkpoint holds no metric: not what was logged last, and not the sums behind the mean of an epoch that is
under way. Lightning steps a ``ReduceLROnPlateau`` when an epoch has ended, but never in one that it has resumed; and it
passes over the validation that a checkpoint was saved ahead of. The rule: *the metrics go into the checkpoint, and a
validation that was due is made.*
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from course_lib._lightning import (
    BATCHES_THAT_STEPPED,
    CAN_STOP_EARLY,
    DATA_FETCHER,
    EVALUATION_STAGE,
    RESULTS,
    SHOULD_ACCUMULATE,
    STOPPING_CHECK,
    VALIDATION_IS_DUE,
)
from course_lib.callbacks._progress import count_the_last_epoch_as_ended
from course_lib.callbacks._trainer import callbacks_of_kind
from course_lib.callbacks._window_end import WindowEnd


def has_plateaus(trainer: Trainer) -> bool:
    return len(_plateaus_of_epochs(trainer)) > 0


def has_plateaus_of_steps(trainer: Trainer) -> bool:
    return any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs)


def make_the_validation_that_was_due(trainer: Trainer, was_under_way: bool) -> None:
    """Have a run that goes on within an epoch, ahead of a validation or within it, begin with all of it."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if not trainer.fit_loop.restarted_mid_epoch or epoch_loop.batch_progress.is_last_batch:
        return
    if epoch_loop.restarted_on_train_batch_end and VALIDATION_IS_DUE.of(epoch_loop)(DATA_FETCHER.of(trainer.fit_loop)):
        was_under_way = True
        if not SHOULD_ACCUMULATE.of(epoch_loop)():  # Lightning counts this step once more behind the validation
            BATCHES_THAT_STEPPED.put(epoch_loop, BATCHES_THAT_STEPPED.of(epoch_loop) - 1)
    if was_under_way:
        EVALUATION_STAGE.put(epoch_loop.val_loop, RestartStage.RESTARTED_MID_EVALUATION)
        epoch_loop.val_loop.batch_progress.reset_on_run()  # else it leaves out as many batches as were done


def resumes_at_an_epochs_end(trainer: Trainer) -> bool:
    """Whether the checkpoint was saved by one of the hooks of an epoch's end, behind its last batch."""
    return trainer.fit_loop.restarted_on_epoch_end or trainer.fit_loop.resumed_on_epoch_end


def epoch_that_ended(trainer: Trainer) -> int:
    """Of a run that is resumed behind an epoch's last batch."""
    return trainer.current_epoch - (not trainer.fit_loop.restarted_on_epoch_end)


def a_stop_waits(trainer: Trainer) -> bool:
    """Whether the run was told to stop, and ``min_epochs`` or ``min_steps`` has put it off."""
    return trainer.should_stop and not CAN_STOP_EARLY.of(trainer.fit_loop)


def logged_before(own: dict[str, Any]) -> dict[str, Tensor]:
    """What had been logged last when a checkpoint was saved, in which ExactResume has kept ``own``."""
    values = own.get("logged", own.get("monitored", {}))  # older ones have what decides alone, as numbers
    return {name: torch.as_tensor(value) for name, value in values.items()}


def _on_cpu(metrics: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of what is a number; whoever writes into ``trainer.callback_metrics`` may put in anything."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, Tensor | float | int)}
    return {name: torch.as_tensor(value).detach().to("cpu", copy=True) for name, value in numbers.items()}


class Deciders:
    """What a ReduceLROnPlateau and an EarlyStopping had seen, and had decided, when a checkpoint was saved."""

    def __init__(self, own: dict[str, Any] | None = None) -> None:
        own = own or {}
        self._metrics = logged_before(own)
        self._checked_epochs: list[int] = own.get("checked_epochs", [])
        self._stopped_early: bool = own.get("stopped_early", False)
        self._stop_waits: bool = own.get("stop_waits", False)
        self._checks: list[_CountedChecks] = []

    def state(self, trainer: Trainer) -> dict[str, Any]:
        stops = callbacks_of_kind(trainer, EarlyStopping)
        stopped = any(stop.stopping_reason != EarlyStoppingReason.NOT_STOPPED for stop in stops)
        return {
            "logged": _on_cpu(trainer.callback_metrics),
            "checked_epochs": [checks.epoch for checks in self._checks],
            "stopped_early": trainer.should_stop and stopped and not a_stop_waits(trainer),
            "stop_waits": a_stop_waits(trainer),
        }

    def watch(self, trainer: Trainer) -> None:
        """Count what an EarlyStopping sees, until ``leave``."""
        stops = callbacks_of_kind(trainer, EarlyStopping)
        epochs = self._checked_epochs + [-1] * len(stops)
        self._checks = [_CountedChecks(stop, epoch) for stop, epoch in zip(stops, epochs, strict=False)]

    def leave(self) -> None:
        for checks in self._checks:
            checks.end()

    def set_back(self, callbacks: dict[str, Any], own: dict[str, Any], window_end: WindowEnd) -> None:
        """In a checkpoint that is set back to a window's start: the validations since then are made again."""
        own |= {"logged": _on_cpu(window_end.logged), "stop_waits": window_end.stop_waits}
        for checks in self._checks:
            if checks.set_back(callbacks, window_end.micro_batches):
                own["stopped_early"] = False

    def see_again(self, trainer: Trainer) -> None:
        """Put back what was logged last, for what asks for it before it is logged again."""
        device = trainer.strategy.root_device
        trainer.callback_metrics.update({name: value.to(device) for name, value in self._metrics.items()})

    def end_the_epoch(self, trainer: Trainer, pl_module: LightningModule) -> str:
        """Decide what is due at the end of the epoch that a run goes on behind; or say why that cannot be done."""
        fit_loop = trainer.fit_loop
        at_end, ended = resumes_at_an_epochs_end(trainer), epoch_that_ended(trainer)
        due = [config for config in _plateaus_of_epochs(trainer) if (ended + 1) % config.frequency == 0]
        within = fit_loop.restarted_mid_epoch and fit_loop.epoch_loop.batch_progress.is_last_batch
        # Lightning calls an EarlyStopping behind the other callbacks, and behind what they save.
        stops = zip(callbacks_of_kind(trainer, EarlyStopping), self._checked_epochs, strict=False)
        unchecked = [stop for stop, epoch in stops if epoch < ended]
        asked = {str(one.monitor) for one in (*due, *unchecked)}
        if (within and _names_that_decide(trainer)) or (at_end and not asked <= self._metrics.keys()):
            return (
                "this checkpoint was saved behind an epoch's last batch and ahead of its end, where a "
                "ReduceLROnPlateau or an EarlyStopping goes by a metric that is yet to come: what it does there would "
                "be left out. Resume from a checkpoint within an epoch, or of on_train_epoch_end"
            )
        if at_end:
            for config in due:
                pl_module.lr_scheduler_step(config.scheduler, self._metrics[str(config.monitor)])
            for stop in unchecked:
                stop.on_train_epoch_end(trainer, pl_module)
            self._checked_epochs = [ended] * len(self._checked_epochs)
        return ""

    def end_a_run_that_was_stopped(self, trainer: Trainer) -> None:
        """What an EarlyStopping, or a callback of one's own, asks of the Trainer is not in a checkpoint."""
        trainer.should_stop |= self._stop_waits
        if self._stopped_early and callbacks_of_kind(trainer, EarlyStopping):
            trainer.should_stop = True
            count_the_last_epoch_as_ended(trainer)
            rank_zero_warn(
                "an EarlyStopping had ended this run, and it ends here as well, without another batch. To train on, "
                "resume it without that callback"
            )


class _CountedChecks:
    """Of one EarlyStopping: the epoch in which it looked at its metric last, which its state does not say."""

    def __init__(self, callback: EarlyStopping, epoch: int) -> None:
        self.epoch = epoch
        self._callback, self._check = callback, STOPPING_CHECK.of(callback)
        self._before: list[tuple[int, int, dict[str, Any]]] = []
        """The optimizer steps, the micro-batches, and the callback's state, ahead of each look since the last step."""
        STOPPING_CHECK.put(callback, self)

    def __call__(self, trainer: Trainer) -> None:
        step, micro_batches = trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._before = [one for one in self._before if one[0] == step]
        self._before.append((step, micro_batches, self._callback.state_dict()))
        self._check(trainer)
        self.epoch = trainer.current_epoch

    def set_back(self, callbacks: dict[str, Any], micro_batches: int) -> bool:
        """In a checkpoint: to ahead of what it has seen since so many micro-batches; whether there is something."""
        state = next((state for _, seen_at, state in self._before if seen_at > micro_batches), None)
        if state is not None:
            callbacks[self._callback.state_key] = state
        return state is not None

    def end(self) -> None:
        vars(self._callback).pop(STOPPING_CHECK.name, None)


def _plateaus_of_epochs(trainer: Trainer) -> list[Any]:
    return [
        config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.interval == "epoch"
    ]


def _names_that_decide(trainer: Trainer) -> set[str]:
    names = {str(config.monitor) for config in _plateaus_of_epochs(trainer)}
    return names | {callback.monitor for callback in callbacks_of_kind(trainer, EarlyStopping)}


class EpochMetrics:
    """What training gathers of an epoch's metrics, also over resumes within the epoch.

    Of one rank, and where numbers are logged. Of several ranks a checkpoint holds the first one's alone, and a
    ``torchmetrics.Metric`` keeps to itself what it has gathered. A metric that is not logged again in the rest of the
    epoch is missing at its end, which Lightning says where something goes by it.
    """

    def __init__(self, before: dict[str, Any] | None = None, world_size: int = 1) -> None:
        before = before or {"epoch": None, "world_size": 1, "names": {}, "sums": {}}
        self._epoch = before["epoch"]
        self._names: dict[str, list[str]] = before["names"]
        self._waiting: dict[str, Any] = dict(before["sums"]) if before["world_size"] == world_size == 1 else {}
        """What was gathered before, of metrics that have not been logged since."""
        self._lost = self._names.keys() - self._waiting.keys()

    def state(self, trainer: Trainer) -> dict[str, Any]:
        self.gather_on(trainer)
        names, sums, lost = {}, {}, set()
        if trainer.current_epoch == self._epoch:
            names, sums, lost = dict(self._names), dict(self._waiting), self._lost
        for key, result in RESULTS.of(trainer.fit_loop.epoch_loop).items():
            if result.meta.on_epoch and not result.has_reset:
                names[key] = [result.meta.name, result.meta.forked_name(on_step=False)]
                if result.is_tensor and key not in lost:
                    sums[key] = dict(result.metric_state)  # Lightning makes new tensors, and does not change these
        return {"epoch": trainer.current_epoch, "world_size": trainer.world_size, "names": names, "sums": sums}

    def gather_on(self, trainer: Trainer) -> None:
        """Behind each micro-batch: add what was gathered before to the first value that comes after it."""
        if trainer.current_epoch != self._epoch:
            return
        results = RESULTS.of(trainer.fit_loop.epoch_loop)
        for key in self._waiting.keys() & results.keys():
            result = results[key]
            extreme = result.meta.is_max_reduction or result.meta.is_min_reduction
            for name, before in self._waiting.pop(key).items():
                both = before.to(result.value.device), getattr(result, name)
                setattr(result, name, result.meta.reduce_fx(*both) if extreme else both[0] + both[1])

    def see_again(self, trainer: Trainer) -> None:
        """For the callbacks of an epoch that ends without another batch: the means of what was gathered of it."""
        for key, sums in self._waiting.items():
            mean = sums["value"] / sums.get("cumulated_batch_size", 1)  # an extreme has no count
            trainer.callback_metrics.update(dict.fromkeys(self._names[key], mean))

    def why_refused(self, trainer: Trainer) -> str:
        """Why a run cannot go on within this epoch; empty where it can."""
        if trainer.current_epoch != self._epoch:
            return ""
        lost = {name for key in self._lost for name in self._names[key]}
        wanted = _names_that_decide(trainer)
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:  # no batch logs it again
            wanted |= {str(checkpoints.monitor) for checkpoints in callbacks_of_kind(trainer, ModelCheckpoint)}
        if not lost & wanted:
            return ""
        return (
            "this checkpoint was saved within an epoch, or ahead of its end, and a ReduceLROnPlateau, an EarlyStopping "
            f"or a ModelCheckpoint goes by {', '.join(sorted(lost & wanted))}, a mean over all of the epoch's batches: "
            "what several ranks, or a torchmetrics.Metric, have gathered of it is not in the checkpoint. Resume from a "
            "checkpoint of an epoch's end, or let it go by a metric of the validation"
        )
