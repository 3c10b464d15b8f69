"""One page about the memory of a running job."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib._tensors import bytes_by_storage, parameters_of
from course_lib._words import readable_bytes
from course_lib.memory.ledger import tensors_in
from course_lib.memory.measuring import device_of_parameters


def peak_report(
    model: nn.Module | None = None, optimizer: Optimizer | None = None, device: torch.device | str | None = None
) -> str:
    """What this process holds now: by category, of what was given, and what the allocator or the system say.

    Args:
        model: For its parameters, their gradients and the buffers.
        optimizer: For its state, and its parameters where there is no model.
        device: Default: where the parameters are, else the CPU. Bytes of categories count wherever they are.
    """
    parameters = _parameters(model, optimizer)
    chosen = device_of_parameters(parameters) if device is None else torch.device(device)
    lines = [f"memory of this process ({chosen})"]
    if parameters:
        lines.append(_line("parameters", parameters, f"{sum(p.numel() for p in parameters):,} elements"))
        gradients = [p.grad for p in parameters if p.grad is not None]
        lines.append(_line("gradients", gradients, f"of {len(gradients)} of {len(parameters)} parameters"))
    if model is not None:
        lines.append(_line("buffers", model.buffers()))
    if optimizer is not None:
        lines.append(_line("optimizer", tensors_in(list(optimizer.state.values())), type(optimizer).__name__))
    return "\n".join(lines + (_on_cuda(chosen) if chosen.type == "cuda" else _on_cpu()))


def _parameters(model: nn.Module | None, optimizer: Optimizer | None) -> list[Tensor]:
    if model is not None:
        return list(model.parameters())
    return parameters_of(optimizer) if optimizer is not None else []


def _line(name: str, tensors: Iterable[Tensor], note: str = "") -> str:
    return _row(name, sum(bytes_by_storage(tensors).values()), note)


def _row(name: str, held: int, note: str) -> str:
    return f"  {name:<12} {readable_bytes(held):>11}  {note}".rstrip()


def _on_cuda(device: torch.device) -> list[str]:
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    most = torch.cuda.max_memory_allocated(device)
    return [
        _row("allocated", allocated, f"tensors now; at most {readable_bytes(most)}"),
        _row("reserved", reserved, "taken from the device by the allocator, cached blocks included"),
        _row("device", total - free, f"used by all processes, of {readable_bytes(total)}"),
        "nvidia-smi counts what is reserved, and on top of it the CUDA context, loaded kernels and what libraries take "
        "by themselves (NCCL): some hundred MiB a process. What tensors hold, now or at most, it does not show.",
    ]


def _on_cpu() -> list[str]:
    resident = psutil.Process().memory_info().rss
    return [
        _row("resident", resident, "of the process, the libraries included"),
        "What a graph holds (saved activations) is not among these: measure_peak counts it.",
    ]
