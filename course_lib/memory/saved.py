"""What autograd keeps from a forward for its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(forward: Callable[[], Any], *, model: nn.Module | None = None) -> int:
    """Call ``forward()`` and count the bytes that its graph saves, each storage once.

    What of a step's memory grows with the batch: mostly ``const + c · batch_size``, so two calls
    give both. Saved inputs count, the parameters and buffers of ``model`` don't. Works under
    fake tensors.

    >>> import torch
    >>> saved_bytes(lambda: torch.ones(4, 10, requires_grad=True).exp())    # exp keeps its output
    160

    Raises:
        ValueError: ``forward`` isn't callable.
    """
    if not callable(forward):
        what = "forward must be a function without arguments"
        raise ValueError(f"{what}, got {forward!r}: write lambda: model(x)")
    left_out = (*model.parameters(), *model.buffers()) if model is not None else ()
    own = {id(tensor.untyped_storage()) for tensor in left_out}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in own:
            saved[id(storage)] = storage  # kept, so that its id stays its own
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in saved.values())
