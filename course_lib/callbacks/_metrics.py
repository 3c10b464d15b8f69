"""What a run that is resumed owes to what goes by a metric: ``ReduceLROnPlateau``, ``EarlyStopping``.

A Trainer's checkpoint holds no metric: not what was logged last, and not the sums behind the mean of an epoch that is
under way. And Lightning steps a ``ReduceLROnPlateau`` when an epoch has ended, but never in one that it has resumed.
The rule: *the metrics go into the checkpoint.*
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping

from course_lib._lightning import RESULTS
from course_lib.callbacks._trainer import callbacks_of_kind


def has_plateaus(trainer: Trainer) -> bool:
    return len(_plateaus_of_epochs(trainer)) > 0


def monitored(trainer: Trainer) -> dict[str, float]:
    """What these schedules would see now."""
    metrics = trainer.callback_metrics
    names = [str(config.monitor) for config in _plateaus_of_epochs(trainer)]
    return {name: float(metrics[name]) for name in names if name in metrics}


def step_plateaus_of_ended_epoch(trainer: Trainer, metrics: dict[str, float]) -> str:
    """Step them in a run that goes on behind an epoch, as Lightning would have; or say why that cannot be done."""
    fit_loop = trainer.fit_loop
    due = [c for c in _plateaus_of_epochs(trainer) if (trainer.current_epoch + 1) % c.frequency == 0]
    within = fit_loop.restarted_mid_epoch and fit_loop.epoch_loop.batch_progress.is_last_batch
    at_end = fit_loop.restarted_on_epoch_end or fit_loop.resumed_on_epoch_end
    if (within and has_plateaus(trainer)) or (at_end and any(str(config.monitor) not in metrics for config in due)):
        return (
            "this checkpoint was saved behind an epoch's last batch and ahead of its end, where a ReduceLROnPlateau is "
            "stepped by a metric that the checkpoint does not hold: its step would be lost. Resume from a checkpoint "
            "within an epoch, or of on_train_epoch_end"
        )
    for config in due if at_end else []:
        config.scheduler.step(metrics[str(config.monitor)])
    return ""


def _plateaus_of_epochs(trainer: Trainer) -> list[Any]:
    return [
        config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.interval == "epoch"
    ]


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

    def why_refused(self, trainer: Trainer) -> str:
        """Why a run cannot go on within this epoch; empty where it can."""
        if trainer.current_epoch != self._epoch:
            return ""
        lost = {name for key in self._lost for name in self._names[key]}
        wanted = {config.monitor for config in _plateaus_of_epochs(trainer)}
        wanted |= {callback.monitor for callback in callbacks_of_kind(trainer, EarlyStopping)}
        if not lost & wanted:
            return ""
        return (
            f"this checkpoint was saved within an epoch, and a ReduceLROnPlateau or an EarlyStopping goes by "
            f"{', '.join(sorted(lost & wanted))}, a mean over all of the epoch's batches: what several ranks, or a "
            "torchmetrics.Metric, have gathered of it is not in the checkpoint. Resume from a checkpoint of an epoch's "
            "end, or let it go by a metric of the validation"
        )
