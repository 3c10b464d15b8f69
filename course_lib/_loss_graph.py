"""What the graph of a loss tells: whether it is a mean over samples, where a sum is needed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

REDUCTION_MEAN = 1  # at::Reduction, as autograd's nodes store it
PASSES_ON = (
    *("MulBackward", "DivBackward", "NegBackward", "AddBackward", "SubBackward", "RsubBackward"),
    *("ToCopyBackward", "CloneBackward", "SqueezeBackward", "ViewBackward"),
)


def is_mean(loss: Tensor, count: float) -> bool:
    """Whether the loss, or the first of the terms that it adds up, is a mean, or a sum over ``count`` divided by it.

    A weight of 1 or more may be the count that makes a mean a sum again, or the caller's word that it is one.
    """
    node: Any = loss.grad_fn
    while node is not None:
        name = type(node).__name__.rstrip("0123456789")
        parents = [parent for parent, _ in getattr(node, "next_functions", ()) if parent is not None]
        number = _number(node) if len(parents) == 1 else None
        if name == "MeanBackward" or getattr(node, "_saved_reduction", None) == REDUCTION_MEAN:
            return True
        if name == "DivBackward" and number == count > 2:  # by 2 it may be a half
            return True
        if name == "MulBackward" and (number is None or abs(number) >= 1):
            return False
        node = parents[0] if parents and name in PASSES_ON else None
    return False


def _number(node: Any) -> float | None:
    """What a node multiplies or divides by; None where that is a tensor of many, or on another device."""
    other = getattr(node, "_saved_other", None)
    if other is None:
        other = getattr(node, "_saved_self", None)
    if not isinstance(other, Tensor):
        return other
    return float(other.detach()) if other.numel() == 1 and other.device.type == "cpu" else None
