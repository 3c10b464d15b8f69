"""Kernels that are forks of a process which has torch, Lightning, matplotlib and ipykernel loaded already.

It saves 26 imports of torch in a run of all notebooks (187 in place of 213 by `make cost`, two cores).

One server imports once for the whole run, and each kernel is a fork of it, with a server of ranks that is a fork, too;
so is that of the ranks of tests, of the process that has collected them. It only imports: it has one thread, and has
used neither OpenMP nor CUDA. What is forked does not show that it could start, or that a chapter imports what it uses:
`make thorough` starts ordinary kernels and servers, as does any system but Linux.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

LAUNCHER = "ipykernel_launcher"
LOADED = ("ipykernel.kernelapp", "ipykernel.ipkernel", "ipywidgets", "matplotlib.pyplot")
"""What a kernel and most chapters import, besides what a server of ranks has loaded."""
ANSWER_SECONDS = 60


class LoadedServer:
    """The server, as seen by the process that starts it. It ends with that process, however that ends."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="kernels-")
        self.address = f"{folder}/server"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)  # whoever connects while the server loads waits
            self.process = subprocess.Popen(
                [sys.executable, __file__, folder, str(listener.fileno())],
                stdin=subprocess.PIPE,  # it closes when this process ends, and with it ends the server
                pass_fds=[listener.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C at the terminal is for the tests
            )

    def stop(self) -> None:
        """End the server, and with it the kernels that it has started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class LoadedKernel:
    """A kernel that the server has forked, with what jupyter_client uses of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self.returncode = 0

    def poll(self) -> int | None:
        """None while it lives, then 0: its exit code is known to the server alone."""
        if self.returncode is None and self._has_ended(0):
            os.close(self._handle)
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(LAUNCHER, timeout or 0)
        self.poll()
        return 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._handle], [], [], timeout)[0])


def use_loaded_server(address: str) -> None:
    """Let jupyter_client, in this process, take the kernels of this interpreter from the server at the address."""
    from jupyter_client.provisioning import local_provisioner

    start = local_provisioner.launch_kernel

    def launch_kernel(cmd: Sequence[str], **options: Any) -> Any:
        if list(cmd[:3]) != [sys.executable, "-m", LAUNCHER]:
            return start(cmd, **options)
        return fork_kernel(address, cmd[3:], **options)

    local_provisioner.launch_kernel = launch_kernel


def fork_kernel(
    address: str,
    arguments: Sequence[str],
    *,
    env: dict[str, str],
    cwd: str | None = None,
    stdout: Any = None,
    stderr: Any = None,
) -> LoadedKernel:
    """A new kernel, started with the arguments of `python -m ipykernel_launcher`. Its stdin is empty."""
    request = pickle.dumps((arguments, env, cwd or os.getcwd()))
    with open(os.devnull, "r+b") as nothing, socket.socket(socket.AF_UNIX) as connection:
        outputs = [_descriptor(stdout, 1, nothing), _descriptor(stderr, 2, nothing)]
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(address)
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [nothing.fileno(), *outputs])
        connection.sendall(request)
        pid = connection.recv(8)
    if not pid:
        raise RuntimeError("the server of loaded kernels ended before this kernel had started")
    return LoadedKernel(int.from_bytes(pid, "big"))


def _descriptor(output: Any, inherited: int, nothing: Any) -> int:
    if output is None:
        return inherited
    if output == subprocess.DEVNULL:
        return int(nothing.fileno())
    return output if isinstance(output, int) else int(output.fileno())


def serve(folder: str, listener: socket.socket) -> None:
    """The server's life: it loads once, and forks a kernel for each connection, until its stdin is closed."""
    server = os.getpid()
    try:
        connection = _wait_for_a_kernel_to_be(listener)
        if connection is not None:
            _be_kernel(connection)
    finally:
        if os.getpid() == server:
            shutil.rmtree(folder, ignore_errors=True)


@cache  # before the first kernel: a run without notebooks needs nothing of it
def _load() -> None:
    # A kernel sets it before a chapter imports matplotlib, which reads it then.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # ipykernel.kernelapp reads it when it is imported
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask the driver for GPUs would be to use CUDA
    from course_lib.launch.server import PRELOAD

    for name in PRELOAD + LOADED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked safely"


def _wait_for_a_kernel_to_be(listener: socket.socket) -> socket.socket | None:
    """In each kernel its connection; in the server None, once its stdin is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # kernels that have ended leave no zombie
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        _load()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return connection
        connection.close()


def _be_kernel(connection: socket.socket) -> None:
    """Become what `python -m ipykernel_launcher` would be; the answer tells that the kernel leads its group."""
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    arguments, env, cwd = pickle.loads(connection.makefile("rb").read(int.from_bytes(size, "big")))
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    connection.sendall(os.getpid().to_bytes(8, "big"))
    connection.close()
    import numpy as np
    import torch
    from ipykernel import kernelapp

    np.random.seed()  # noqa: NPY002 - without this, and the next, kernels of one server would draw the same
    torch.default_generator.seed()
    start_forked_server_of_ranks()
    sys.argv = [importlib.util.find_spec(LAUNCHER).origin, *arguments]
    kernelapp.launch_new_instance()


def start_forked_server_of_ranks(*kept: int) -> None:
    """`course_lib.launch.warm_up`, with a server that is a fork of this process: what is loaded here is loaded there.

    It keeps, of this process's descriptors, stdin, stdout, stderr and those that are named.
    """
    from course_lib.launch import server, warm_up

    def fork(code: str, stdin: socket.socket) -> Any:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # a thread of xdist is not forked
            pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(stdin.fileno(), 0)
            server._lock = threading.Lock()  # it was taken when this was forked
            _run_in_fork(code, {0, 1, 2, *kept})
        return SimpleNamespace(pid=pid, poll=lambda: None)

    if len(os.listdir("/proc/self/task")) > len(sys._current_frames()):
        return  # threads of OpenMP: the first use of it in a fork would wait for them for ever
    with mock.patch.object(server, "start_python", fork):
        warm_up()


def _run_in_fork(code: str, kept: set[int]) -> NoReturn:
    """What `python -c CODE` would do."""
    try:
        # Nothing is closed, as objects that are left over (pytest's streams) write to these numbers, and close them.
        with open(os.devnull, "r+b") as nothing:
            for number in map(int, os.listdir("/proc/self/fd")):
                if number not in kept and number != nothing.fileno():
                    os.dup2(nothing.fileno(), number, inheritable=False)
        # As Python's own, they leave the numbers open when a rank has others in their place.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        exec(code, {"__name__": "__main__"})
    except SystemExit:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
