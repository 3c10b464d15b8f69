"""Methods of a module, or hooks of a callback, that stand in for its own while it trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, SupportsIndex

from lightning.pytorch import Callback, LightningModule, Trainer
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


def call_around_the_hooks(
    trainer: Trainer,
    pl_module: LightningModule,
    begin_batch: Callable[[], None],
    end_batch: Callable[[], None],
    **behind: Callable[[], None],
) -> ExitStack:
    """Have the functions called where no callback is: the module's own hooks, and other callbacks, may draw and move.

    ``begin_batch`` ahead of every callback's ``on_train_batch_start``; ``end_batch`` behind the module's
    ``on_train_batch_end``, and ahead of those that save there; ``behind``: behind the module's hooks of these names.
    Returns what puts the hooks back.
    """
    stack = ExitStack()
    stack.callback(_call_ahead(trainer, begin_batch))
    stack.callback(_save_behind_own_hook(trainer, pl_module, end_batch))
    own = {name: _and_then(getattr(pl_module, name), ran) for name, ran in behind.items()}
    stack.callback(replace_methods(pl_module, **own))
    return stack


def _call_ahead(trainer: Trainer, ran: Callable[[], None]) -> Callable[[], None]:
    first = trainer.callbacks[0]  # type: ignore[attr-defined]
    own = first.on_train_batch_start

    def on_train_batch_start(*given: Any, **named: Any) -> None:
        ran()
        own(*given, **named)

    return _replace_hook(first, "on_train_batch_start", on_train_batch_start)


def _replace_hook(callback: Callback, name: str, hook: Callable[..., Any]) -> Callable[[], None]:
    """Return what puts back the callback's own, which it may hold itself, as a LambdaCallback does."""
    attributes = vars(callback)
    own = {name: attributes[name]} if name in attributes else {}
    attributes[name] = hook

    def put_back() -> None:
        attributes.pop(name, None)
        attributes.update(own)

    return put_back


def _and_then(own: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def hook(*given: Any, **named: Any) -> Any:
        returned = own(*given, **named)
        ran()
        return returned

    return hook


def _save_behind_own_hook(trainer: Trainer, pl_module: LightningModule, ran: Callable[[], None]) -> Callable[[], None]:
    """Have the callbacks that save at a batch's end do so behind the module's own ``on_train_batch_end``.

    Lightning calls the callbacks first, and what the module does there (an average, a rate) would be in no checkpoint.
    """
    savers = list(trainer.checkpoint_callbacks)
    own = pl_module.on_train_batch_end

    def on_train_batch_end(*batch: Any, **named: Any) -> None:
        own(*batch, **named)
        ran()
        for saver in savers:
            type(saver).on_train_batch_end(saver, trainer, pl_module, *batch, **named)

    stack = ExitStack()
    for saver in savers:
        stack.callback(_replace_hook(saver, "on_train_batch_end", _does_nothing))
    stack.callback(replace_methods(pl_module, on_train_batch_end=on_train_batch_end))
    return stack.close


def _does_nothing(*_: Any, **__: Any) -> None: ...


def save_nothing_for_the_exception(trainer: Trainer) -> None:
    """Ahead of a refusal: what is half restored is in no state to be saved, least of all over what was refused."""
    for callback in trainer.checkpoint_callbacks:
        vars(callback)["on_exception"] = _PassedOver(callback)


class _PassedOver:
    """In place of a callback's hook, once."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback

    def __call__(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        vars(self.callback).pop("on_exception", None)
