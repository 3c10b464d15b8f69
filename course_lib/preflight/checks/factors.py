"""By which constants a loss was multiplied and divided, read from its graph: ``(loss / 4).backward()`` shows the 4."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

MOST_NODES = 200
PASSED = {"Alias", "Clone", "Mean", "Neg", "ReshapeAlias", "Squeeze", "Sum", "ToCopy", "Unsqueeze", "View"}
"""Operations that a constant factor passes unchanged; the sign counts for nothing here."""
ADDED = {"Add", "Cat", "Stack", "Sub"}

Factors = tuple[tuple[float, ...], ...]
"""For each term of a sum, the factors from the outermost one to the innermost."""


def factors_of(loss: Tensor) -> Factors | None:
    """The constant factors of a loss: ``((0.25,),)`` for ``a / 4``, ``((0.5,), (0.5, 0.1))`` for ``(a + 0.1 * b) / 2``.

    A term ends at the first operation that is not linear, or takes two losses. ``None`` where a factor cannot be read:
    it is no single number, or an ``autograd.Function`` is on the way. A term of factor 0 is left out.
    """
    terms: list[tuple[float, ...]] = []
    waiting: list[tuple[Any, tuple[float, ...]]] = [(loss.grad_fn, ())]
    for _ in range(MOST_NODES):
        if not waiting:
            return tuple(terms)
        node, factors = waiting.pop()
        if isinstance(node, BackwardCFunction):
            return None
        operation = "" if node is None else node.name().partition("Backward")[0]
        inputs = [] if node is None else [before for before, _ in node.next_functions]
        if operation in PASSED:
            waiting += [(before, factors) for before in inputs if before is not None]
        elif operation in ADDED:
            alpha = abs(float(getattr(node, "_saved_alpha", 1)))
            own = (
                [factors, factors if alpha == 1 else (*factors, alpha)] if len(inputs) == 2 else [factors] * len(inputs)
            )
            waiting += [(before, path) for before, path in reversed(list(zip(inputs, own, strict=True))) if before]
        elif operation in ("Mul", "Div") and None in inputs:
            factor = _constant(node, operation, inputs)
            if factor is None:
                return None
            if factor != 0:
                waiting.append((inputs[0] or inputs[1], (*factors, factor)))
        elif operation == "Mul":
            waiting += [(before, factors) for before in reversed(inputs)]
        else:
            terms.append(factors)
    return None


def _constant(node: Any, operation: str, inputs: list[Any]) -> float | None:
    """What the operand that has no graph multiplies the other by."""
    value = node._saved_other if inputs[1] is None else node._saved_self
    if not isinstance(value, Tensor) or value.numel() != 1 or (operation == "Div" and inputs[0] is None):
        return None
    number = abs(float(value))
    if operation == "Mul":
        return number
    return 1 / number if number else None
