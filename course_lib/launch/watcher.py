"""The process that has the ranks of one call: it starts them, waits for them, says how each ended, and ends them.

It does nothing else: no Ctrl-C reaches it, no native code keeps it from its work, and whatever the ranks start is in
its process group. The rule: *the call is over when the caller's end of the connection closes,* whether the caller is
content, interrupted or killed; then the watcher kills its group, and itself with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from course_lib._words import plural
from course_lib.launch.ends import RankError, RankReport, RankResult, RankTimeout
from course_lib.launch.rank import Failure, below_the_launcher, output_path, rank_main
from course_lib.launch.travel import Call, enter_surroundings

START_SECONDS = 120.0
"""How long a rank may take to start; the ``timeout`` of a call counts from then on."""
GRACE_SECONDS = 0.5
"""How long the other ranks may still report a failure of their own after the first."""
NOTICE_SECONDS = 0.15
"""How long the death of a rank may have gone unnoticed, while other ranks already complain of it."""
STACK_SECONDS = 1.0
"""How long the ranks may take to write where they are."""
LOOK_SECONDS = 0.1
"""Between two looks at whether the ranks live. Where one is killed, its workers keep open what it had open."""
END_SECONDS = 2.0
"""How long all ranks together may take to end by themselves after they returned (workers, communicators)."""


@dataclass(frozen=True)
class Answer:
    """How a call ended."""

    results: list[RankResult] = field(default_factory=list)
    """With their values as they were sent; none where the call failed."""
    error: type[RankError] | None = None
    summary: str = ""
    reports: list[RankReport] = field(default_factory=list)
    cause: bytes | None = None
    """The exception that was the first cause, where it can travel."""
    watcher: int = field(default_factory=os.getpid)


def watch(connection: Connection) -> None:
    """Carry out the :class:`Call` that comes through the connection, send its :class:`Answer`, and end the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
    try:
        call = connection.recv()
        with tempfile.TemporaryDirectory(prefix="run_ranks-", dir=call.folder, ignore_cleanup_errors=True) as folder:
            answer = _run(call, folder, connection)
        connection.send(answer)
    except (EOFError, ConnectionError):
        pass  # the caller has left
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(error)
    finally:
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)


def _run(call: Call, folder: str, caller: Connection) -> Answer:
    enter_surroundings(call.surroundings)
    port = _free_port()
    ranks: list[_Rank] = []
    try:
        for number in range(call.world_size):
            ranks.append(_Rank(number, call, folder, port))
        late = _wait_for_all(ranks, call.timeout, caller)
        if any(rank.failure for rank in ranks):
            return _failed(ranks, caller)
        if late:
            return _late(ranks, late)
        results = [rank.result() for rank in ranks]
        _let_end(ranks)
        return Answer(results)
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join(END_SECONDS)


