"""The process of a rank: its group, its output, its stack when the caller asks, and its end with the caller's.

A thread listens to the caller while the function runs, so that a rank that hangs still answers. The caller may also be
killed, and no rank may outlive it: the thread sees to that, and a small guard process where the thread cannot run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from course_lib.launch.forks import wait_before_forks
from course_lib.launch.travel import enter_surroundings, pack_exception, pack_value, unpack_call
from course_lib.launch.undisturbed import ignore_interrupts

Frame = tuple[str, int | None, str]
"""File, line and function of a frame; the standard library's own class for it cannot always be pickled."""


@dataclass(frozen=True)
class Failure:
    """How a rank failed, as it is sent to the caller."""

    time: float
    """On the clock that all processes of a machine share."""
    state: str
    error: str = ""
    traceback: str = ""
    frames: tuple[Frame, ...] = ()
    exception: bytes | None = None


def rank_main(
    rank: int, world_size: int, connection: Connection, folder: str, caller: int, backend: str, port: int
) -> None:
    """Run one rank. The caller sends the surroundings and the function, and ``"end"`` when all ranks have returned."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a group of its own: its DataLoader workers end with it
    ignore_interrupts()  # the caller is interrupted, and ends the ranks
    guard = _start_guard(caller, folder)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _redirect_output(folder, rank)
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, open(output_path(folder, rank, "stack"), "wb"))  # noqa: SIM115
        surroundings, payload = connection.recv_bytes(), connection.recv_bytes()
    except (FileNotFoundError, EOFError, ConnectionError):
        _end_without_caller(folder)
    speaking = threading.Lock()

    def say(kind: str, content: Any = None) -> None:
        with speaking:
            connection.send((kind, content))

    let_end = threading.Event()
    threading.Thread(target=_obey, args=(connection, say, threading.get_ident(), let_end, folder), daemon=True).start()
    try:
        enter_surroundings(surroundings)
        _set_launcher_environment(rank, world_size, port)
        fn, args = unpack_call(payload)
        torch.set_num_threads(1)
        np.random.seed()  # noqa: NPY002 - a fork of the server would draw what every other one draws
        if backend == "nccl":
            torch.cuda.set_device(rank)
        wait_before_forks()
        say("ready")
        # This call's own timeout comes first; the group's is for what may be left behind.
        dist.init_process_group(
            backend, store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size,
            timeout=timedelta(days=1),
        )  # fmt: skip
        begin = time.perf_counter()
        value = fn(rank, *args)
        seconds = time.perf_counter() - begin
        _flush()
        say("returned", (pack_value(value), seconds))
    except BaseException as error:
        _flush()
        say("failed", _failure_of(error))
    # Stay until the caller knows how all ranks ended: a rank that leaves early breaks the others' connections,
    # and their complaints would hide the first cause.
    let_end.wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    if guard is not None:
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)


def _start_guard(caller: int, folder: str) -> int | None:
    """Fork a small process that ends the rank's group when the caller is gone, and return its pid.

    The thread that listens to the caller does that too, but native code can keep it from running.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    rank = os.getpid()
    if pid := os.fork():
        return pid
    try:
        with contextlib.suppress(ProcessLookupError):  # gone already
            select.select([os.pidfd_open(caller)], [], [])
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)  # first, so that it does not make the folder again
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.killpg(0, signal.SIGKILL)
    return None


def _obey(
    connection: Connection, say: Callable[..., None], main_thread: int, let_end: threading.Event, folder: str
) -> None:
    """Answer the caller while the function runs; if the caller is gone, clean up for it and end."""
    while True:
        try:
            command = connection.recv()
        except (EOFError, OSError):
            _end_without_caller(folder)
        if command == "end":
            let_end.set()
        else:
            stack = traceback.extract_stack(sys._current_frames()[main_thread])
            say("stack", _as_frames(_below_the_launcher(stack)))


def _end_without_caller(folder: str) -> NoReturn:
    """End this process and those of its group, with what the caller would have removed."""
    shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _redirect_output(folder: str, rank: int) -> None:
    for number, stream in ((1, "out"), (2, "err")):
        file = os.open(output_path(folder, rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # Unbuffered, so that what a rank printed before it was killed is there.
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), "utf-8", newline="", write_through=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), "utf-8", newline="", write_through=True)  # noqa: SIM115


def output_path(folder: str, rank: int, stream: str) -> Path:
    return Path(folder, f"rank{rank}.{stream}")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()


def _set_launcher_environment(rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="run_ranks",  # Lightning: somebody else made the processes
    )
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _failure_of(error: BaseException) -> Failure:
    told = traceback.TracebackException.from_exception(error)
    told.stack[:] = _below_the_launcher(told.stack)
    return Failure(
        time.monotonic(),
        "raised",
        error="".join(told.format_exception_only()).strip(),
        traceback="".join(told.format()),
        frames=_as_frames(told.stack),
        exception=pack_exception(error),
    )


def frames_of_dump(dump: str) -> tuple[Frame, ...]:
    """The frames of the function, out of what faulthandler wrote of all threads."""
    for thread in dump.split("\n\n"):
        found = re.findall(r'File "(.*)", line (\d+) in (.*)', thread)
        if any(name == rank_main.__name__ for *_, name in found):
            stack = [traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(found)]
            return _as_frames(_below_the_launcher(stack))
    return ()


def _below_the_launcher(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Leave out what stands above the function (the launcher, multiprocessing), and torch's logging wrapper."""
    frames = [frame for frame in stack if not frame.filename.endswith("c10d_logger.py")]
    for index in range(len(frames) - 1, -1, -1):
        if frames[index].filename == __file__ and frames[index].name == rank_main.__name__:
            return frames[index + 1 :]
    return frames


def _as_frames(stack: Iterable[traceback.FrameSummary]) -> tuple[Frame, ...]:
    return tuple((frame.filename, frame.lineno, frame.name) for frame in stack)


def as_text(frames: tuple[Frame, ...]) -> str:
    """The frames as a traceback shows them."""
    return "".join(traceback.format_list([traceback.FrameSummary(*frame) for frame in frames]))
