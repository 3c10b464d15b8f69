"""Plays of scripts that are forks of a process which has loaded what a play imports.

A play spends a second of a core on imports before its script begins. With `pytest --loaded` (`make test`, on Linux)
each process of tests has a server that imports once, when a play is asked for, and forks each of them. Like the server
of kernels it only imports. `make thorough` and `make matrix` start ordinary processes.

A play ends when its parent is gone, and the parent waits for it. So the server forks twice: where the one between ends,
the play becomes a child of the nearest process above that takes orphans (`PR_SET_CHILD_SUBREAPER`), which is the one
that asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

STAGES = ("course_lib.timelapse.stage", "course_lib.preflight.fits")
READ_AT_THE_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "LD_")
"""The beginnings of the names of variables that Python or a library reads when it starts or is imported."""
TOLD_BY_A_PLAY = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
"""Of these, what each play is given, and its fork does."""
PR_SET_CHILD_SUBREAPER = 36


class LoadedPlays:
    """The server, as seen by the process of tests that it is a child of, and with which it ends."""

    def __init__(self) -> None:
        self.connection, server = socket.socketpair()
        self.environment = _read_at_the_start(os.environ)
        with server:
            command = [sys.executable, __file__, str(server.fileno())]
            one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, env=one_thread, pass_fds=[server.fileno()], start_new_session=True)

    def start(self, command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        """In place of `subprocess.Popen`, as `course_lib.timelapse.player` calls it."""
        python, module, stage, *arguments = command
        if (python, module) != (sys.executable, "-m") or stage not in STAGES:
            return subprocess.Popen(command, env=env, **options)
        if _read_at_the_start(env) != self.environment:
            return subprocess.Popen(command, env=env, **options)
        output = options["stdout"].fileno()
        request = pickle.dumps((stage, arguments, dict(env), os.getcwd(), os.getpid()))
        with _orphans_taken():
            size = len(request).to_bytes(8, "big")
            socket.send_fds(self.connection, [size], [options["stdin"], output, output])
            self.connection.sendall(request)
            pid = int.from_bytes(self.connection.recv(8), "big")
        if not pid:
            raise RuntimeError("the server of loaded plays ended before this play had started")
        return _as_popen(command, pid)

    def stop(self) -> None:
        self.connection.close()
        self.process.wait()


def _read_at_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_THE_START) and name not in TOLD_BY_A_PLAY
    }


@contextlib.contextmanager
def _orphans_taken() -> Iterator[None]:
    """For a moment only: a process that takes orphans has to wait for all of them."""
    control = ctypes.CDLL(None).prctl
    control(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        control(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _as_popen(command: Sequence[str], pid: int) -> subprocess.Popen[bytes]:
    """A child that something else has started, with all that a Popen does for one."""
    process = subprocess.Popen.__new__(subprocess.Popen)
    vars(process).update(args=command, pid=pid, returncode=None, stdin=None, stdout=None, stderr=None)
    vars(process).update(_child_created=True, _waitpid_lock=threading.Lock(), _sigint_wait_secs=0.25)
    return process


# ----------------------------------------------------------------------------------------------------- in the server


def serve(connection: socket.socket) -> None:
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
        if not size:
            return
        request = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        _load()
        reading, writing = os.pipe()
        if os.fork() == 0:
            if pid := os.fork():
                os.write(writing, pid.to_bytes(8, "big"))
                os._exit(0)
            connection.close()
            _be_play(*pickle.loads(request), descriptors)
        os.wait()
        connection.sendall(os.read(reading, 8))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


@cache
def _load() -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask the driver for GPUs would be to use CUDA
    for name in (*STAGES, "torch._dynamo"):  # which an optimizer imports when it steps
        importlib.import_module(name)
    for name in STAGES:
        del sys.modules[name]  # it is run, and not imported
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked safely"


def _be_play(
    stage: str, arguments: list[str], env: dict[str, str], folder: str, parent: int, descriptors: list[int]
) -> NoReturn:
    """What `python -m STAGE ARGUMENTS` would do."""
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        sys.stdin = open(0)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(open(number, "wb", 0), "utf-8", write_through=True)  # noqa: SIM115
            for number in (1, 2)
        )
        sys.dont_write_bytecode, tempfile.tempdir = True, None
        import numpy as np
        import torch

        np.random.seed()  # noqa: NPY002 - without this, and the next, plays of one server would draw the same
        torch.default_generator.seed()
        while os.getppid() != parent:  # until the one between has ended
            time.sleep(0.001)
        sys.argv, sys.path[0] = [stage, *arguments], folder
        runpy.run_module(stage, run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    serve(socket.socket(fileno=int(sys.argv[1])))
