"""An optimizer's gradients, and the one number that tells whether they are finite and how large they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from course_lib._ranks import gathered
from course_lib._tensors import parameters_of


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Those of the parameters that have one."""
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all elements of all gradients: 0-dim, at least float32, on the first gradient's device.

    NaN or infinite where any element is, and mostly where the sum of the squares overflows (float32: a norm beyond
    1.8e19). Sparse gradients count by their coalesced values, sharded ones by this rank's shard. Of no gradients it is
    0. Nothing is read by the host.
    """
    return torch.nn.utils.get_total_norm([_in_float32(_values(gradient.detach())) for gradient in gradients])


def norm_of_all_shards(norm: float | None, group: dist.ProcessGroup | None) -> float | None:
    """The norm over all ranks' shards, the same number on all; None where no rank has a gradient. One collective."""
    rows = gathered([norm or 0.0, norm is not None], group)
    if not any(has_gradients for _, has_gradients in rows):
        return None
    return math.hypot(*(norm for norm, _ in rows))


def _values(gradient: Tensor) -> Tensor:
    if hasattr(gradient, "to_local"):  # a DTensor, of fully_shard
        gradient = gradient.to_local()
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def _in_float32(values: Tensor) -> Tensor:
    """Of halves their norm, whose squares overflow in float16: the norm of norms is the norm of all."""
    return torch.linalg.vector_norm(values, dtype=torch.float32) if values.dtype.itemsize < 4 else values
