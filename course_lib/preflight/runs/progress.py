"""What is being tried, a line for each step, where somebody watches and it takes longer than a few seconds.

The environment variable ``PREFLIGHT_PROGRESS=0`` switches it off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TextIO

AFTER_SECONDS = 4.0


class Progress:
    """Writes a line when a step begins, from :data:`AFTER_SECONDS` on, and for the step that is going on then."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.began = time.monotonic()
        self.step = ""

    def tick(self) -> None:
        seconds = time.monotonic() - self.began
        if self.step and seconds >= AFTER_SECONDS:
            print(f"preflight ({seconds:.0f} s): {self.step}", file=self.stream, flush=True)
            self.step = ""


_shown: ContextVar[Progress | None] = ContextVar("preflight_progress", default=None)


@contextlib.contextmanager
def progress_shown() -> Iterator[None]:
    """Show the steps within, if stderr is a terminal or a notebook's."""
    token = _shown.set(Progress(sys.stderr) if is_watched(sys.stderr) else None)
    try:
        yield
    finally:
        _shown.reset(token)


def is_watched(stream: Any) -> bool:
    if os.environ.get("PREFLIGHT_PROGRESS") == "0":
        return False
    if type(stream).__module__.startswith("ipykernel"):
        return True
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # closed, or no file
        return False


def now_trying(what: str) -> None:
    """A step begins."""
    progress = _shown.get()
    if progress is not None:
        progress.step = what
        progress.tick()


def tick() -> None:
    """Is called while trials are waited for."""
    progress = _shown.get()
    if progress is not None:
        progress.tick()
