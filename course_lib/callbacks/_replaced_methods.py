"""Methods of a module, or hooks of a callback, that stand in for its own while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

from lightning.pytorch import Trainer
from torch import nn


def replace_methods(module: nn.Module, **functions: Callable[..., Any]) -> Callable[[], None]:
    """Have this one module use the functions for its methods of these names, and return what puts them back.

    For what no hook sees: a loss between ``training_step`` and its backward, say. Until they are put back, a copy or a
    pickle of the module has its own methods.
    """
    attributes = vars(module)
    own = {name: attributes[name] for name in functions if name in attributes}
    # copy.deepcopy and pickle ask the object, and not its class, how it is taken apart.
    taken_apart = attributes.setdefault("__reduce_ex__", _TakenApart(module))
    taken_apart.replaced |= functions.keys()
    taken_apart.own |= own
    attributes.update(functions)

    def put_back() -> None:
        for name in functions:
            attributes.pop(name, None)
            taken_apart.own.pop(name, None)
        attributes.update(own)
        taken_apart.replaced -= functions.keys()
        if not taken_apart.replaced:
            attributes.pop("__reduce_ex__", None)

    return put_back


class _TakenApart:
    """A module taken apart for a copy or a pickle, as if none of its methods were replaced."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced: set[str] = set()
        self.own: dict[str, Any] = {}
        """What the module itself, and not its class, had under these names."""

    def __call__(self, protocol: SupportsIndex) -> Any:
        parts = type(self.module).__reduce_ex__(self.module, protocol)
        if isinstance(parts, str) or len(parts) < 3 or not isinstance(parts[2], dict):
            return parts  # the class has its own way
        kept = {name: value for name, value in parts[2].items() if name not in self.replaced and value is not self}
        return (*parts[:2], kept | self.own, *parts[3:])


def in_turn(*functions: Callable[..., Any]) -> Callable[..., Any]:
    """What calls them all with what it is given, and returns what the first one does."""

    def called(*given: Any, **named: Any) -> Any:
        returned = [function(*given, **named) for function in functions]
        return returned[0] if returned else None

    return called


def ignoring_arguments(function: Callable[..., None], *own: Any) -> Callable[..., None]:
    return lambda *given, **named: function(*own)


def replace_hook(holder: object, name: str, hook: Callable[..., Any]) -> Callable[[], None]:
    """Return what puts back the holder's own, which it may hold itself, as a LambdaCallback does."""
    attributes = vars(holder)
    own = {name: attributes[name]} if name in attributes else {}
    attributes[name] = hook

    def put_back() -> None:
        attributes.pop(name, None)
        attributes.update(own)

    return put_back


def save_nothing_for_the_exception(trainer: Trainer) -> None:
    """Ahead of what is raised: what is half moved is in no state to be saved, least of all over what was refused."""
    for callback in trainer.checkpoint_callbacks:
        own = vars(callback)
        own["on_exception"] = lambda *_, own=own, **__: own.pop("on_exception", None)
