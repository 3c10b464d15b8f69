"""Values with tensors in them, taken apart and put together: what a forward returns, what a loader yields."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DEEPEST = 6
WHOLE = (bool, int, float, str, bytes, type, torch.dtype, torch.device, nn.Module, types.FunctionType, types.MethodType)
"""What stays as it is: it holds no tensor, or is no value of a forward."""


@dataclass(frozen=True)
class _Slot:
    number: int


@dataclass(frozen=True)
class _Whole:
    """An object whose attributes hold tensors."""

    like: Any
    parts: dict[Any, Any]
    is_mapping: bool


def taken_apart(value: Any, tensors: list[Tensor], depth: int = 0) -> Any:
    """The value with slots in place of its tensors, which are added to the list; see :func:`put_together`."""
    if isinstance(value, nn.Parameter) or value is None or isinstance(value, WHOLE) or depth > DEEPEST:
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(taken_apart(part, tensors, depth + 1) for part in value))
    if type(value) in (tuple, list):
        return type(value)(taken_apart(part, tensors, depth + 1) for part in value)
    if type(value) is dict:
        return {key: taken_apart(part, tensors, depth + 1) for key, part in value.items()}
    is_mapping = isinstance(value, collections.OrderedDict)
    if is_mapping or hasattr(value, "__dict__"):
        parts = value if is_mapping else vars(value)
        return _Whole(value, {key: taken_apart(part, tensors, depth + 1) for key, part in parts.items()}, is_mapping)
    return value


def put_together(value: Any, tensors: Sequence[Tensor | None]) -> Any:
    """What :func:`taken_apart` took apart, with these tensors in its slots."""
    if isinstance(value, _Slot):
        return tensors[value.number]
    if isinstance(value, _Whole):
        parts = {key: put_together(part, tensors) for key, part in value.parts.items()}
        if not value.is_mapping:
            again = copy.copy(value.like)
            vars(again).update(parts)
            return again
        # Hugging Face's outputs keep each part as an item and as an attribute.
        plain = type(value.like) is collections.OrderedDict
        return collections.OrderedDict(parts) if plain else type(value.like)(**parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(put_together(part, tensors) for part in value))
    if type(value) in (tuple, list):
        return type(value)(put_together(part, tensors) for part in value)
    if type(value) is dict:
        return {key: put_together(part, tensors) for key, part in value.items()}
    return value


def copied(value: Any) -> Any:
    """A copy of a batch, which the script may change in place."""
    tensors: list[Tensor] = []
    return put_together(taken_apart(value, tensors), [copied_tensor(tensor) for tensor in tensors])


_lazy_clone: Callable[[Tensor], Tensor] = getattr(torch, "_lazy_clone", torch.clone)


def copied_tensor(tensor: Tensor) -> Tensor:
    """A copy without a graph; the bytes are copied when one of the two is written to."""
    tensor = tensor.detach()
    try:
        return _lazy_clone(tensor) if tensor.layout is torch.strided else tensor.clone()
    except RuntimeError:  # its memory is another library's, as that of torch.from_numpy
        return tensor.clone()


def signature(value: Any, tensors: list[Tensor]) -> Any:
    """What makes another call of the arguments; their tensors are added to the list.

    Of tensors the shape, the dtype and whether a gradient is wanted; of numbers, strings and None the value; of other
    objects the type.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return (value.shape, value.dtype, value.requires_grad)
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, tuple | list):
        return tuple([signature(part, tensors) for part in value])
    if isinstance(value, collections.abc.Mapping):
        return tuple([(key, signature(part, tensors)) for key, part in value.items()])
    return type(value)


def without_numbers(sign: Any) -> Any:
    """A signature in which numbers and strings are no more than that."""
    if isinstance(sign, bool) or sign is None:
        return sign
    if isinstance(sign, int | float | str):
        return type(sign)
    return tuple([without_numbers(part) for part in sign]) if type(sign) is tuple else sign


def samples_in(batch: Any) -> int:
    """The length of the first tensor in a batch."""
    tensors: list[Tensor] = []
    taken_apart(batch, tensors)
    return next((len(tensor) for tensor in tensors if tensor.ndim), 0)
