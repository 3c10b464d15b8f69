"""A step that the device decides on: fused optimizers take ``found_inf``, and change nothing where it is 1."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from course_lib.skipping.skips import WindowLocation


def takes_found_inf(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Any, bad: Tensor) -> None:
    """``optimizer.step()``, which changes nothing where the 0-dim bool tensor is true. The host does not wait for it.

    A parameter's first step makes its state, whatever ``found_inf`` says: this is for the steps after it.
    """
    optimizer.grad_scale, optimizer.found_inf = None, bad.float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


class HostCopy:
    """A tensor on its way from the device: nobody waits for it until it is read."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()  # type: ignore[no-any-return]


class PendingDecision(NamedTuple):
    """A decision that the device may not have made yet, and what the host needs to follow it."""

    location: WindowLocation
    limit: float
    rejections: list[str]
    evidence: HostCopy
