"""The bytes that this process and its children hold, counted while the children rest."""

from __future__ import annotations

import sys
import time

import psutil

from course_lib._processes import SERVERS, fork_server

REST_SECONDS = 30.0
"""How long a child may take until it waits for something; on a busy machine a spawned worker starts for that long."""
_LOOK_SECONDS = 0.005
_WORKING = {psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_WAKING}


class Children:
    """The child processes of this one, without servers to fork others from, which grow while they load modules."""

    def __init__(self) -> None:
        self._restless: set[int] = set()
        """Those that have not rested when they were waited for; they are not waited for again."""

    def private_bytes(self) -> int:
        """What they share with nobody, counted when each of them waits for something.

        A worker that starts, or that loads batches ahead, writes to more and more pages until it has done so. How far
        it has come after a step depends on how busy the machine is; where it ends does not.
        """
        children = _children()
        deadline = time.monotonic() + REST_SECONDS
        while working := [child for child in children if child.pid not in self._restless and _works(child)]:
            if time.monotonic() > deadline:
                self._restless |= {child.pid for child in working}
        return sum(map(_private_bytes, children))


def _children() -> list[psutil.Process]:
    servers = {getattr(fork_server(), "_forkserver_pid", None), *SERVERS}
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in servers]


def _works(child: psutil.Process) -> bool:
    try:
        before = child.cpu_times()
        time.sleep(_LOOK_SECONDS)
        # Windows has no states: every process of it runs.
        state = None if sys.platform == "win32" else child.status()
        return state in _WORKING or child.cpu_times()[:2] != before[:2]
    except psutil.Error:  # ended since
        return False


def _private_bytes(child: psutil.Process) -> int:
    try:
        return int(child.memory_full_info().uss)
    except psutil.Error:  # ended since, or another user's
        return 0
