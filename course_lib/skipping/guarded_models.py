"""Which guard a model has: one, that sees its forwards; copies of the model have none."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib._tensors import parameters_of


class Guard(Protocol):
    """What is asked of a StepGuard here."""

    model: nn.Module
    optimizer: Optimizer

    def begin(self) -> None: ...

    def close(self) -> None: ...


_guards: weakref.WeakSet[Any] = weakref.WeakSet()


def take_charge(guard: Guard) -> BeginAtForward:
    """Let the guard see its model's forwards. One that guarded the same parameters before is closed.

    Raises:
        ValueError: The model, or one that it is in or holds, has a guard of other parameters.
    """
    held = set(parameters_of(guard.optimizer))
    related = [other for other in _guards if _is_within(other.model, guard.model)]
    replaced = [other for other in related if not held.isdisjoint(parameters_of(other.optimizer))]
    if len(replaced) < len(related):
        raise ValueError(
            "the model has a guard already, of another optimizer: each would judge its own gradients, and one would "
            "update where the other skips. Give one guard an optimizer of all that is updated together (by parameter "
            "groups), or each a module of its own (the generator, the discriminator); close() a guard that is done"
        )
    for other in replaced:
        other.close()
    _guards.add(guard)
    return BeginAtForward(guard)


def release(guard: Guard) -> None:
    _guards.discard(guard)


def check_in_charge(guard: Guard) -> None:
    if guard not in _guards:
        raise RuntimeError(
            "this guard was closed, by close() or because another guard was made of the same parameters: use that one, "
            "or make another"
        )


def _is_within(one: nn.Module, other: nn.Module) -> bool:
    return any(module is one for module in other.modules()) or any(module is other for module in one.modules())


class BeginAtForward:
    """A model's forward hook. It does not keep the guard alive, and a copy of the model is one without a guard."""

    def __init__(self, guard: Guard) -> None:
        self._guard = weakref.ref(guard)
        self._handle = guard.model.register_forward_pre_hook(self, prepend=True)

    def __call__(self, *_: Any) -> None:
        guard = self._guard()
        if guard is not None and torch.is_grad_enabled():  # a validation in between is no window
            guard.begin()

    def remove(self) -> None:
        self._handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        # What a copy, or a file, has in this hook's place: an empty dict's `get`, which gives a forward's inputs back
        # as they came, and needs nothing of this library.
        return getattr, ({}, "get")
