"""What is saved, and what is loaded."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from rehearse.scripts.events import Loaded, Saved
from rehearse.scripts.lapse import Lapse, instead_of


def record_saves(lapse: Lapse) -> None:
    """Take the place of ``torch.save`` and ``torch.load``, and of what safetensors writes and reads by."""

    @instead_of(torch)
    def save(write: Any, obj: object, f: Any, *arguments: Any, **options: Any) -> None:
        lapse.write(Saved(lapse.line()))
        write(obj, f, *arguments, **options)

    @instead_of(torch)
    def load(read: Any, f: Any, *arguments: Any, **options: Any) -> Any:
        lapse.write(Loaded(_name_of(f)))
        return read(f, *arguments, **options)

    if importlib.util.find_spec("safetensors"):
        _record_safetensors(lapse)


def _name_of(file: Any) -> str:
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", "")
    return os.path.basename(os.fspath(path)) if isinstance(path, str | os.PathLike) else ""


def _record_safetensors(lapse: Lapse) -> None:
    place: Any = importlib.import_module("safetensors.torch")

    @instead_of(place)  # below save_file, which libraries import by its name
    def serialize_file(write: Any, tensors: Any, filename: Any, *arguments: Any, **options: Any) -> None:
        lapse.write(Saved(lapse.line()))
        with open(filename, "ab") as file:  # where Python would write to; this is written by other code
            there = file.name
        write(tensors, there, *arguments, **options)

    @instead_of(place)
    def safe_open(read: Any, filename: Any, *arguments: Any, **options: Any) -> Any:
        lapse.write(Loaded(_name_of(filename)))
        with open(filename, "rb") as file:  # where it was written to
            there = file.name
        return read(there, *arguments, **options)
