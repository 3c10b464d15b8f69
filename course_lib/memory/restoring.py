"""A training step that leaves nothing behind: what it may change is put back, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from course_lib._generators import generators_put_back, held_by, keep_state


@contextmanager
def restored(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Put back parameters, buffers, gradients, training and grad mode, the optimizer, all random generators, those
    that modules hold as attributes among them.

    Tensors come back as the same objects. Copies are kept on the CPU, but gradients stay where they are, as they are
    only put aside. What hooks and ``forward`` write elsewhere (an average of the weights, a list) is not known here.
    """
    with ExitStack() as stack:
        stack.enter_context(generators_put_back())
        for generator in held_by(*model.modules()):
            stack.callback(keep_state(generator))
        stack.callback(_module(model))
        stack.callback(_optimizer(optimizer))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def undisturbed(loader: Any = None) -> Iterator[None]:
    """Put back the random generators, and what has ``state_dict`` and ``load_state_dict``."""
    with ExitStack() as stack:
        stack.enter_context(generators_put_back())
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            stack.callback(loader.load_state_dict, copy.deepcopy(loader.state_dict()))
        yield


def _module(model: nn.Module) -> Callable[[], None]:
    tensors = [(tensor, _kept(tensor)) for tensor in [*model.parameters(), *model.buffers()]]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None

    def put_back() -> None:
        for module, own in buffers:
            module._buffers.update(own)
        for tensor, data in tensors:
            _fill(tensor, data)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training

    return put_back


def _optimizer(optimizer: Optimizer) -> Callable[[], None]:
    # A tensor is remembered as (itself, its data); everything else is copied.
    def remember(value: Any) -> Any:
        return tree_map(lambda v: (v, _kept(v)) if isinstance(v, Tensor) else copy.deepcopy(v), value)

    def recall(value: Any) -> Any:
        return tree_map(_recalled, value, is_leaf=_is_remembered)

    state = {parameter: remember(dict(own)) for parameter, own in optimizer.state.items()}
    groups = [
        remember({key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups
    ]

    # By this a schedule knows whether the optimizer has stepped, and warns of a step of its own before that.
    stepped = {name: value for name, value in vars(optimizer).items() if name == "_opt_called"}

    def put_back() -> None:
        vars(optimizer).pop("_opt_called", None)
        vars(optimizer).update(stepped)
        optimizer.state.clear()
        optimizer.state.update({parameter: recall(own) for parameter, own in state.items()})
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters} | recall(own))

    return put_back


def _is_remembered(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, Tensor) for part in value)


def _recalled(value: Any) -> Any:
    return _fill(*value) if _is_remembered(value) else value


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _fill(tensor: Tensor, data: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().copy_(data) if tensor.requires_grad else tensor.copy_(data)
