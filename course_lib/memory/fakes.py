"""Fake tensors for a prediction: on the CPU whatever the device, copied without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode


class OnTheCpu(TorchFunctionMode):
    """Takes the name of a CUDA device for the CPU's, and lets modules of fake tensors be deep-copied.

    A prediction runs fake *CPU* tensors on every machine, so that it says the same on all of them; torch without CUDA
    can make fake CUDA tensors, but runs no backward through them. And if torch copied a layer by itself, as
    ``nn.TransformerEncoder`` does, the copies' views would have storages of their own, and each ``weight.t()`` would
    count once more.

    Args:
        names: Whether to change names of devices.
    """

    def __init__(self, names: bool) -> None:
        super().__init__()
        self._names = names
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and isinstance(torch.empty(0), FakeTensor):  # not while something runs for real
            return _deep_copy(*args)
        name = getattr(func, "__name__", "")
        if not self._names or name == "__get__":  # a property, as x.shape
            return func(*args, **(kwargs or {}))
        args = tuple(self._cpu_instead(arg) for arg in args)
        kwargs = {key: self._cpu_instead(value) for key, value in (kwargs or {}).items()}
        return args[0] if name == "cuda" else func(*args, **kwargs)

    def _cpu_instead(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device) and leaf.type == "cuda":
            return torch.device("cpu")
        if isinstance(leaf, str) and (leaf == "cuda" or leaf.startswith("cuda:")):
            return "cpu"
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf.device.type == "cuda":
            # A loss_fn closes over the weights of its classes, which are on the GPU already.
            if id(leaf) not in self._copies:
                self._copies[id(leaf)] = leaf, without_data(leaf)
            return self._copies[id(leaf)][1]
        return leaf


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        memo[id(tensor)] = fake = without_data(tensor)
        if tensor.grad is not None:
            fake.grad = without_data(tensor.grad)
    copied: Tensor = memo[id(tensor)]
    return copied


def without_data(tensor: Tensor) -> Tensor:
    """Under a fake mode: a fake tensor of this one's kind."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
