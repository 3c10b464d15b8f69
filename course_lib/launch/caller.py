"""The calling process: it starts the ranks, waits for them, ends them, and words their errors."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import numbers
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from course_lib._arguments import int_of_at_least
from course_lib._words import plural
from course_lib.launch.ends import RankError, RankReport, RankResult, RankTimeout, readable_places
from course_lib.launch.rank import Failure, Frame, as_text, output_path, rank_main
from course_lib.launch.server import hidden_main, start_context
from course_lib.launch.stacks import stack_by_signal
from course_lib.launch.travel import pack_call, pack_surroundings, unpack_exception, unpack_value
from course_lib.launch.undisturbed import LOOK_SECONDS, interrupts_kept_from_children, undisturbed

START_SECONDS = 120.0
"""How long a rank may take to start; the ``timeout`` of a call counts from then on."""
GRACE_SECONDS = 0.5
"""How long the other ranks may still report a failure of their own after the first."""
NOTICE_SECONDS = 0.15
"""How long the death of a rank may have gone unnoticed, while other ranks already complain of it."""
STACK_SECONDS = 1.0
"""How long a rank may take to say where it is."""
END_SECONDS = 2.0
"""How long all ranks together may take to end by themselves after they returned (workers, communicators)."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 60.0,
    backend: str = "auto",
    start_method: str | None = None,
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
        start_method: ``"forkserver"`` (the default on Linux: the first call starts the server, unless ``warm_up`` has,
            and each later one takes tenths of a second) or ``"spawn"`` (elsewhere: seconds for each call).

    Raises:
        ValueError: An argument is out of its range, or ``fn`` or ``args`` cannot be sent: the message names the part.
        RankError: A rank raised or died; the others were stopped.
        RankTimeout: A rank did not return in time.
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function of the rank, got {fn!r}")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise ValueError(
            f"fn must return its result: {getattr(fn, '__name__', fn)!r} is a coroutine or generator function"
        )
    world_size = int_of_at_least(1, "world_size", world_size)
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple of what fn takes after the rank, got {args!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    backend, hide_gpus = _choose_backend(backend, world_size)
    surroundings, payload = pack_surroundings(hide_gpus), pack_call(fn, args)

    call = _Call(world_size, backend, start_method, float(timeout), surroundings, payload)
    return [_unpacked(result) for result in undisturbed(call.run, call.stop)]


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


def _free_port() -> int:
    # For whoever asks for MASTER_PORT in a rank; the group itself meets in a file.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Stopped(BaseException):
    """The caller was interrupted, and waits no longer."""


@dataclass
class _Call:
    """One call of `run_ranks`, from its first process to its last."""

    world_size: int
    backend: str
    start_method: str | None
    timeout: float
    surroundings: bytes
    payload: bytes
    stopped: bool = False

    def stop(self) -> None:
        self.stopped = True

    def run(self) -> list[RankResult]:
        """The results, with their values as they were sent."""
        context = start_context(self.start_method)
        port = _free_port()
        # Made by the ranks, which remove it where this process was killed: until there is one, nobody could.
        folder = os.path.join(tempfile.gettempdir(), f"run_ranks-{secrets.token_hex(8)}")
        ranks: list[_Rank] = []
        try:
            for number in range(self.world_size):
                ranks.append(_Rank(number, folder))
                ranks[-1].start(context, self.world_size, self.backend, port)
                self._go_on()
            for rank in ranks:
                rank.send(self.surroundings, self.payload)
                self._go_on()
            self._wait_for_all(ranks)
            results = [rank.result() for rank in ranks]
            shutil.rmtree(folder, ignore_errors=True)
            _let_end(ranks)
            return results
        finally:
            # Ahead of the ranks' end, too: if this process is killed between the two, nobody is left to remove it.
            shutil.rmtree(folder, ignore_errors=True)
            _kill(ranks)
            shutil.rmtree(folder, ignore_errors=True)

    def _go_on(self) -> None:
        if self.stopped:
            raise _Stopped

    def _wait_for_all(self, ranks: list[_Rank]) -> None:
        """Return when every rank has returned; raise when one failed or time is up."""
        deadline = time.monotonic() + START_SECONDS
        started = False
        while not all(rank.settled for rank in ranks):
            if not started and all(rank.ready for rank in ranks):
                started, deadline = True, time.monotonic() + self.timeout
            _listen(ranks, min(deadline, time.monotonic() + LOOK_SECONDS))
            self._go_on()
            if any(rank.failure for rank in ranks):
                _raise_rank_error(ranks)
            if time.monotonic() >= deadline:
                _collect_stacks(ranks)
                limit = f"return within {self.timeout:g} s" if started else f"start within {START_SECONDS:g} s"
                late = [rank.rank for rank in ranks if not rank.settled]
                reports = [rank.report() for rank in ranks]
                raise RankTimeout(f"{_named(late)} of {len(ranks)} did not {limit}", reports)
        if any(rank.failure for rank in ranks):
            _raise_rank_error(ranks)


class _Rank:
    """The caller's end of one rank: its process, its pipe, and what came through it."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank = rank
        self.folder = folder
        self.process: Any = None
        self.ready = False
        self.returned: tuple[bytes, float] | None = None
        self.failure: Failure | None = None
        self.stack: tuple[Frame, ...] | None = None
        self.connection, self._rank_end = multiprocessing.Pipe()

    def start(self, context: Any, world_size: int, backend: str, port: int) -> None:
        self.process = context.Process(
            target=rank_main,
            args=(self.rank, world_size, self._rank_end, self.folder, os.getpid(), backend, port),
            name=f"rank {self.rank}",
        )
        with hidden_main(), interrupts_kept_from_children():
            self.process.start()
        self._rank_end.close()

    def send(self, surroundings: bytes, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # a rank that has died since is reported as that
            self.connection.send_bytes(surroundings)
            self.connection.send_bytes(payload)

    def command(self, word: str) -> None:
        """``"stack"`` asks where the rank is, ``"end"`` lets it end."""
        with contextlib.suppress(OSError):
            self.connection.send(word)

    @property
    def settled(self) -> bool:
        return self.returned is not None or self.failure is not None

    def receive(self) -> None:
        """Take every message that has arrived; a closed pipe or a dead process without a result is a failure."""
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                kind, content = self.connection.recv()
                if kind == "ready":
                    self.ready = True
                elif kind == "returned":
                    self.returned = content
                elif kind == "failed":
                    self.failure = content
                elif kind == "stack":
                    self.stack = content
        if not self.settled and not self.process.is_alive():
            code = self.process.exitcode
            died = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
            # The others notice its closed connections within milliseconds: their failures are consequences.
            self.failure = Failure(time.monotonic() - NOTICE_SECONDS, died)

    def result(self) -> RankResult:
        assert self.returned is not None
        content, seconds = self.returned
        return RankResult(self.rank, content, self.output("out"), self.output("err"), seconds)

    def report(self) -> RankReport:
        error, details = "", ""
        frames: tuple[Frame, ...] = ()
        if self.failure is not None:
            state, error = self.failure.state, self.failure.error
            details, frames = self.failure.traceback, self.failure.frames
        elif self.returned is not None:
            state = "had returned"
        else:
            file = output_path(self.folder, self.rank, "stack")
            state, frames = "was running", self.stack or stack_by_signal(self.process.pid, file)
            details = as_text(frames)
            if self.stack is None:
                details += "It did not answer: it is stopped, or native code holds the interpreter lock.\n"
        functions = tuple(name for _, _, name in frames)
        details = readable_places(details)
        return RankReport(self.rank, state, error, details, functions, self.output("out"), self.output("err"))

    def output(self, stream: str) -> str:
        path = output_path(self.folder, self.rank, stream)
        return path.read_bytes().decode("utf-8", errors="replace") if path.exists() else ""

    def kill(self) -> None:
        """End the rank and every process of its group."""
        if self.process is not None and self.process.pid is not None:
            self.process.kill()  # first, so that it cannot make its group after that has been looked for
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)

    def forget(self) -> None:
        if self.process is not None and self.process.pid is not None:
            self.process.join(END_SECONDS)
            with contextlib.suppress(ValueError):
                self.process.close()
        self.connection.close()
        self._rank_end.close()


def _unpacked(result: RankResult) -> RankResult:
    try:
        return replace(result, value=unpack_value(result.value))
    except Exception as error:
        raise RankError(f"rank {result.rank} returned what cannot be read here: {error!r}", []) from error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _listen(ranks: list[_Rank], deadline: float) -> None:
    """Wait until an unsettled rank says something, dies, or the deadline comes."""
    sources = [source for rank in ranks if not rank.settled for source in (rank.connection, rank.process.sentinel)]
    wait(sources, max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        if not rank.settled:
            rank.receive()


def _raise_rank_error(ranks: list[_Rank]) -> NoReturn:
    grace = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < grace and not all(rank.settled for rank in ranks):
        _listen(ranks, grace)
    _collect_stacks(ranks)
    failures = [(rank.failure, rank) for rank in ranks if rank.failure]
    failures.sort(key=lambda entry: entry[0].time)
    failed = [rank for _, rank in failures]
    reports = [rank.report() for rank in [*failed, *(rank for rank in ranks if not rank.failure)]]
    names = _named([rank.rank for rank in failed])
    summary = f"{names} of {len(ranks)} failed; first: {reports[0].headline}"
    raise RankError(summary, reports) from unpack_exception(failures[0][0].exception)


def _collect_stacks(ranks: list[_Rank]) -> None:
    running = [rank for rank in ranks if not rank.settled]
    for rank in running:
        rank.command("stack")
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline and any(rank.stack is None and not rank.settled for rank in running):
        _listen(running, deadline)


def _named(ranks: list[int]) -> str:
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"


def _let_end(ranks: list[_Rank]) -> None:
    """Give all ranks together the time to end by themselves: workers, communicators."""
    for rank in ranks:
        rank.command("end")
    deadline = time.monotonic() + END_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.forget()
