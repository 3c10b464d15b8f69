"""The clean server that ranks start from: a process that has torch loaded, and has used neither OpenMP nor CUDA.

The first call of a process starts it, or ``warm_up`` ahead of that. It forks a watcher for each call, which has the
call's ranks, and ends when the caller has ended, however that was: the socket between the two closes then.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from course_lib._processes import SERVERS
from course_lib.launch.watcher import watch

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "lightning", "course_lib.launch")
"""What the server loads once, so that no rank has to: torch._dynamo alone is seconds of a rank's first optimizer."""


class _Server(NamedTuple):
    control: socket.socket
    process: Any


_server: _Server | None = None
_lock = threading.Lock()


def warm_up() -> None:
    """Start the server without waiting for it, so that the first ``run_ranks`` of this process need not either.

    Loading torch and Lightning takes the server some seconds of another core. Where ranks are spawned (outside Linux)
    there is no server, and nothing happens.
    """
    if forks_ranks():
        _running_server()


def forks_ranks() -> bool:
    """Whether ranks are forked from the server, as on Linux; elsewhere they are spawned, which takes seconds a call."""
    return sys.platform == "linux" and hasattr(socket, "send_fds")


def connect(forked: bool) -> Connection:
    """A connection to a new process that watches over a call."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        if not forked:
            with _hidden_main():
                multiprocessing.get_context("spawn").Process(target=watch, args=(theirs,)).start()
            return ours
        try:
            socket.send_fds(_running_server().control, [b"."], [theirs.fileno()])
        except OSError:  # the server was killed
            _forget_server()
            socket.send_fds(_running_server().control, [b"."], [theirs.fileno()])
    return ours


def _running_server() -> _Server:
    global _server
    with _lock:
        if _server is None:
            ours, theirs = socket.socketpair()
            with theirs:
                _server = _Server(ours, start_python(_code(), theirs))
            SERVERS.add(_server.process.pid)
        return _server


def _forget_server() -> None:
    global _server
    with _lock:
        if _server is not None:
            _server.process.poll()
            _server.control.close()
            _server = None


def _code() -> str:
    return f"import sys; sys.path[:] = {sys.path!r}; from course_lib.launch.server import serve; serve({PRELOAD!r})"


def start_python(code: str, stdin: socket.socket) -> Any:
    """Start a Python that has a socket as its standard input, and is out of reach of Ctrl-C at a terminal."""
    # Asking the driver for GPUs would make CUDA unusable in every process forked from the server: ask NVML.
    environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=stdin.fileno(), start_new_session=True, env=environment)


def serve(preload: Sequence[str]) -> None:
    """The server's life: fork a watcher for each connection that comes through standard input, until that closes."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers that have ended leave no zombie
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            watch(Connection(descriptors[0]))
        os.close(descriptors[0])


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Inside, a spawned process does not run the caller's script again, as multiprocessing would have it do.

    The function travels by value, so no rank needs the script, and a script needs no `if __name__ == "__main__"`.
    """
    with _lock:
        main = sys.modules["__main__"]
        hidden = sys.modules["__main__"] = types.ModuleType("__main__")  # has no file, and no spec
        vars(hidden).update((name, value) for name, value in vars(main).items() if name[:2] != "__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
