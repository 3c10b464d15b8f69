"""Processes that work for this one: which servers it has, and that they end with it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

SERVERS: set[int] = set()
"""The processes that ranks start from. They grow while they load modules."""


def fork_server() -> Any:
    """Python's own, if ``multiprocessing.forkserver`` was loaded here; else None."""
    return getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)


def end_with(parent: int, folder: Path | None = None) -> None:
    """Let this process, the first of its group, and its workers end when its parent is gone.

    What is in ``folder``, which the parent would have removed, goes with them.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
