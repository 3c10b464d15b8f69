"""What is saved, and which states are taken up again."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rehearse.scripts.held import plain
from rehearse.scripts.journal import Loaded, Saved
from rehearse.scripts.lapse import Lapse, instead_of

KINDS: list[tuple[Any, str]] = [
    (nn.Module, "model"),
    (Optimizer, "optimizer"),
    (LRScheduler, "schedule"),
    (GradScaler, "scaler"),
]


def record_saves(lapse: Lapse) -> None:
    """Take the place of ``torch.save``, of what safetensors writes by, and of every ``load_state_dict``."""

    @instead_of(torch)
    def save(write: Any, obj: object, f: Any, *arguments: Any, **options: Any) -> None:
        obj = plain(obj)
        lapse.write(Saved(_name_of(f), states_in(obj)))
        write(obj, f, *arguments, **options)

    if importlib.util.find_spec("safetensors"):
        _record_safetensors(lapse)
    for kind, what in KINDS:
        _record_loads(lapse, kind, what)


def _record_safetensors(lapse: Lapse) -> None:
    place: Any = importlib.import_module("safetensors.torch")

    @instead_of(place)  # below save_file, which libraries import by its name
    def serialize_file(write: Any, tensors: Any, filename: Any, *arguments: Any, **options: Any) -> None:
        lapse.write(Saved(_name_of(filename), (("", "model"),)))
        with open(filename, "ab") as file:  # where Python would write to; this is written by other code
            there = file.name
        write(tensors, there, *arguments, **options)


def _record_loads(lapse: Lapse, kind: Any, what: str) -> None:
    @instead_of(kind)
    def load_state_dict(load: Any, *arguments: Any, **options: Any) -> Any:
        lapse.write(Loaded(what))
        return load(*arguments, **options)


def _name_of(file: Any) -> str:
    name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", "")
    return os.path.basename(os.fspath(name)) if isinstance(name, str | os.PathLike) else ""


def states_in(saved: object) -> tuple[tuple[str, str], ...]:
    """To each key at the top of what is saved, which kind of state it holds; of a bare state the key is ``""``."""
    whole = state_of(saved)
    if whole:
        return (("", whole),)
    if not isinstance(saved, Mapping):
        return ()
    pairs = ((str(key), state_of(value) or _other_kind(value)) for key, value in saved.items())
    return tuple((key, kind) for key, kind in pairs if kind)


def _other_kind(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return "number"
    return _state_within(value)


def _state_within(value: object, depth: int = 3) -> str:
    """``"nested"``, where a dict or a list holds an optimizer's state further down."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    within = (
        state_of(part) in ("optimizer", "schedule") or (depth and _state_within(part, depth - 1)) for part in parts
    )
    return "nested" if any(within) else ""


def state_of(value: object) -> str:
    """Which kind of state a dict is, by what torch puts into it; empty where it is none."""
    for kind, what in KINDS:
        if isinstance(value, kind):
            return what
    if not isinstance(value, Mapping) or not value:
        return ""
    keys = set(value)
    if keys >= {"state", "param_groups"}:
        return "optimizer"
    if keys >= {"last_epoch", "_step_count"} or keys >= {"num_bad_epochs", "cooldown_counter"} or "_schedulers" in keys:
        return "schedule"
    if keys >= {"scale", "growth_factor", "backoff_factor"}:
        return "scaler"
    if all(isinstance(key, str) for key in keys) and all(isinstance(part, Tensor) for part in value.values()):
        return "model"
    return ""
