"""The graph behind tensors, which only C++ holds: it hangs on their `grad_fn`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from course_lib._tensors import nodes_behind

_MOST_NODES = 100_000


def graph_roots(tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[Any]]]:
    """Each tensor with a `grad_fn`, oldest first, and the nodes that no older one had reached.

    Oldest first, so that a state that is carried from step to step answers for its past, and the loss that was made
    from it only for its own step.
    """
    seen: dict[int, Any] = {}
    nodes = ((tensor, _grad_fn(tensor)) for tensor in tensors)
    roots = sorted(((t, node) for t, node in nodes if node is not None), key=lambda root: root[1]._sequence_nr())
    return [(tensor, nodes_behind(root, seen, most=_MOST_NODES)) for tensor, root in roots]


def _grad_fn(tensor: Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view made under no_grad and written to
        return None
