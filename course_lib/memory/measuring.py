"""The peak of one call, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib._words import readable_bytes
from course_lib.memory.ledger import Peak, StorageLedger, tensors_in


@dataclass(frozen=True)
class PeakMemory(Peak):
    """What a call needed at its worst moment, including what was there before it.

    Outside of backward and step, the phase is ``"forward"``. On CUDA ``by_category`` has ``unseen``, too: what the
    allocator gave out, and no tensor accounts for.
    """

    how: str
    """``"CUDA allocator"`` or ``"tensor storages counted on the CPU"``."""
    value: Any
    """What the call returned."""
    allocated: int | None = None
    """The allocator's own peak, on CUDA."""

    @property
    def by_category(self) -> dict[str, int]:
        seen = super().by_category
        return seen if self.allocated is None else seen | {"unseen": self.allocated - sum(seen.values())}

    def __str__(self) -> str:
        return "\n".join([f"peak: {readable_bytes(self.peak_bytes)} ({self.how})", *self.in_categories()])


def measure_peak(
    fn: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    device: torch.device | str | None = None,
) -> PeakMemory:
    """Call ``fn()`` once and measure the most memory that it held at a time, in this thread and in those of backward.

    On a CPU it counts tensor storages, in exact bytes: what operators return, until the last tensor of each is gone.
    It counts neither what kernels take and free inside themselves nor the process's own memory. On CUDA the peak is
    ``torch.cuda.max_memory_allocated``; the ledger runs beside it to tell its categories.

    What exists before ``fn`` counts from the beginning if it belongs to ``model``, to ``optimizer`` or to an optimizer
    that steps inside of ``fn``. Any other tensor counts, as one of the inputs, from the first operator that reads it.
    On CUDA the allocator counts all that is there.

    Args:
        fn: A training step, for example. It runs slower than usual, as each operator is looked at. Tensors inside a
            compiled function are not seen.
        model: Names its parameters and buffers, and its arguments as inputs. Without it, parameters are known only by
            the optimizer's step, and a batch made inside ``fn`` counts as activations.
        optimizer: For its state where ``fn`` doesn't step.
        device: Default: where the model's first parameter is, else the CPU. Resets torch's peak statistics on CUDA.

    Raises:
        ValueError: ``fn`` isn't callable, or a device that torch doesn't measure.
    """
    if not callable(fn):
        raise ValueError(
            f"fn must be a function without arguments, got {fn!r}: write measure_peak(lambda: step(batch))"
        )
    device = _device(model, device)
    ledger = StorageLedger(device.type)
    hook = None
    if model is not None:
        hook = model.register_forward_pre_hook(
            lambda _, args, kwargs: ledger.name("inputs", tensors_in((args, kwargs))), with_kwargs=True
        )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with ledger:
            _name(ledger, model, optimizer)
            value = fn()
            _name(ledger, model, optimizer)
    finally:
        if hook is not None:
            hook.remove()
    if device.type == "cpu":
        return PeakMemory(ledger.history(), "tensor storages counted on the CPU", value)
    torch.cuda.synchronize(device)
    return PeakMemory(ledger.history(), "CUDA allocator", value, torch.cuda.max_memory_allocated(device))


def _device(model: nn.Module | None, device: torch.device | str | None) -> torch.device:
    parameters = model.parameters() if model is not None else []
    chosen = device_of_parameters(parameters) if device is None else torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, got {str(chosen)!r}")
    return chosen


def device_of_parameters(parameters: Iterable[Tensor]) -> torch.device:
    """Where the first of these is; the CPU where there is none."""
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _name(ledger: StorageLedger, model: nn.Module | None, optimizer: Optimizer | None) -> None:
    if model is not None:
        ledger.name_model(model)
    if optimizer is not None:
        ledger.name_optimizer(optimizer)
