"""The clean server that ranks start from: a process that has torch loaded, and has used neither OpenMP nor CUDA.

It is multiprocessing's fork server. The first call of a process starts it, or ``warm_up`` ahead of that, and each rank
is a fork of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from typing import Any

from course_lib._processes import forget_a_fork_server_that_is_gone
from course_lib.launch.undisturbed import interrupts_kept_from_children, undisturbed

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "lightning", "course_lib.launch")
"""What the server loads once, so that no rank has to: torch._dynamo alone is seconds of a rank's first optimizer."""


def warm_up() -> None:
    """Start the server without waiting for it, so that the first ``run_ranks`` of this process need not either.

    Loading torch and Lightning takes the server some seconds of another core. Where ranks are spawned (outside Linux)
    there is no server, and nothing happens.
    """
    undisturbed(lambda: start_context(None), lambda: None)


def start_context(start_method: str | None) -> Any:
    """The multiprocessing context whose processes are ranks, with its server running."""
    if start_method is None:
        start_method = "forkserver" if sys.platform == "linux" else "spawn"
    if start_method not in ("forkserver", "spawn"):
        raise ValueError(f'start_method must be "forkserver" or "spawn", got {start_method!r}')
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        found = [name for name in PRELOAD if importlib.util.find_spec(name.split(".")[0])]
        context.set_forkserver_preload(found)
        _start_server()
    return context


def _start_server() -> None:
    from multiprocessing import forkserver  # Windows has none

    forget_a_fork_server_that_is_gone()
    # Asking the driver for GPUs would make CUDA unusable in every process forked from the server: ask NVML.
    with _environment_variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1"), interrupts_kept_from_children():
        try:
            forkserver.ensure_running()
        except OSError as error:
            if "too long" not in str(error):
                raise
            raise OSError(
                f"the temporary directory {tempfile.gettempdir()!r} has a path too long for the address of a "
                "socket (about 70 characters are left to it): set TMPDIR to a shorter one"
            ) from error


@contextlib.contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_main_lock = threading.Lock()


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Inside, started processes do not run the caller's script again, as multiprocessing would have them do.

    The function travels by value, so no rank needs the script, and a script needs no `if __name__ == "__main__"`.
    """
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = _HiddenMain(main)
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class _HiddenMain(types.ModuleType):
    """Has the names of a `__main__`, for whoever looks them up meanwhile, but no script that could be run again."""

    def __init__(self, main: types.ModuleType) -> None:
        super().__init__("__main__")
        self._main = main

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(self._main, name)
