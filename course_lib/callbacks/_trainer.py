"""What several callbacks ask of a Trainer."""

from __future__ import annotations

from typing import TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def refuse_another_lightning(user: str, trainer: object) -> None:
    """Raise a MisconfigurationException where the Trainer is ``pytorch_lightning``'s, whose classes are others."""
    if isinstance(trainer, Trainer):
        return
    raise MisconfigurationException(
        f"{user} belongs into a Trainer of lightning.pytorch, got one of {type(trainer).__module__.partition('.')[0]}, "
        "which takes other classes for its callbacks and modules. Write import lightning.pytorch as pl in place of "
        "import pytorch_lightning as pl, in all files of the run"
    )


def require_plain_optimization(
    callback: Callback, trainer: Trainer, pl_module: LightningModule, *, with_manual: str, other_strategies: str
) -> None:
    """Raise a MisconfigurationException unless optimization is automatic, on one device or under DDP.

    ``with_manual`` says what to do instead, ``other_strategies`` what is wrong with them.
    """
    name, strategy = type(callback).__name__, trainer.strategy
    refuse_another_lightning(name, trainer)
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(f"{name} needs automatic optimization; with manual optimization {with_manual}")
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"{name} knows one device and DDP, got {type(strategy).__name__}, {other_strategies}"
        )
    refuse_stochastic_averaging(name, trainer)


def refuse_stochastic_averaging(user: str, trainer: Trainer) -> None:
    if callbacks_of_kind(trainer, StochasticWeightAveraging):
        raise MisconfigurationException(
            f"{user} does not know the epoch without gradients that StochasticWeightAveraging adds, in which Lightning "
            "makes a step all the same. Take WeightAveraging or EMAWeightAveraging"
        )


Kind = TypeVar("Kind", bound=Callback)


def callbacks_of_kind(trainer: Trainer, kind: type[Kind]) -> list[Kind]:
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def accumulation_by_epoch(trainer: Trainer) -> dict[int, int] | None:
    """What a GradientAccumulationScheduler among the callbacks says; None where there is none."""
    schedulers = callbacks_of_kind(trainer, GradientAccumulationScheduler)
    return schedulers[0].scheduling if schedulers else None


def longest_window(trainer: Trainer) -> int:
    return max(trainer.accumulate_grad_batches, *(accumulation_by_epoch(trainer) or {0: 1}).values())


def has_trained(trainer: Trainer) -> bool:
    """Whether a micro-batch has run in it: in a second fit, its ``global_step`` and its counters go on."""
    return trainer.fit_loop.total_batch_idx >= 0


def finders_of(trainer: Trainer) -> list[Callback]:
    """Those that try fits of their own when a ``fit`` starts."""
    return [*callbacks_of_kind(trainer, LearningRateFinder), *callbacks_of_kind(trainer, BatchSizeFinder)]
