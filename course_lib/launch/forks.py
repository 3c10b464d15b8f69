"""Forks of a rank that do not hang, on a Python that may hang in them.

Before 3.11.10, Python's list of threads stays locked in a fork for ever where a thread of native code enters itself at
this moment (python/cpython#112275). gloo's threads do so at the end of a collective, which is where workers start.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from course_lib._processes import thread_states

FORKS_MAY_HANG = sys.version_info < (3, 11, 10)
REST_SECONDS = 0.1
"""How long a fork waits for threads that work on; those at the end of a collective are done in a millisecond."""


def wait_before_forks() -> None:
    """Let each fork of this process wait first until its other threads rest, where forks may hang."""
    if FORKS_MAY_HANG and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=wait_for_other_threads)


def wait_for_other_threads(seconds: float = REST_SECONDS) -> None:
    """Wait, at most so long, until no other thread of this process runs or waits for a core.

    One that waits for the interpreter lock rests too: it is in the list by then, and the lock is held in a fork.
    """
    own, deadline = threading.get_native_id(), time.monotonic() + seconds
    while any(state != "S" for thread, state in thread_states(os.getpid()) if thread != own):
        if time.monotonic() >= deadline:
            return
        time.sleep(0.0002)
