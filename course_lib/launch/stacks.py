"""Where a rank stands that cannot answer, and where its workers stand: they write it when a signal asks for it.

A forked DataLoader worker has the rank's handler of the signal, and the file that it writes into.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from course_lib._processes import takes_signal
from course_lib.launch.rank import Frame, frames_of_dump

WRITE_SECONDS = 0.5
"""How long a process may take to write its stack."""
SILENT = "It did not answer: it is stopped, or has not begun.\n"
BEGINS = "_bootstrap"
"""The function of multiprocessing in which a process begins; what calls it is the rank's, from before the fork."""


def stack_by_signal(pid: int, file: Path) -> tuple[Frame, ...]:
    """The stack that a process writes into the file when it gets the signal; empty where it does not."""
    if not hasattr(signal, "SIGUSR1"):
        return ()
    before = _size(file)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGUSR1)
    size, deadline = -1, time.monotonic() + WRITE_SECONDS
    while _size(file) != size or size <= before:  # until it is there, and grows no more
        if time.monotonic() > deadline:
            return ()
        size = _size(file)
        time.sleep(0.05)
    return frames_of_dump(file.read_bytes()[before:].decode("utf-8", errors="replace"))


def stacks_of_workers(pid: int, file: Path) -> dict[int, tuple[Frame, ...]]:
    """The same of the workers that a rank has forked, by their pids, each from where it began; none without /proc.

    Empty for a worker that does not answer, though it has the rank's handler.
    """
    stacks = {}
    with contextlib.suppress(psutil.Error, OSError):
        for child in psutil.Process(pid).children(recursive=True):
            if takes_signal(child.pid, signal.SIGUSR1):
                frames = stack_by_signal(child.pid, file)
                names = [name for *_, name in frames]
                stacks[child.pid] = frames[names.index(BEGINS) + 1 :] if BEGINS in names else frames
    return stacks


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
