"""Faults to plant in a copy of the library, one at a time: a hunt that finds nothing has to find these."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Planted:
    """One line of the library, and what takes its place."""

    name: str
    file: str
    line: str
    becomes: str


def plant(fault: Planted, library: Path, folder: Path) -> None:
    """Copy the library into the folder, with the fault."""
    shutil.copytree(library / "course_lib", folder / "course_lib", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "course_lib" / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.line) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.line)} times, and not once: {fault.line}")
    path.write_text(text.replace(fault.line, fault.becomes), encoding="utf-8")
