"""The calling process: it checks what it is given, asks for the ranks, and raises what came of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import numbers
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist

from course_lib._words import int_of_at_least
from course_lib.launch.ends import RankError, RankResult, readable_places
from course_lib.launch.server import connect, forks_ranks
from course_lib.launch.travel import Call, pack_call, pack_surroundings, unpack_exception
from course_lib.launch.watcher import Answer

LOOK_SECONDS = 0.2
"""How long the caller waits at once. A signal that comes between Python's look for signals and the system's wait is
seen only when that wait returns."""
END_SECONDS = 1.0
"""How long an interrupted caller stays to see its ranks end; they end all the same."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 60.0,
    backend: str = "auto",
) -> list[RankResult]:
    """Run ``fn(rank, *args)`` in ``world_size`` processes that share a process group, and return what each returned.

    Inside ``fn`` the group is initialised, the environment is that of the caller plus what a launcher sets (``RANK``,
    ``WORLD_SIZE`` …), so that a Lightning ``Trainer(devices=world_size, strategy="ddp")`` or a Fabric joins the
    group, and torch uses one CPU thread for each rank, as under torchrun. What the job has set that the caller itself
    runs in (``SLURM_…``, torchrun's, MPI's, a seed of Lightning's) is left out: the ranks are no part of that job.

    Args:
        fn: Any callable; what it and its classes need of a notebook's or script's globals travels along, as a copy.
        world_size: Number of ranks.
        args: Passed to ``fn`` after the rank.
        timeout: Seconds until ``fn`` must have returned on every rank.
        backend: ``"auto"``: NCCL with one GPU for each rank where there are enough GPUs, else gloo on CPUs, with the
            GPUs hidden from the ranks so that ``accelerator="auto"`` agrees. ``"nccl"``. ``"gloo"``: the GPUs stay
            visible, so that ranks may share one; a Trainer inside then takes them unless it has ``accelerator="cpu"``.

    Raises:
        ValueError: An argument is out of its range, or ``fn`` or ``args`` cannot be sent: the message names the part.
        RankError: A rank raised or died; the others were stopped.
        RankTimeout: A rank did not return in time.
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function of the rank, got {fn!r}")
    world_size = int_of_at_least(1, "world_size", world_size)
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple of what fn takes after the rank, got {args!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    backend, hide_gpus = _choose_backend(backend, world_size)
    surroundings, payload = pack_surroundings(hide_gpus), pack_call(fn, args)
    call = Call(world_size, backend, forks_ranks(), float(timeout), surroundings, payload, tempfile.gettempdir())
    answer = _ask(call)
    if answer.error is not None:
        reports = [replace(report, details=readable_places(report.details)) for report in answer.reports]
        raise answer.error(answer.summary, reports) from unpack_exception(answer.cause)
    return [_unpacked(result) for result in answer.results]


def _ask(call: Call) -> Answer:
    """Have a call carried out. Nothing here must be undone: the ranks end when the connection closes."""
    with connect(call.forked) as connection:
        try:
            connection.send(call)
            while not connection.poll(LOOK_SECONDS):
                pass
            answer = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError("the process that starts the ranks was killed, or could not start") from error
        finally:
            _wait_for_the_end(connection)
    if isinstance(answer, Exception):
        raise answer
    with contextlib.suppress(psutil.Error):  # it has closed all by now, and is gone at any moment
        if call.forked:
            psutil.Process(answer.watcher).wait(END_SECONDS)
    return answer  # type: ignore[no-any-return]


def _wait_for_the_end(connection: Connection) -> None:
    """Say that the call is over; wait until the last process of it has closed its end of the connection."""
    with contextlib.suppress(EOFError, OSError):
        connection.send("end")
        while connection.poll(END_SECONDS):
            connection.recv()
    multiprocessing.active_children()  # joins those that have ended


def _choose_backend(backend: str, world_size: int) -> tuple[str, bool]:
    """Return the backend and whether GPUs are to be hidden from the ranks."""
    if backend == "auto":
        gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
        return ("nccl", False) if gpus >= world_size else ("gloo", True)
    if backend not in ("gloo", "nccl"):
        raise ValueError(f'backend must be "auto", "gloo" or "nccl", got {backend!r}')
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        raise ValueError(
            f'backend="nccl" needs a GPU for each rank: {world_size} ranks, {torch.cuda.device_count()} GPUs; '
            'use "auto" or "gloo"'
        )
    return backend, False


def _unpacked(result: RankResult) -> RankResult:
    try:
        return replace(result, value=pickle.loads(result.value))
    except Exception as error:
        raise RankError(f"rank {result.rank} returned what cannot be read here: {error!r}", []) from error
