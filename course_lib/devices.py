"""Which device a run can use: a GPU that has just computed something, or else the CPU.

``torch.accelerator.current_accelerator()`` names what torch was *compiled* for; on Linux ``pip install torch`` brings
a CUDA build to machines that have no GPU. A GPU that is there can still be unusable: its driver is too old, another
process holds it in exclusive mode, its memory is full. The rule: *a device is usable when it has done a sum.*

    >>> device = usable_device()
    >>> device.type
    'cpu'
    >>> explain_device()
    'Computing on the CPU: ...'
"""

from __future__ import annotations

import functools
import warnings

import torch

__all__ = ["explain_device", "usable_device"]


def usable_device() -> torch.device:
    """``cuda`` (the current GPU) if a small sum succeeds on it, else ``cpu``. Tried once in a process.

    Trying makes a CUDA context, which takes some hundreds of MiB of the GPU and forbids CUDA in processes that are
    forked later. To count GPUs without one, use ``torch.cuda.device_count()``.
    """
    return _try_gpu()[0]


def explain_device() -> str:
    """One sentence on the device of :func:`usable_device`: which GPU it is, or why there is none."""
    device, why = _try_gpu()
    if device.type == "cuda":
        return f"Computing on the GPU: {why}."
    return f"Computing on the CPU: {why}."


@functools.cache
def _try_gpu() -> tuple[torch.device, str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a driver complains of is in the error, too
            total = torch.ones(2, device="cuda").sum().item()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return torch.device("cpu"), lines[0].partition(". ")[0].rstrip(".")
    if total != 2:
        return torch.device("cpu"), f"the GPU says that 1 + 1 is {total}"
    return torch.device("cuda"), torch.cuda.get_device_name()
