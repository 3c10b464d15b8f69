"""How what one rank knows about its window reaches the others: as NaN, in the gradients that DDP reduces anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from course_lib.skipping.skips import NON_FINITE_LOSS

CANDIDATES = 16
"""Of so many parameters that a loss reaches, the smallest carries the signal where the loss can't be read."""


class NanSignal:
    """What this rank has found wrong in the window that runs: losses that are not finite, and what was rejected."""

    def __init__(self) -> None:
        self.rejections: list[str] = []
        self._loss_factor: Tensor | None = None  # 1, or NaN from the first loss on that was not finite
        self._hooks: dict[Tensor, Any] = {}

    def mark(self, loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
        """The loss, or NaN where it is not finite, and then the parameters' gradients as well: they reach every rank.

        An infinite loss may well have finite gradients (by a constant), which no reduction could tell from others; and
        what masks a gradient (no valid target, a mean over nothing) masks a NaN that comes by way of the loss.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"the loss must be a tensor of one element, got {got}")
        readable = _is_read_without_waiting(loss)
        if readable and math.isfinite(loss.item()):
            return loss
        factor = loss.detach() * 0 + 1
        self._loss_factor = (
            factor if self._loss_factor is None else self._loss_factor * factor.reshape(self._loss_factor.shape)
        )
        if readable:
            self._hook(parameters, _all_nan)
        else:  # a multiplication for each parameter would be dear, and one NaN is enough
            self._hook(_one_that_is_reached(loss, parameters), self._times_loss_factor)
        return loss * factor

    def reject(self, reason: str, parameters: Iterable[Tensor]) -> None:
        """Make the gradients of the parameters NaN, from the next backward until ``reset``."""
        if not self.rejections:
            # Not by the loss: what masks its gradient (no valid target, a dead ReLU) would mask the NaN too.
            self._hook(parameters, _all_nan)
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
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _hook(self, parameters: Iterable[Tensor], function: Any) -> None:
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(function)

    def _times_loss_factor(self, gradient: Tensor) -> Tensor:
        if self._loss_factor is None:  # the window has ended
            return gradient
        return gradient * self._loss_factor.reshape(()).to(gradient.device)


def own_reason(rejections: list[str], loss_factor: float) -> str | None:
    """Why this rank itself finds a window bad; None where it doesn't."""
    if not rejections and loss_factor == 1:
        return None
    return "; ".join(rejections) or NON_FINITE_LOSS


def _is_read_without_waiting(loss: Tensor) -> bool:
    return loss.device.type == "cpu"


def _all_nan(gradient: Tensor) -> Tensor:
    return gradient * math.nan


def _one_that_is_reached(loss: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """A small one of the parameters that the loss's graph leads to; all, where it leads to none that can be seen."""
    wanted = list(parameters)
    of_interest = set(wanted)
    reached: list[Tensor] = []
    ahead, seen = [loss.grad_fn], set()
    while ahead and len(reached) < CANDIDATES:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        if leaf is not None and leaf in of_interest:
            reached.append(leaf)
        ahead += [parent for parent, _ in node.next_functions]
    return [min(reached, key=torch.Tensor.numel)] if reached else wanted
