"""The bytes that this process and its children hold, counted while the children rest."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from course_lib._processes import fork_server

REST_SECONDS = 30.0
"""How long a child may take until it waits for something; on a busy machine a spawned worker starts for that long."""
_LOOK_SECONDS = 0.005
_WORKING = {psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_WAKING}


class Children:
    """The child processes of this one, without multiprocessing's fork server, which grows while it loads modules."""

    def __init__(self) -> None:
        self._restless: set[int] = set()
        """Those that have not rested when they were waited for; they are not waited for again."""
        self._looks: dict[int, _Look] = {}
        """The last one at each, by its pid."""

    def private_bytes(self) -> int:
        """What they share with nobody, counted when each of them waits for something.

        A worker that starts, or that loads batches ahead, writes to more and more pages until it has done so. How far
        it has come after a step depends on how busy the machine is; where it ends does not. What a child no longer
        shares because another process has copied or left it is not counted after the first look at that child.
        """
        children = _children()
        deadline = time.monotonic() + REST_SECONDS
        while working := [child for child in children if child.pid not in self._restless and _works(child)]:
            if time.monotonic() > deadline:
                self._restless |= {child.pid for child in working}
        self._looks = {child.pid: self._look_at(child) for child in children}
        return sum(look.bytes for look in self._looks.values())

    def _look_at(self, child: psutil.Process) -> _Look:
        private, faults = _private_bytes_and_faults(child)
        if (before := self._looks.get(child.pid)) is None:
            return _Look(private, private, faults)
        more = private - before.private
        if faults and before.faults:  # its own copy of a page begins with a fault of its own
            more = min(more, sum(max(0, now - then) for now, then in zip(faults, before.faults, strict=True)))
        return _Look(max(0, before.bytes + more), private, faults)


class _Look(NamedTuple):
    bytes: int
    """Those that it holds for itself by its own doing."""
    private: int
    """Those that it shares with nobody."""
    faults: tuple[int, int] | None
    """What it has got so far by page faults."""


def _children() -> list[psutil.Process]:
    server_pid = getattr(fork_server(), "_forkserver_pid", None)
    return [child for child in psutil.Process().children(recursive=True) if child.pid != server_pid]


def _works(child: psutil.Process) -> bool:
    try:
        before = child.cpu_times()
        time.sleep(_LOOK_SECONDS)
        # Windows has no states: every process of it runs.
        state = None if sys.platform == "win32" else child.status()
        return state in _WORKING or child.cpu_times()[:2] != before[:2]
    except psutil.Error:  # ended since
        return False


def _private_bytes_and_faults(child: psutil.Process) -> tuple[int, tuple[int, int] | None]:
    """What it shares with nobody; and, where it is told, one page for each page fault so far, and its huge pages."""
    try:  # one look at its pages, as this takes milliseconds; psutil's would be a second one
        held = dict(line.split()[:2] for line in Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()[1:])
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        try:
            return int(child.memory_full_info().uss), None
        except psutil.Error:  # ended since, or another user's
            return 0, None
    private = sum(int(kilobytes) for name, kilobytes in held.items() if name.startswith("Private_"))
    faults = int(fields[7]) + int(fields[9])
    return private * 1024, (faults * mmap.PAGESIZE, int(held["AnonHugePages:"]) * 1024)


def resident_bytes() -> int:
    """Of this process."""
    return int(psutil.Process().memory_info().rss)