def _free_port() -> int:
    # For whoever asks for MASTER_PORT in a rank; the group itself meets in a file.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Rank:
    """The watcher's end of one rank: its process, its pipe, and what came through it."""

    def __init__(self, rank: int, call: Call, folder: str, port: int) -> None:
        self.rank = rank
        self.folder = folder
        self.ready = False
        self.returned: RankResult | None = None
        self.failure: Failure | None = None
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            context: Any = multiprocessing.get_context("fork" if call.forked else "spawn")
            arguments = (rank, call, theirs, folder, port)
            self.process = context.Process(target=rank_main, args=arguments, name=f"rank {rank}")
            self.process.start()

    @property
    def settled(self) -> bool:
        return self.returned is not None or self.failure is not None

    def receive(self) -> None:
        """Take every message that has arrived; a dead process without a result is a failure."""
        alive = self.process.is_alive()  # asked first: then its last words are there
        with contextlib.suppress(EOFError, OSError):
            while not self.settled and self.connection.poll():
                kind, content = self.connection.recv()
                if kind == "ready":
                    self.ready = True
                elif kind == "returned":
                    self.returned = content
                else:
                    self.failure = content
        if not self.settled and not alive:
            code = self.process.exitcode
            died = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
            # The others notice its closed connections within milliseconds: their failures are consequences.
            self.failure = Failure(time.monotonic() - NOTICE_SECONDS, RankReport(self.rank, died))

    def result(self) -> RankResult:
        assert self.returned is not None
        return replace(self.returned, stdout=self.output("out"), stderr=self.output("err"))

    def report(self) -> RankReport:
        if self.failure is not None:
            report = self.failure.report
        elif self.returned is not None:
            report = RankReport(self.rank, "had returned")
        else:
            stack = _main_thread(self.output("stack"))
            details = "".join(traceback.format_list(stack)) or "It did not answer: it is stopped."
            report = RankReport(self.rank, "was running", "", details, tuple(frame.name for frame in stack))
        return replace(report, stdout=self.output("out"), stderr=self.output("err"))

    def output(self, stream: str) -> str:
        path = output_path(self.folder, self.rank, stream)
        return path.read_bytes().decode("utf-8", errors="replace") if path.exists() else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _wait_for_all(ranks: list[_Rank], timeout: float, caller: Connection) -> str:
    """Return when every rank has returned or one failed; or, when time is up, what the others did not do."""
    deadline, started = time.monotonic() + START_SECONDS, False
    while not all(rank.returned for rank in ranks) and not any(rank.failure for rank in ranks):
        if not started and all(rank.ready for rank in ranks):
            deadline, started = time.monotonic() + timeout, True
        if time.monotonic() >= deadline:
            return f"return within {timeout:g} s" if started else f"start within {START_SECONDS:g} s"
        _listen(ranks, deadline, caller)
    return ""


def _listen(ranks: list[_Rank], deadline: float, caller: Connection) -> None:
    """Wait a moment for a rank to say something or die; an EOFError where the caller has left, or wants no more."""
    sources = [source for rank in ranks if not rank.settled for source in (rank.connection, rank.process.sentinel)]
    if caller in wait([caller, *sources], min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
        raise EOFError
    for rank in ranks:
        rank.receive()


def _failed(ranks: list[_Rank], caller: Connection) -> Answer:
    grace = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < grace and not all(rank.settled for rank in ranks):
        _listen(ranks, grace, caller)
    _let_write_stacks(ranks)
    failures = [(rank.failure, rank) for rank in ranks if rank.failure]
    failures.sort(key=lambda entry: entry[0].time)
    failed = [rank for _, rank in failures]
    reports = [rank.report() for rank in [*failed, *(rank for rank in ranks if not rank.failure)]]
    summary = f"{_named(failed)} of {len(ranks)} failed; first: {reports[0].headline}"
    return Answer([], RankError, summary, reports, failures[0][0].exception)


def _late(ranks: list[_Rank], what: str) -> Answer:
    _let_write_stacks(ranks)
    summary = f"{_named([rank for rank in ranks if not rank.settled])} of {len(ranks)} did not {what}"
    return Answer([], RankTimeout, summary, [rank.report() for rank in ranks])


def _named(ranks: list[_Rank]) -> str:
    return f"{plural(len(ranks), 'rank')} {', '.join(str(rank.rank) for rank in ranks)}"


def _let_write_stacks(ranks: list[_Rank]) -> None:
    """Let each rank that runs write its stack, which it does also where native code holds the interpreter lock."""
    running = [rank for rank in ranks if not rank.settled]
    for rank in running:
        if rank.ready and hasattr(signal, "SIGUSR1"):
            os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline and not all(_is_whole(rank.output("stack")) for rank in running):
        time.sleep(0.02)


def _is_whole(dump: str) -> bool:
    """Whether faulthandler has written the frames of the function; the main thread comes last, outermost frame last."""
    return f" in {rank_main.__name__}\n" in dump


def _main_thread(dump: str) -> list[traceback.FrameSummary]:
    """The frames of the function, at most the inner 100, in what faulthandler has written."""
    found = re.findall(r'File "(.*)", line (\d+) in (.*)', dump.rpartition("(most recent call first):")[2])
    return below_the_launcher(traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(found))


def _let_end(ranks: list[_Rank]) -> None:
    """Give all ranks together the time to end by themselves: workers, communicators."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.connection.send("end")
    deadline = time.monotonic() + END_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
