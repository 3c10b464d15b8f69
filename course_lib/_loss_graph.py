"""What the graph of a loss tells: whether it is a mean over samples, where a sum is needed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

REDUCTION_MEAN = 1  # at::Reduction, as autograd's nodes store it
# Python's * and / by a number are Mul- and DivBackward0. The nodes with a 1 are torch's own, in cross_entropy: its mean
# over classes given as probabilities, and the two terms of label smoothing.
PASSES_ON = (
    *("DivBackward", "NegBackward", "AddBackward", "SubBackward", "RsubBackward"),
    *("ToCopyBackward", "CloneBackward", "SqueezeBackward", "ViewBackward"),
)
OF_ONE_TENSOR = (
    *PASSES_ON, "AccumulateGrad", "MulBackward", "SumBackward", "MeanBackward", "PowBackward", "AbsBackward",
    "ExpBackward", "LogBackward", "SqrtBackward", "LinalgVectorNormBackward", "NormBackward", "StackBackward",
    "CatBackward",
)  # fmt: skip


def is_mean(root: Any, count: float) -> bool:
    """Whether all that a loss adds up are means over its samples, and penalties on the parameters."""
    means = 0
    ahead = [root]
    while ahead:
        node = ahead.pop()
        name, parents = type(node).__name__, _parents(node)
        if name == "AddBackward0" and {type(parent).__name__ for parent in parents} == {"MulBackward1"}:
            ahead += _parents(parents[0])  # label smoothing: the mean is the first term
        elif _takes_mean(node, count):
            means += 1  # whatever is behind it
        elif _is_of_parameters_alone(node):
            continue
        else:
            weighted = name == "MulBackward0" and _is_weighted(node, is_root=node is root)
            if not weighted and not (parents and name.startswith(PASSES_ON)):
                return False
            ahead += parents
    return means > 0


def _takes_mean(node: Any, count: float) -> bool:
    name, parents = type(node).__name__, _parents(node)
    if name.startswith("MeanBackward"):
        return not any(_sums_samples(parent) for parent in parents)  # which may be averaged over features
    if name == "DivBackward0":
        of_data = [parent for parent in parents if not _is_of_parameters_alone(parent)]
        # A ratio; or a sum over the count. Over a count of 2 it may be a half.
        return len(of_data) == 2 or (count > 2 and _number(node) == count)
    return name == "DivBackward1" or getattr(node, "_saved_reduction", None) == REDUCTION_MEAN


def _sums_samples(node: Any) -> bool:
    """Whether a node adds up over the first dimension, which is that of the samples."""
    if type(node).__name__ != "SumBackward1":
        return False
    dims, dimensions = node._saved_dim, len(node._saved_self_sym_sizes)
    # Autograd stores the last one, -1, as 2**64 - 1; none stand for all.
    return not dims or any(dim in (0, 2**64 - dimensions) for dim in dims)


def _is_weighted(product: Any, *, is_root: bool) -> bool:
    """By a number that can't be a count, or by a parameter; a whole loss times 1 is the caller's word for a sum."""
    if any(_is_of_parameters_alone(parent) for parent in _parents(product)):
        return True
    number = _number(product)
    return number is not None and abs(number) < 2 and not (is_root and number == 1)


def _is_of_parameters_alone(node: Any) -> bool:
    """Whether no data goes into it, as into a penalty on the weights: only parameters, by functions of one tensor."""
    ahead, seen = [node], set()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        name, parents = type(node).__name__, _parents(node)
        by_data = name.startswith("MulBackward") and len(parents) < 2 and _number(node) is None
        if by_data or not name.startswith(OF_ONE_TENSOR):
            return False
        ahead += parents
    return True


def _parents(node: Any) -> list[Any]:
    return [parent for parent, _ in getattr(node, "next_functions", ()) if parent is not None]


def _number(node: Any) -> float | None:
    """What a node multiplies or divides by; None where that is learned, a tensor of many, or on another device."""
    if len(_parents(node)) > 1:
        return None
    other = getattr(node, "_saved_other", None)
    if other is None:
        other = getattr(node, "_saved_self", None)
    if isinstance(other, Tensor) and other.numel() == 1 and other.device.type == "cpu":
        return float(other.detach())
    return None
