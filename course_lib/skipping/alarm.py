"""How what one rank knows about its window reaches the others: as NaN, in the gradients that DDP reduces anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from course_lib.skipping.skips import NON_FINITE_LOSS


class Alarm:
    """What this rank has found wrong in the window that runs: losses that are not finite, and what was rejected."""

    def __init__(self) -> None:
        self.rejections: list[str] = []
        self._loss_factor: Tensor | None = None  # 1, or NaN from the first loss on that was not finite
        self._hooks: list[Any] = []

    def mark(self, loss: Tensor) -> Tensor:
        """The loss, or NaN where it is not finite: its gradients are then NaN, and reach every rank.

        An infinite loss may well have finite gradients (by a constant), which no reduction could tell from others.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"the loss must be a tensor of one element, got {got}")
        if loss.device.type == "cpu" and math.isfinite(loss.item()):  # to read it waits for no device
            return loss
        factor = loss.detach() * 0 + 1
        self._loss_factor = (
            factor if self._loss_factor is None else self._loss_factor * factor.reshape(self._loss_factor.shape)
        )
        return loss * factor

    def reject(self, reason: str, parameters: Iterable[Tensor]) -> None:
        """Make the gradients of the parameters NaN, from the next backward until ``reset``."""
        if not self.rejections:
            # Not by the loss: what masks its gradient (no valid target, a dead ReLU) would mask the NaN too.
            self._hooks = [parameter.register_hook(_all_nan) for parameter in parameters if parameter.requires_grad]
        self.rejections.append(reason)

    def beside(self, norm: Tensor) -> Tensor:
        """The norm and, after it, NaN where a marked loss was not finite: one tensor, so that the host waits once."""
        factor = torch.ones_like(norm) if self._loss_factor is None else self._loss_factor.reshape(()).to(norm)
        return torch.stack([norm, factor])

    def read(self, norm: Tensor) -> tuple[float, float]:
        """What ``beside`` holds, on the host."""
        if self._loss_factor is None:
            return norm.item(), 1.0
        value, factor = self.beside(norm).tolist()
        return value, factor

    def reset(self) -> None:
        self.rejections = []
        self._loss_factor = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def own_reason(rejections: list[str], loss_factor: float) -> str | None:
    """Why this rank itself finds a window bad; None where it doesn't."""
    if not rejections and loss_factor == 1:
        return None
    return "; ".join(rejections) or NON_FINITE_LOSS


def _all_nan(gradient: Tensor) -> Tensor:
    return gradient * math.nan
