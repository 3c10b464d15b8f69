"""What a window leaves in a model and in its reduction, to be taken back where the window is rejected.

BatchNorm's statistics take in a NaN before any loss is seen; what compresses gradients adds it to the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_lib._tensors import is_expanded


class BufferSnapshot:
    """Copies of all buffers of a model, to be taken before a window's first forward and put back if it is rejected.

    They are taken before DDP broadcasts rank 0's buffers as well: each rank gets back what it had itself, and the next
    window's broadcast finds what it would have found.

    A frozen parameter that a window writes to (a codebook, a momentum encoder) is treated as a buffer from the next
    window on: a copy of all that is frozen could be as large as the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._frozen: list[tuple[nn.Parameter, int, Tensor | None]] = []
        """The frozen parameters, how often each had been written to when the window began, and copies of the moving."""
        self._moving: set[nn.Parameter] = set()
        """Those that a window has written to."""
        self._copies: dict[tuple[int, str], Tensor] = {}
        self._held: list[tuple[nn.Module, str, Tensor | None]] | None = None

    @property
    def moving(self) -> list[str]:
        """The names of the frozen parameters that windows have written to, for a checkpoint."""
        return [name for name, parameter in self._named_parameters() if parameter in self._moving]

    @moving.setter
    def moving(self, names: Iterable[str]) -> None:
        parameters = dict(self._named_parameters())
        self._moving = {parameters[name] for name in names if name in parameters}

    @property
    def taken(self) -> bool:
        return self._held is not None

    @torch.no_grad()
    def take(self) -> None:
        self._held = self._buffers_now()
        for module, name, buffer in self._held:
            if buffer is None or is_expanded(buffer):  # a forward has not changed it
                continue
            copy = self._copies.get((id(module), name))
            if copy is None or (copy.shape, copy.dtype, copy.device) != (buffer.shape, buffer.dtype, buffer.device):
                self._copies[id(module), name] = buffer.detach().clone()
            else:
                copy.copy_(buffer)
        frozen = (p for p in self._model.parameters() if not (p.requires_grad or p.is_inference()))
        self._frozen = [(p, p._version, p.detach().clone() if p in self._moving else None) for p in frozen]

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
        """Restore all buffers, in the tensors that held them; with a 0-dim bool tensor, only where that is true.

        Nothing is read by the host. A buffer that a module replaced (instead of writing to it) is put back as well.

        Raises:
            RuntimeError: Without ``where``: the window left what is not finite in a frozen parameter, of which there
                is no copy yet.
        """
        for parameter, copy in self._written_to():
            if copy is not None:
                parameter.copy_(copy if where is None else torch.where(where.to(copy.device), copy, parameter))
            elif where is None and not parameter.isfinite().all():
                raise RuntimeError(
                    f"the first window that wrote to a frozen parameter, of shape {tuple(parameter.shape)}, has to be "
                    "skipped, and left values in it that are not finite. Make it a buffer (register_buffer): of those "
                    "there are copies from the first window on"
                )
        for module, name, buffer in self._held or ():
            now = module._buffers.get(name)
            if buffer is None or is_expanded(buffer):
                if where is None:
                    module._buffers[name] = buffer
                continue
            copy = self._copies[id(module), name]
            if where is None:
                module._buffers[name] = buffer
                buffer.copy_(copy)
            elif now is not None:
                now.copy_(torch.where(where.to(now.device), copy, now))

        if where is None and self._held is not None:
            known = {(module, name) for module, name, _ in self._held}
            for module, name, _ in self._buffers_now():
                if (module, name) not in known:
                    delattr(module, name)  # the window has made it

    @property
    def keep_their_shapes(self) -> bool:
        """Whether the buffers are those of the window's beginning, so that ``put_back(where)`` can restore them."""
        now, before = (
            {(module, name): None if buffer is None else buffer.shape for module, name, buffer in buffers}
            for buffers in (self._buffers_now(), self._held or ())
        )
        return now == before

    def drop(self) -> None:
        self._moving.update(parameter for parameter, _ in self._written_to())
        self._held, self._frozen = None, []

    def _buffers_now(self) -> list[tuple[nn.Module, str, Tensor | None]]:
        return [(m, name, b) for m in self._model.modules() for name, b in m._buffers.items()]

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """By the names that they have without DDP, as a run may go on without it."""
        named = self._model.named_parameters(remove_duplicate=False)
        return [(name.removeprefix("module."), parameter) for name, parameter in named]

    def _written_to(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """The parameters that were frozen when the window began, and still are, and that it has written to."""
        return [(p, copy) for p, version, copy in self._frozen if p._version != version and not p.requires_grad]


def forget_compression_errors(replicas: Iterable[DistributedDataParallel]) -> None:
    """Let PowerSGD begin again on all ranks: what it compressed wrongly it adds to the next gradient, a NaN as well."""
    power_sgd = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    for replica in replicas:
        for _, state in replica._comm_hooks:
            if power_sgd is not None and isinstance(state, power_sgd.PowerSGDState):
                state.error_dict.clear()
                state.p_memory_dict.clear()
                state.q_memory_dict.clear()
