"""Numbers and tensors that a module keeps as plain attributes: they are in no state, and training may move them.

A loss's weight that is warmed up, a hidden state that is carried on, a schedule that is stepped by hand. Settings are
plain attributes as well, and may be others in the run that resumes: so only what training has moved is kept. Lists are
not: mostly they are notes of what a process has seen.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from course_lib._tensors import is_expanded, version_of

NUMBERS = (bool, int, float, type(None))
LARGEST = 1_000_000
"""Of a tensor that is kept, in numbers: a larger one (a batch, generated images) would make every checkpoint long."""
OF_EVERY_MODULE = vars(LightningModule()).keys()
LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "course_lib.", "transformers.", "timm.", "torchvision.")
NONE = object()


class PlainAttributes:
    """Those of a module and its parts, as they were when the run began, and when the window did.

    Args:
        restored: The names of those that an earlier life has moved.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, restored: Collection[str]) -> None:
        self._known_schedules = {id(config.scheduler) for config in trainer.lr_scheduler_configs}
        parts = [(f"{path}.".lstrip("."), part) for path, part in pl_module.named_modules() if not _is_a_metric(part)]
        self._own = [(path, vars(part)) for path, part in parts if not _is_of_a_library(part)]
        of_others = ((path, vars(part)) for path, part in parts if _is_of_a_library(part))
        self._of_others = [  # a dropout's p; what is private there belongs to the library
            (f"{path}{name}", attributes, name)
            for path, attributes in of_others
            for name, value in attributes.items()
            if type(value) in NUMBERS and not name.startswith("_") and name != "training"
        ]
        self._restored = set(restored)
        self._at_first = {name: _look(value) for name, value in self._values()}
        self._kept: dict[str, dict[str, Any]] = {}

    def keep(self) -> None:
        """Remember what has moved so far, ahead of a window's first micro-batch."""
        self._kept = self.moved()

    def moved(self) -> dict[str, dict[str, Any]]:
        """What training has moved, in this life or an earlier one: copies, by the attribute's name."""
        return {name: _copy(value) for name, value in self._moving()}

    def moved_before_the_window(self) -> dict[str, dict[str, Any]]:
        """The same, as it was when the window began."""
        at_first = ((name, self._at_first[name]) for name, _ in self._moving() if name in self._at_first)
        return {name: {"number": look} for name, look in at_first if not isinstance(look, _Look)} | self._kept

    def _moving(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._values():
            if name in self._restored or _look(value) != self._at_first.get(name, NONE):
                yield name, value

    def _values(self) -> Iterator[tuple[str, Any]]:
        for path, attributes in self._own:
            for name, value in attributes.items():
                if name not in OF_EVERY_MODULE and self._can_be_kept(value):
                    yield path + name, value
        for full_name, attributes, name in self._of_others:
            if type(attributes.get(name, NONE)) in NUMBERS:
                yield full_name, attributes[name]

    def _can_be_kept(self, value: Any) -> bool:
        if type(value) in NUMBERS:
            return True
        if isinstance(value, Tensor):
            return type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
        return isinstance(value, LRScheduler) and id(value) not in self._known_schedules


class _Look(tuple[Any, ...]):
    """What tells whether something has moved, where it is not the thing itself."""


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Look(version_of(value))
    if isinstance(value, LRScheduler):
        return _Look((value.last_epoch,))
    return value


def _copy(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor) and value.numel() > LARGEST:
        return {"too large": value.numel()}
    if isinstance(value, Tensor):
        return {"tensor": value.detach().clone(), "on_cpu": value.device.type == "cpu"}
    if isinstance(value, LRScheduler):
        return {"schedule": copy.deepcopy(value.state_dict())}
    return {"number": value}


def put_plain_attributes(pl_module: LightningModule, saved: Mapping[str, dict[str, Any]]) -> None:
    """Put back what :meth:`PlainAttributes.moved` gave."""
    parts = dict(pl_module.named_modules())
    for full_name, kept in saved.items():
        path, _, name = full_name.rpartition(".")
        if path not in parts:
            continue
        if "tensor" in kept:
            _put_tensor(parts[path], name, kept["tensor"].to("cpu" if kept["on_cpu"] else pl_module.device))
        elif "too large" in kept:
            rank_zero_warn(
                f"training had moved {full_name}, a tensor of {kept['too large']:,} numbers that the module keeps as a "
                "plain attribute, and no checkpoint holds it. If training goes by it, make it a buffer"
            )
        elif "number" in kept:
            setattr(parts[path], name, kept["number"])
        elif isinstance(schedule := getattr(parts[path], name, None), LRScheduler):
            schedule.load_state_dict(kept["schedule"])


def _put_tensor(part: nn.Module, name: str, value: Tensor) -> None:
    own = getattr(part, name, None)
    alike = isinstance(own, Tensor) and (own.shape, own.dtype) == (value.shape, value.dtype)
    if isinstance(own, Tensor) and alike and not own.is_inference() and not is_expanded(own):
        with torch.no_grad():
            own.copy_(value)  # in place: it may be another name for a parameter
    else:
        setattr(part, name, value.clone())


def _is_of_a_library(part: nn.Module) -> bool:
    return type(part).__module__.startswith(LIBRARIES)


def _is_a_metric(part: nn.Module) -> bool:
    """A torchmetrics Metric, which looks after its own state."""
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(part).__mro__)
