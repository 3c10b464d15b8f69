"""A step that the device decides on: fused optimizers take ``found_inf``, and change nothing where it is 1."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from course_lib.skipping.skips import WindowLocation


def checked_on_device(wanted: bool | None, optimizer: Optimizer, scaler: Any, averages: Any) -> bool | None:
    """What was asked for, or False where it can't be; a ValueError where it can't be and was asked for."""
    fused = _takes_found_inf(optimizer)
    if fused and scaler is None and not averages:
        return wanted
    if wanted:
        got = f"{'fused' if fused else 'unfused'} {type(optimizer).__name__}"
        if scaler is not None:
            got += " with a scaler"
        if averages:
            got += " with averages"
        raise ValueError(f"on_device=True needs a fused optimizer, no scaler and no averages, got {got}")
    return False


def _takes_found_inf(optimizer: Optimizer) -> bool:
    if type(optimizer) is Adagrad:  # torch 2.11's takes it where it is fused, and does not say so
        return bool(optimizer.defaults["fused"])
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Any, bad: Tensor) -> None:
    """``optimizer.step()``, which changes nothing where the 0-dim bool tensor is true. The host does not wait for it.

    A parameter's first step makes its state, whatever ``found_inf`` says: this is for the steps after it.
    """
    give_found_inf(optimizer, bad)
    try:
        optimizer.step()
    finally:
        take_found_inf(optimizer)


def give_found_inf(optimizer: Any, bad: Tensor) -> None:
    optimizer.grad_scale, optimizer.found_inf = None, bad.float()


def take_found_inf(optimizer: Any) -> None:
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
