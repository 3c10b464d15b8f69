"""What the processes of a rehearsal have used, and signals that come while it waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil


def started_by(pid: int) -> list[psutil.Process]:
    """A process and those that it started, whatever their sessions; none where it is gone."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def cpu_seconds(pid: int) -> float:
    """What a process and those that it started have used; 0 where it is gone."""
    total = 0.0
    for one in started_by(pid):
        with contextlib.suppress(psutil.Error):
            total += sum(one.cpu_times()[:4])  # its own, and that of those that have ended
    return total


def seconds_without_a_core(pid: int) -> float:
    """How long a process and those that it started could have gone on and had no core; 0 where the kernel tells none.

    It is the sum over the threads that live, by Linux's ``/proc/PID/task/TID/schedstat``.
    """
    return sum(threads_without_a_core(one.pid) for one in started_by(pid))


def threads_without_a_core(pid: int) -> float:
    """The same of one process alone."""
    nanoseconds = 0
    for told in _of_threads(pid, "schedstat"):
        with contextlib.suppress(ValueError):
            nanoseconds += int(told.split()[1])
    return nanoseconds / 1e9


def is_ready(pid: int) -> bool:
    """Whether a thread of a process, or of one that it started, runs, or waits for a core or the disk, at this moment.

    The kernel counts a wait for a core when it is over. False where there is no ``/proc/PID/task/TID/stat``.
    """
    told = (told for one in started_by(pid) for told in _of_threads(one.pid, "stat"))
    return any(one.rpartition(")")[2].split()[0] in ("R", "D") for one in told)


def _of_threads(pid: int, name: str) -> Iterator[str]:
    """What Linux's ``/proc/PID/task/TID/NAME`` says of each thread; process and threads may end at any moment."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                if told := Path(f"/proc/{pid}/task/{thread}/{name}").read_text():  # nothing of one that is ending
                    yield told


@contextlib.contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """An interrupt and SIGTERM wait until the end of this, and come then; the list has those that wait."""
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: handler for number, handler in held.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
            raise KeyboardInterrupt  # its handler went on


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM raises SystemExit here where it would end the process at once, and so leave folders behind."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()
    ends_at_once = in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ends_at_once:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if ends_at_once:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
