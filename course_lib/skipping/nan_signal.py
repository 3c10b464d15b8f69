"""How what one rank knows about its window reaches the others: as NaN, in the gradients that DDP reduces anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib._tensors import nodes_behind
from course_lib.skipping.skips import NON_FINITE_LOSS

NODES = 128
"""Of the parameters that a loss reaches by so many nodes of its graph, the smallest carries the signal."""


class NanSignal:
    """What this rank has found wrong in the window that runs: losses that are not finite, and what was rejected."""

    def __init__(self) -> None:
        self.rejections: list[str] = []
        self._factor: Tensor | None = None  # 1, or NaN from the first loss on that was not finite, or was rejected
        self._hooks: dict[Tensor, Any] = {}

    def mark(self, loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
        """The loss, or NaN where it is not finite, and then the gradient of a parameter as well: it reaches every rank.

        An infinite loss may well have finite gradients (by a constant), which no reduction could tell from others; and
        what masks a gradient (no valid target, a mean over nothing) masks a NaN that comes by way of the loss. One
        gradient is enough: a multiplication for each would be dear.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"the loss must be a tensor of one element, got {got}")
        if loss.device.type == "cpu" and math.isfinite(loss.item()):  # a loss on another device is not waited for
            return loss
        factor = loss.detach() * 0 + 1
        self._multiply_by(factor.reshape(()), _one_that_is_reached(loss, parameters))
        return loss * factor

    def reject(self, reason: str, parameters: Sequence[Tensor]) -> None:
        """Make the gradients of all parameters NaN, from the next backward until ``reset``: nothing masks them all."""
        self.rejections.append(reason)
        self._multiply_by(torch.full((), math.nan, device=parameters[0].device), parameters)

    def beside(self, norm: Tensor) -> Tensor:
        """The norm and, after it, NaN where this rank found its window bad: one tensor, so that the host waits once."""
        factor = torch.ones_like(norm) if self._factor is None else self._factor.to(norm)
        return torch.stack([norm, factor])

    def reset(self) -> None:
        self.rejections = []
        self._factor = None
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _multiply_by(self, factor: Tensor, parameters: Iterable[Tensor]) -> None:
        self._factor = factor if self._factor is None else self._factor * factor
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(self._times_factor)

    def _times_factor(self, gradient: Tensor) -> Tensor:
        return gradient if self._factor is None else gradient * self._factor.to(gradient.device)


def own_reason(rejections: list[str], factor: float) -> str | None:
    """Why this rank itself finds a window bad; None where it doesn't."""
    if factor == 1:
        return None
    return "; ".join(rejections) or NON_FINITE_LOSS


def _one_that_is_reached(loss: Tensor, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
    """A small one of the parameters that the loss's graph leads to; all, where it leads to none that can be seen."""
    of_interest = set(parameters)
    nodes = [] if loss.grad_fn is None else nodes_behind(loss.grad_fn, {}, most=NODES)
    leaves = [getattr(node, "variable", None) for node in nodes]  # of an AccumulateGrad
    reached = [leaf for leaf in leaves if leaf is not None and leaf in of_interest]
    return [min(reached, key=Tensor.numel)] if reached else of_interest
