"""A training step that leaves nothing behind: what it may change is put back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib._generators import generators_put_back, held_by, keep_state
from course_lib.memory.ledger import tensors_in


@contextmanager
def restored(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Put back weights, buffers, gradients, the optimizer's state, attributes of both, and all random generators, those
    that modules hold among them. The step runs with gradients, and finds none.

    The rule: *dicts get back their entries, and tensors their numbers*, so all of them are the same objects as before.
    Copies of tensors are kept on the CPU; gradients are only put aside. Not put back is what hooks and ``forward``
    write elsewhere: into a list, or an average of the weights.
    """
    parameters, modules = list(model.parameters()), list(model.modules())
    dicts: list[dict[Any, Any]] = [each for module in modules for each in (vars(module), module._buffers)]
    dicts += [vars(optimizer), optimizer.state, *optimizer.state.values(), *optimizer.param_groups]
    entries = [(each, dict(each)) for each in dicts]
    state = tensors_in([optimizer.param_groups, list(optimizer.state.values())])
    tensors = {id(tensor): tensor for tensor in (*parameters, *model.buffers(), *state)}.values()
    numbers = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    with ExitStack() as stack:
        stack.enter_context(generators_put_back())
        for generator in held_by(*modules):
            stack.callback(keep_state(generator))
        try:
            for parameter in parameters:
                parameter.grad = None
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            for each, kept in entries:
                each.clear()
                each.update(kept)
            with torch.no_grad():
                for tensor, kept_numbers in numbers:
                    tensor.copy_(kept_numbers)
            for parameter, gradient in gradients:
                parameter.grad = gradient
