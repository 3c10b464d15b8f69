"""What the callbacks that touch gradients ask of a Trainer."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def require_plain_optimization(
    callback: Callback, trainer: Trainer, pl_module: LightningModule, *, with_manual: str, other_strategies: str
) -> None:
    """Raise a MisconfigurationException but for automatic optimization on one device or under DDP.

    ``with_manual`` says what to do instead, ``other_strategies`` what is wrong with them.
    """
    name, strategy = type(callback).__name__, trainer.strategy
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(f"{name} needs automatic optimization; with manual optimization {with_manual}")
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"{name} knows one device and DDP, got {type(strategy).__name__}, {other_strategies}"
        )
