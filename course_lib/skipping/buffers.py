"""What a window leaves in a model's buffers, to be taken back where the window is rejected.

BatchNorm's statistics take in a NaN before any loss is seen.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_lib._tensors import is_expanded


class BufferSnapshot:
    """Copies of all buffers of a model, taken ahead of a window's first forward, and put back if it is rejected.

    They are taken before DDP broadcasts rank 0's buffers as well: each rank gets back what it had itself, and the next
    window's broadcast finds what it would have found.

    Bounds: a buffer that the window makes, or whose shape it changes, is not taken back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: list[_Held] | None = None
        self.hook = model.register_forward_pre_hook(_TakeAtForward(self), prepend=True)

    @property
    def taken(self) -> bool:
        return self._held is not None

    @torch.no_grad()
    def take(self) -> None:
        """Copy them, unless this window's have been copied."""
        if self._held is None:
            self._held = [
                _Held(module, name, buffer, buffer.detach().clone())
                for module in self._model.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None and not is_expanded(buffer)  # a forward has not changed that one
            ]

    def check_taken(self) -> None:
        """Raise a RuntimeError where there are buffers, and no copies of what they were before this window."""
        if not self.taken and any(True for _ in self._model.buffers()):
            raise RuntimeError(
                "the window's forward did not go through the model that the guard was given (perhaps through a module "
                "inside it, or what torch.compile made of it), so the buffers before it are not known, and it could "
                "not be skipped. Give the guard what the forward goes through, or call guard.begin() before it"
            )

    @torch.no_grad()
    def put_back(self, where: Tensor | None = None) -> None:
        """Restore all buffers, in the tensors that held them: one that a module has replaced as well.

        With ``where``, a 0-dim bool tensor, where that is true. Nothing is read by the host.
        """
        for held in self._held or ():
            now = held.module._buffers[held.name]
            if where is None or now is None:
                held.buffer.copy_(held.copy)
            else:
                held.buffer.copy_(torch.where(where.to(now.device), held.copy, now))
            held.module._buffers[held.name] = held.buffer

    def drop(self) -> None:
        self._held = None


class _Held(NamedTuple):
    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor


class _TakeAtForward:
    """The model's forward hook. It keeps no snapshot alive, and a copy of the model is one without it."""

    def __init__(self, snapshot: BufferSnapshot) -> None:
        self._snapshot = weakref.ref(snapshot)

    def __call__(self, *_: Any) -> None:
        snapshot = self._snapshot()
        if snapshot is not None and torch.is_grad_enabled():  # a validation in between is no window
            snapshot.take()

    def __reduce__(self) -> tuple[Any, ...]:
        # What a copy, or a file, has in this hook's place: an empty dict's `get`, which does nothing, and needs nothing
        # of this library.
        return getattr, ({}, "get")
