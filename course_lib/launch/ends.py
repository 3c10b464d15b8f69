"""How a call ends: what each rank returned, or an error that shows where every rank was."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class RankResult:
    """What one rank returned."""

    rank: int
    value: Any
    stdout: str
    """What the rank printed, its native code included."""
    stderr: str
    seconds: float
    """Time inside the function, without start and end."""


@dataclass(frozen=True)
class RankReport:
    """Where one rank was when the call ended badly."""

    rank: int
    state: str
    """``"raised"``, ``"was killed by SIGKILL"``, ``"exited with code 3"``, ``"was running"`` or ``"had returned"``."""
    error: str = ""
    """The exception in one line; empty if the rank raised none."""
    details: str = ""
    """The traceback of what was raised, or the stack of a rank that was running."""
    functions: tuple[str, ...] = ()
    """Names of the functions on that stack, the innermost last."""
    stdout: str = ""
    stderr: str = ""

    @property
    def headline(self) -> str:
        return f"rank {self.rank} {self.state}" + (f": {self.error}" if self.error else "")

    def __str__(self) -> str:
        parts = [f"--- {self.headline}", self.details.rstrip()]
        # The traceback of a rank that raised tells its story; of one that died, the last lines may be all there is.
        last_lines = "\n".join(self.stderr.splitlines()[-10:])
        if last_lines and self.state not in ("raised", "had returned"):
            parts.append(f"its last lines on stderr:\n{last_lines}")
        return "\n".join(part for part in parts if part)


class RankError(RuntimeError):
    """A rank raised, died, or returned what cannot be sent back.

    ``reports`` holds a :class:`RankReport` for every rank, the first cause first. If the first cause is an exception
    that can travel, it is the ``__cause__``.
    """

    def __init__(self, summary: str, reports: Sequence[RankReport]) -> None:
        self.summary = summary
        self.reports = list(reports)
        super().__init__("\n\n".join([summary, *map(str, reports)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.summary, self.reports)

    def _render_traceback_(self) -> list[str]:
        # IPython's hook: the ranks' tracebacks say it all, the launcher's own frames would bury them.
        return f"{type(self).__name__}: {self}".splitlines()


class RankTimeout(RankError, TimeoutError):
    """The ranks did not return in time. ``reports`` holds each rank's stack, in the order of ranks."""


def readable_places(text: str) -> str:
    """Write library paths relative to their installation, and a notebook's cells by their number."""
    libraries = {str(Path(torch.__file__).parents[1]), str(Path(os.__file__).parent)}
    for folder in sorted(libraries, key=len, reverse=True):
        text = text.replace(f'File "{folder}{os.sep}', 'File "')
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        for name in list(linecache.cache):
            label = shell.compile.format_code_name(name)
            if label is not None:
                text = text.replace(f'File "{name}"', " ".join(label))
    return text
