"""What a run that is resumed owes to schedules that go by a metric (``ReduceLROnPlateau``).

Lightning steps them when an epoch has ended, by what was logged in it, and never in an epoch that it has resumed. A
checkpoint of an epoch's end is saved before that. The rule: *the metric goes into the checkpoint.*
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def has_plateaus(trainer: Trainer) -> bool:
    return len(_plateaus_of_epochs(trainer)) > 0


def monitored(trainer: Trainer) -> dict[str, float]:
    """What these schedules would see now."""
    metrics = trainer.callback_metrics
    names = [str(config.monitor) for config in _plateaus_of_epochs(trainer)]
    return {name: float(metrics[name]) for name in names if name in metrics}


def step_plateaus(trainer: Trainer, metrics: dict[str, float]) -> bool:
    """Step them for the epoch that has ended, as Lightning would have; False where a metric is not known."""
    due = [c for c in _plateaus_of_epochs(trainer) if (trainer.current_epoch + 1) % c.frequency == 0]
    if any(str(config.monitor) not in metrics for config in due):
        return False
    for config in due:
        config.scheduler.step(metrics[str(config.monitor)])
    return True


def _plateaus_of_epochs(trainer: Trainer) -> list[Any]:
    return [
        config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.interval == "epoch"
    ]
