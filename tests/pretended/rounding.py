"""Rehearse another processor's rounding: what enters a linear layer or a convolution is off by a few last bits.

A GPU, another CPU and another version of torch add the same numbers in another order. An output that does not survive
this is not the same on two machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

NOISY = {"linear", "conv1d", "conv2d", "conv3d"}


class RoundingNoise(TorchFunctionMode):
    """Relative noise of up to 16 times the type's precision: 2e-6 in float32. The global generators draw none of it.

    Where bytes are counted or predicted, there is none: the noise's own tensors would be counted too.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = torch.empty(0)
        self.calls = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in NOISY and args[0].is_floating_point() and not is_in_torch_dispatch_mode():
            self.calls += 1
            x, *rest = args
            noise = self._noise(x.numel()).view(x.shape).to(x.dtype)
            args = (torch.addcmul(x, x, noise, value=16 * torch.finfo(x.dtype).eps), *rest)
        return func(*args, **kwargs or {})

    def _noise(self, count: int) -> Tensor:
        """Numbers from -1 to 1, from a random place among those that are drawn: to draw new ones each time is slow."""
        if len(self.drawn) < 2 * count:
            self.drawn = torch.empty(4 * count).uniform_(-1, 1, generator=self.generator)
        start = int(torch.randint(len(self.drawn) - count + 1, (1,), generator=self.generator))
        return self.drawn[start : start + count]
