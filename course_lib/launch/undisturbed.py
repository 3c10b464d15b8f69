"""Work that no signal can cut in two.

Python runs a signal's handler in the main thread, between any two instructions. What it raises there (an interrupt, an
exit) leaves a process that was started and not yet noted, a lock that was taken, a folder that nobody will remove. The
rule: *what must not be cut in two runs in a thread of its own; the main thread waits for it, and may tell it to stop.*
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Generic, TypeVar

T = TypeVar("T")

LOOK_SECONDS = 0.2
"""How long the main thread waits at once. A signal that comes between Python's look for signals and the system's wait
is seen only when that wait returns."""
PATIENCE_SECONDS = 1.0
"""How long work that was told to stop may still keep the interrupted caller."""


def undisturbed(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Return what ``work()`` returns, or raise what it raises.

    What a signal's handler raises meanwhile is raised here, after ``stop()`` has told the work to end. The work may
    outlast that by what it cannot leave unfinished.
    """
    job = _Job(work)
    try:
        job.start()
        while not job.ended(LOOK_SECONDS):
            pass
    except BaseException:
        stop()
        job.ended(PATIENCE_SECONDS)
        raise
    return job.result()


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._values: list[T] = []
        self._error: BaseException | None = None
        # A bare lock: an interrupt inside threading.Event's wait could keep the thread from ever setting it.
        self._running = threading.Lock()
        self._running.acquire()

    def start(self) -> None:
        threading.Thread(target=self._run, name="run_ranks", daemon=True).start()

    def _run(self) -> None:
        try:
            self._values.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._running.release()

    def ended(self, seconds: float) -> bool:
        return self._running.acquire(timeout=seconds)

    def result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds this object
        return self._values.pop()


@contextlib.contextmanager
def interrupts_kept_from_children() -> Iterator[None]:
    """Processes that are started inside have SIGINT blocked, and so have theirs, until they unblock it.

    Ctrl-C at a terminal reaches them, too, and they would answer with tracebacks of what they are loading.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # unblocks SIGINT when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """From here on, and one that was blocked is forgotten."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
