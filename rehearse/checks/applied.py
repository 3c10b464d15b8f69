"""Which backward passes an optimizer step is made with: what each parameter's ``.grad`` has taken in since it was zero.

Nobody has to call anything: a pass is seen where autograd begins it, a gradient before it is added, a step by torch's
own hooks. A ``.grad`` that is ``None`` or all zeros starts again, whoever has zeroed it. By which constants its loss
was multiplied and divided is read from its graph: ``(loss / 4).backward()`` shows the 4.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from course_lib._tensors import parameters_of

TOLERANCE = 1e-3
Factors = tuple[tuple[float, ...], ...]
"""For each term of a sum, the factors from the outermost one to the innermost."""


@dataclass(frozen=True, order=True)
class Backward:
    """One backward pass."""

    number: int
    """Of all that were seen, from 0."""
    epoch: int
    batch: int
    """The micro-batch in its epoch, from 0."""
    place: int
    """Among the backward passes of its micro-batch, from 0."""
    factors: Factors | None = None


@dataclass(frozen=True)
class Step:
    """One optimizer step, and what its gradients are made of."""

    optimizer: int
    """Which one, from 0: those that are watched in their order, then others that step for them."""
    number: int
    """Of this optimizer's steps, from 1."""
    passes: tuple[Backward, ...]
    again: tuple[Backward, ...] = ()
    """Those of them that an earlier step of the same optimizer was made with, in a ``.grad`` that nobody has changed
    since but by adding others to it."""
    factor: float | None = 1.0
    """What the sum of the passes' gradients was multiplied by before the step; ``None``: it is no multiple of it."""


@dataclass
class _Gradient:
    """What is known of one parameter's ``.grad``."""

    parameter: Tensor
    passes: list[Backward] = field(default_factory=list)
    total: Tensor | None = None
    """The sum of what the passes have added."""
    applied: tuple[Tensor, int] | None = None
    """The ``.grad`` that the last step was made with, and its version."""
    changed: bool = False
    """Whether somebody has changed it after a step, and not to zero."""


class Applied:
    """Sees backward passes and steps while :meth:`watching`; ``epoch`` and ``batch`` are the caller's to set."""

    def __init__(self) -> None:
        self.epoch, self.batch = 0, 0
        self.steps: list[Step] = []
        self.zeroed: set[Backward] = set()
        """Passes whose gradients somebody zeroed before a step was made with them; of a parameter that it reached."""
        self._gradients: dict[int, _Gradient] = {}
        self._current: Backward | None = None
        self._passes = 0
        self._in_batch: Counter[tuple[int, int]] = Counter()
        self._optimizers: dict[int, int] = {}
        self._made: Counter[int] = Counter()
        self._seen_by: dict[int, set[Backward]] = {}
        self._depth: Counter[int] = Counter()

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Follow the gradients of what these hold, and of what was added to them since they were watched."""
        for optimizer in optimizers:
            self._optimizers.setdefault(id(optimizer), len(self._optimizers))
            for parameter in parameters_of(optimizer):
                if parameter.requires_grad and id(parameter) not in self._gradients:
                    gradient = self._gradients[id(parameter)] = _Gradient(parameter)
                    parameter.register_hook(lambda added, gradient=gradient: self._add(gradient, added))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See all that autograd and the optimizers of this process do."""
        backward = torch.autograd.backward

        def noticed(tensors: Any, *arguments: Any, **options: Any) -> Any:
            if self._current is not None:  # within another, as of a checkpoint
                return backward(tensors, *arguments, **options)
            self._begin(tensors, *arguments[:1], **options)
            try:
                return backward(tensors, *arguments, **options)
            finally:
                self._current = None

        torch.autograd.backward = noticed
        hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin_step(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._end_step(optimizer)),
        ]
        try:
            yield
        finally:
            torch.autograd.backward = backward
            for hook in hooks:
                hook.remove()

    def waiting(self) -> set[Backward]:
        """Passes with gradients that no step was made with yet."""
        unused = [gradient for gradient in self._gradients.values() if gradient.applied is None]
        return {one for gradient in unused for one in gradient.passes}

    def _begin(self, tensors: Any, grad_tensors: Any = None, **_: Any) -> None:
        where = (self.epoch, self.batch)
        factors = factors_of(tensors) if isinstance(tensors, Tensor) and grad_tensors is None else None
        self._current = Backward(self._passes, *where, self._in_batch[where], factors)
        self._passes += 1
        self._in_batch[where] += 1

    def _add(self, gradient: _Gradient, added: Tensor) -> None:
        """A gradient is about to be added; where no pass is on, it is only asked for."""
        if self._current is None:
            return
        held = gradient.parameter.grad
        added = added.detach()
        if held is None or not _any(held):
            if gradient.applied is None:
                self.zeroed.update(gradient.passes)
            gradient.passes, gradient.total, gradient.changed = [], None, False
        elif gradient.applied is not None and not _is_as_it_was(held, gradient.applied):
            gradient.changed = True
        gradient.passes.append(self._current)
        gradient.total = added.clone() if gradient.total is None else gradient.total + added
        gradient.applied = None

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._depth[id(optimizer)] += 1

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        # A class whose step calls that of the class above it may be seen twice.
        self._depth[id(optimizer)] -= 1
        if self._depth[id(optimizer)] > 0:
            return
        live = [p for p in parameters_of(optimizer) if p.grad is not None and _any(p.grad)]
        known = [self._gradients[id(parameter)] for parameter in live if id(parameter) in self._gradients]
        if not live or not (known or id(optimizer) in self._optimizers):
            return
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        self._made[number] += 1
        before = self._seen_by.setdefault(number, set())
        passes = {one for gradient in known for one in gradient.passes}
        again = {one for gradient in known if not gradient.changed for one in gradient.passes if one in before}
        if passes <= before:
            again = set()  # the same gradients are applied in two steps, as some optimizers do
        factor = _multiple(known) if len(known) == len(live) else None
        self.steps.append(Step(number, self._made[number], tuple(sorted(passes)), tuple(sorted(again)), factor))
        before |= passes
        for gradient in known:
            assert gradient.parameter.grad is not None
            gradient.applied = (gradient.parameter.grad, gradient.parameter.grad._version)


def _any(gradient: Tensor) -> bool:
    return bool((gradient._values() if gradient.is_sparse else gradient).any())


def _is_as_it_was(held: Tensor, applied: tuple[Tensor, int]) -> bool:
    return held is applied[0] and held._version == applied[1]


def _multiple(gradients: list[_Gradient]) -> float | None:
    """By what the totals were multiplied to make the ``.grad`` that are held."""
    along = square = held_square = 0.0
    for gradient in gradients:
        if gradient.total is None or gradient.parameter.grad is None or gradient.changed:
            return None
        total, held = gradient.total.to_dense().double(), gradient.parameter.grad.detach().to_dense().double()
        along += float((total * held).sum())
        square += float((total * total).sum())
        held_square += float((held * held).sum())
    if not square or not held_square or along**2 < (1 - TOLERANCE**2) * square * held_square:
        return None
    return along / square


# --------------------------------------------------------------------------------------------- the factors of a loss


MOST_NODES = 200
PASSED = {"Alias", "Clone", "Mean", "Neg", "ReshapeAlias", "Squeeze", "Sum", "ToCopy", "Unsqueeze", "View"}
"""Operations that a constant factor passes unchanged; the sign counts for nothing here."""
ADDED = {"Add", "Cat", "Stack", "Sub"}


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
