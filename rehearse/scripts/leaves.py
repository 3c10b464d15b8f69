"""Parameters that a real backward pass reaches and that are in no module which the script calls: layers in a plain
list, a parameter of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib._tensors import parameters_of

MOST_NODES = 50_000
"""Of a graph, in which parameters are looked for."""


class Leaves:
    def __init__(self) -> None:
        self._seen: dict[int, tuple[nn.Parameter, Tensor]] = {}
        """By its id, each parameter and its value when it was seen first."""

    def look(self, roots: Iterable[Tensor], known: Iterable[nn.Parameter]) -> None:
        """Ahead of a backward pass; ``known`` are the parameters of the modules that are called."""
        passed_over = {id(parameter) for parameter in known}
        for parameter in leaves_behind(roots):
            if id(parameter) not in passed_over and id(parameter) not in self._seen:
                self._seen[id(parameter)] = (parameter, parameter.detach().clone())

    def held_by_none(self, optimizers: Sequence[Optimizer], known: Iterable[nn.Parameter]) -> list[str]:
        """The shapes of those that no optimizer holds, no module that was called has, and the script has not moved."""
        held = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
        held |= {id(parameter) for parameter in known}
        return [
            " × ".join(map(str, parameter.shape)) or "one number"
            for number, (parameter, first) in self._seen.items()
            if number not in held and torch.equal(parameter.detach(), first)
        ]


def leaves_behind(roots: Iterable[Tensor]) -> Iterator[nn.Parameter]:
    """The parameters that a backward pass from there would give gradients to."""
    ahead: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(ahead)
    while ahead and len(seen) < MOST_NODES:
        node = ahead.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            yield variable
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                ahead.append(parent)
