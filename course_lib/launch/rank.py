"""The process of a rank: its group, its output, its stack when it is asked for, and its end."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from course_lib._processes import end_with
from course_lib.launch.ends import RankReport, RankResult
from course_lib.launch.travel import Call, enter_surroundings, pack_exception, pack_value, unpack_call

FORKS_MAY_HANG = sys.version_info < (3, 11, 10)
"""A fork hangs where a thread of native code enters Python at this moment (python/cpython#112275). gloo's threads do so
at the end of a collective, which is where workers start."""
REST_SECONDS = 0.002
"""How long a fork waits there first: those threads are done in a millisecond."""


@dataclass(frozen=True)
class Failure:
    """How a rank failed."""

    time: float
    """On the clock that all processes of a machine share."""
    report: RankReport
    exception: bytes | None = None
    """What it raised, where that can travel."""


def rank_main(rank: int, call: Call, connection: Connection, folder: str, port: int) -> None:
    """Run one rank. It says ``"ready"``, then ``"returned"`` or ``"failed"``, and stays until it gets a word."""
    if hasattr(os, "killpg"):
        end_with(os.getppid(), Path(folder))
    _redirect_output(folder, rank)
    stack_file = open(output_path(folder, rank, "stack"), "wb")  # noqa: SIM115 - open as long as the process
    try:
        enter_surroundings(call.surroundings)
        _set_launcher_environment(rank, call.world_size, port)
        fn, args = unpack_call(call.payload)
        torch.set_num_threads(1)
        np.random.seed()  # noqa: NPY002 - a fork of the server would draw what every other one draws
        if call.backend == "nccl":
            torch.cuda.set_device(rank)
        if FORKS_MAY_HANG and hasattr(os, "register_at_fork"):
            os.register_at_fork(before=lambda: time.sleep(REST_SECONDS))
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, stack_file)
        else:  # Windows
            faulthandler.dump_traceback_later(min(call.timeout, 86_400.0), file=stack_file)
        connection.send(("ready", None))
        # This call's own timeout comes first; the group's is for what may be left behind.
        dist.init_process_group(
            call.backend, store=dist.FileStore(f"{folder}/store", call.world_size), rank=rank,
            world_size=call.world_size, timeout=timedelta(days=1),
        )  # fmt: skip
        begin = time.perf_counter()
        value = fn(rank, *args)
        seconds = time.perf_counter() - begin
        _flush()
        connection.send(("returned", RankResult(rank, pack_value(value), "", "", seconds)))
    except BaseException as error:
        _flush()
        connection.send(("failed", _failure_of(rank, error)))
    # Stay until it is known how all ranks ended: a rank that leaves early breaks the others' connections, and their
    # complaints would hide the first cause.
    connection.recv()
    if dist.is_initialized():
        dist.destroy_process_group()


def output_path(folder: str, rank: int, stream: str) -> Path:
    return Path(folder, f"rank{rank}.{stream}")


def _redirect_output(folder: str, rank: int) -> None:
    for number, stream in ((1, "out"), (2, "err")):
        file = os.open(output_path(folder, rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # Unbuffered, so that what a rank printed before it was killed is there.
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), "utf-8", newline="", write_through=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), "utf-8", newline="", write_through=True)  # noqa: SIM115


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


def _failure_of(rank: int, error: BaseException) -> Failure:
    told = traceback.TracebackException.from_exception(error)
    told.stack[:] = below_the_launcher(told.stack)
    line, functions = "".join(told.format_exception_only()).strip(), tuple(frame.name for frame in told.stack)
    report = RankReport(rank, "raised", line, "".join(told.format()), functions)
    return Failure(time.monotonic(), report, pack_exception(error))


def below_the_launcher(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Leave out what stands above the function (the launcher, multiprocessing), and torch's logging wrapper."""
    frames = [frame for frame in stack if not frame.filename.endswith("c10d_logger.py")]
    for index in range(len(frames) - 1, -1, -1):
        if frames[index].filename == __file__ and frames[index].name == rank_main.__name__:
            return frames[index + 1 :]
    return frames
