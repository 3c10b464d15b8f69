"""An optimizer's gradients, and the one number that tells whether they are finite and how large they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from course_lib._tensors import parameters_of


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Those of the parameters that have one."""
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all elements of all gradients: 0-dim, at least float32, on the first gradient's device.

    NaN or infinite where any element is, and mostly where the sum of the squares overflows (float32: a norm beyond
    1.8e19; that of one element alone does not). Sparse gradients count by their coalesced values. Of no gradients it is
    0. Nothing is read by the host.
    """
    if not gradients:
        return torch.zeros(())
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = _values(gradient.detach())
        groups.setdefault((values.device, values.dtype), []).append(values)
    device = gradients[0].device
    norms = [norm for (_, dtype), group in groups.items() for norm in _norms(group, dtype)]
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, widest) for norm in norms]))


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether each element is: the norm alone does not tell, as the squares may overflow."""
    return all(bool(_values(gradient).isfinite().all()) for gradient in gradients)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def _norms(group: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Each tensor's norm, by the function that torch's get_total_norm uses."""
    widened = torch.promote_types(dtype, torch.float32)
    if widened == dtype:  # to name the dtype where it changes nothing costs half as much again on a CPU
        return torch._foreach_norm(group, 2)  # type: ignore[no-any-return]
    return torch._foreach_norm(group, 2, widened)  # type: ignore[no-any-return]
