"""An optimizer's parameters, and what a tensor keeps alive: its storages, and the nodes of autograd's graph."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """An optimizer's parameters, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether it evaluates the loss itself, several times in a step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return isinstance(optimizer, LBFGS) or (closure is not None and closure.default is closure.empty)


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """One for most tensors, two for sparse COO, none for a subclass or a layout without a storage of its own."""
    try:
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
        return [tensor.untyped_storage()]
    except (RuntimeError, ValueError):
        return []


def bytes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each storage, which tensors may share, by an id that it keeps for as long as it lives."""
    return {storage._cdata: storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}


def nodes_behind(root: Any, seen: dict[int, Any], most: float = math.inf) -> list[Any]:
    """The nodes from `root` on that are not yet in `seen`, which takes them by id, up to `most` in all."""
    reached, ahead = [], [root]
    while ahead and len(seen) < most:
        node = ahead.pop()
        if id(node) not in seen:
            seen[id(node)] = node  # holds the Python object: another one would get its id
            reached.append(node)
            ahead += [parent for parent, _ in node.next_functions if parent is not None]
    return reached


def is_expanded(tensor: Tensor) -> bool:
    """Several elements in one place: such a tensor can't be written to."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
