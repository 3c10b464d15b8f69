"""What is saved."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from rehearse.scripts.held import plain
from rehearse.scripts.journal import Saved
from rehearse.scripts.lapse import Lapse, instead_of


def record_saves(lapse: Lapse) -> None:
    """Take the place of ``torch.save``, and of what safetensors writes by."""

    @instead_of(torch)
    def save(write: Any, obj: object, f: Any, *arguments: Any, **options: Any) -> None:
        lapse.write(Saved())
        write(plain(obj), f, *arguments, **options)

    if importlib.util.find_spec("safetensors"):
        _record_safetensors(lapse)


def _record_safetensors(lapse: Lapse) -> None:
    place: Any = importlib.import_module("safetensors.torch")

    @instead_of(place)  # below save_file, which libraries import by its name
    def serialize_file(write: Any, tensors: Any, filename: Any, *arguments: Any, **options: Any) -> None:
        lapse.write(Saved())
        with open(filename, "ab") as file:  # where Python would write to; this is written by other code
            there = file.name
        write(tensors, there, *arguments, **options)
