"""SIGINT and SIGTERM at random moments of `run_ranks`: the caller ends at once, and no process of its ranks is left.

A signal is lost, or leaves a rank, only where it arrives between two particular instructions. So it is sent thousands
of times: at moments spread over a call's life, and crowded where a call begins.

    python -m tests.hunt.interrupts --moments 2000 --seed 1

Four kinds of caller get one. A `script` calls again and again, and shares a warm server; a `first` caller starts a
server of its own; a `terminal` does so too, and its whole group gets the signal, as from Ctrl-C; a `kernel` is a
notebook's, which lives on: there the cell ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import queue
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from course_lib.launch import RankError, run_ranks, server, warm_up

LOST = 30.0
"""Seconds after which a signal counts as lost, or a process as left; a busy machine needs a few."""
LEAN = ("torch", "torch.distributed", "course_lib.launch")
"""What a server loads here: these ranks need no Lightning."""
ENDS = ("return", "raise", "hang", "hold", "mixed")
"""How a rank's function ends; `hold` holds the interpreter's lock for ever, and `mixed` is the first three in turn."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Moment:
    """One signal: who gets it, in what, and when."""

    caller: str
    end: str
    ranks: int
    number: signal.Signals
    handled: bool
    """SIGTERM raises SystemExit in the caller, as many a framework has it."""
    delay: float
    """Seconds from the caller's first call."""

    def __str__(self) -> str:
        handled = ", handled" if self.handled else ""
        return f"{self.caller}: {self.number.name}{handled} {self.delay:.4f} s into {self.ranks} ranks that {self.end}"


@dataclass(frozen=True)
class Outcome:
    """Seconds from the signal until the caller had ended and until nothing was left; inf where that did not come."""

    ended: float
    gone: float
    left: list[str]
    noise: str
    """What was written to stderr beside one traceback of the caller's own, and folders that were left."""

    @property
    def right(self) -> bool:
        return max(self.ended, self.gone) < LOST and not self.noise


def draw_moments(seed: int, count: int, kernels: bool = True) -> Iterator[Moment]:
    """Mostly scripts, as they cost the least; every tenth caller starts a server, every fifth is a kernel."""
    draw = random.Random(seed)
    for i in range(count):
        caller = "first" if i % 20 == 5 else "terminal" if i % 20 == 15 else "script"
        if kernels and i % 5 == 2:
            caller = "kernel"
        number = signal.SIGINT if caller in ("kernel", "terminal") else draw.choice([signal.SIGINT, signal.SIGTERM])
        life = {"script": 0.6, "kernel": 0.6, "first": 4.0, "terminal": 4.0}[caller]
        delay = draw.uniform(0, life) if draw.random() < 0.7 else draw.uniform(0, 0.05)
        handled = number == signal.SIGTERM and draw.random() < 0.5
        yield Moment(caller, draw.choice(ENDS), draw.choice([1, 2]), number, handled, delay)


def play(rank: int, end: str) -> int:
    """What a rank does."""
    if end == "raise":
        raise ValueError(f"rank {rank} raises")
    if end == "hang":
        time.sleep(600)
    if end == "hold":
        re.match(r"(a+)+$", "a" * 60 + "b")
    dist.barrier()
    return rank


def call_again_and_again(end: str, ranks: int) -> None:
    for turn in range(10_000):
        with contextlib.suppress(RankError):
            run_ranks(play, ranks, args=(("return", "raise", "hang")[turn % 3] if end == "mixed" else end,))


class Callers:
    """Forks the callers, and looks for what they leave; orphans become children of this process."""

    def __init__(self) -> None:
        server.PRELOAD = LEAN
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        # The callers' own temporary folder: those of other processes would be taken for left ones.
        get_temp_dir()  # multiprocessing's, which it removes when this process ends
        self._folder = tempfile.mkdtemp(prefix="interrupts-")
        self._before = os.environ.get("TMPDIR"), tempfile.tempdir
        os.environ["TMPDIR"] = tempfile.tempdir = self._folder
        self._pid = os.getpid()
        self._kernel: Any = None
        self._client: Any = None
        self.known: set[int] = set()

    def close(self) -> None:
        if self._kernel is not None:
            self._end_kernel()
        if os.getpid() != self._pid:
            return  # a caller, which comes here as it is a fork of this process
        variable, tempfile.tempdir = self._before
        del os.environ["TMPDIR"]
        os.environ |= {} if variable is None else {"TMPDIR": variable}
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_kernel(self) -> None:
        self._client.stop_channels()
        self._kernel.shutdown_kernel(now=True)
        self._kernel = None

    def try_at(self, moment: Moment) -> Outcome:
        try:
            return self._in_kernel(moment) if moment.caller == "kernel" else self._in_process(moment)
        finally:
            for process in self._left():
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def _have_server(self) -> None:
        """A caller that is killed while it asks for a rank takes its server with it, and here they share one."""
        warm_up()
        if not self.known >= (children := {child.pid for child in psutil.Process().children()}):
            run_ranks(play, 1, args=("return",))
            self.known |= children

    def _in_process(self, moment: Moment) -> Outcome:
        self._have_server()
        with tempfile.TemporaryFile("w+") as told:
            begun, begins = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._become_caller(moment, told.fileno(), begins)
            os.close(begins)
            os.read(begun, 1)
            os.close(begun)
            time.sleep(moment.delay)
            sent = time.monotonic()
            (os.killpg if moment.caller == "terminal" else os.kill)(pid, moment.number)
            ended = _seconds_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, sent)
            if ended >= LOST:
                self.known.discard(pid)
            gone = _seconds_until(lambda: not self._left(), sent)
            told.seek(0)
            return Outcome(ended, gone, [_words(p) for p in self._left()], _noise(told.read()) + self._left_folders())

    def _become_caller(self, moment: Moment, told: int, begins: int) -> None:
        """It ends as a script does: by what is raised through its first line."""
        os.dup2(told, 2)
        os.setpgid(0, 0)
        if moment.caller != "script":  # that one uses the server that is its sibling
            server._forget_server()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _exit if moment.handled else signal.SIG_DFL)
        os.write(begins, b"x")
        os.close(begins)
        call_again_and_again(moment.end, moment.ranks)

    def _in_kernel(self, moment: Moment) -> Outcome:
        if self._kernel is None:
            self._start_kernel()
        # Without an end: ipykernel itself may die of an interrupt that comes just after a cell.
        self._client.execute(f"print('begun'); call_again_and_again('{moment.end}', {moment.ranks})")
        try:
            self._await_output("begun")
        except queue.Empty:
            os.kill(self._kernel_pid, signal.SIGUSR1)  # its stacks go to stderr
            time.sleep(1.0)
            self._end_kernel()
            return Outcome(float("inf"), float("inf"), [], "the kernel did not begin the cell")
        time.sleep(moment.delay)
        sent = time.monotonic()
        self._kernel.interrupt_kernel()
        replied = False
        with contextlib.suppress(queue.Empty):
            reply = self._client.get_shell_msg(timeout=LOST)["content"]
            replied = True
        ended = time.monotonic() - sent if replied else float("inf")
        gone = _seconds_until(lambda: not self._left(), sent)
        noise = self._left_folders()
        if replied and reply.get("ename") != "KeyboardInterrupt":
            noise += f"the cell ended otherwise: {reply}"
        outcome = Outcome(ended, gone, [_words(p) for p in self._left()], noise)
        if not replied:
            self._end_kernel()
        return outcome

    def _start_kernel(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self._kernel, self._client = start_new_kernel(kernel_name="python3")
        reply = self._client.execute_interactive(
            "import faulthandler, signal, sys\n"
            "faulthandler.register(signal.SIGUSR1, sys.__stderr__)\n"
            f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
            "from course_lib.launch import run_ranks, server\n"
            f"server.PRELOAD = {LEAN}\n"
            "from tests.hunt.interrupts import call_again_and_again, play\n"
            "run_ranks(play, 2, args=('return',))",
            timeout=120,
        )
        assert reply["content"]["status"] == "ok", reply
        self._kernel_pid = self._kernel.provisioner.pid

    def _await_output(self, text: str) -> None:
        while True:
            message = self._client.get_iopub_msg(timeout=LOST)
            if message["msg_type"] == "stream" and text in message["content"]["text"]:
                return

    def _left_folders(self) -> str:
        """The folders of ended calls; whatever has one ends before this is asked."""
        return "".join(f"{path} is left\n" for path in Path(self._folder).glob("run_ranks-*"))

    def _left(self) -> list[psutil.Process]:
        """Processes of ended calls: not this one's server and tracker, nor the kernel and its own two."""
        me = psutil.Process()
        known = set(self.known)
        if self._kernel is not None:
            with contextlib.suppress(psutil.Error):
                kernel = psutil.Process(self._kernel_pid)
                own = [child.pid for child in kernel.children()]
                # One server and one tracker; another is left over.
                known |= {kernel.pid, *own} if len(own) <= 2 else {kernel.pid}
        left = []
        for process in me.children(recursive=True):
            if process.pid in known:
                continue
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
                elif process.ppid() == me.pid:
                    os.waitpid(process.pid, os.WNOHANG)
        return left


def _exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _seconds_until(condition: Any, since: float) -> float:
    while not condition():
        if time.monotonic() - since > LOST:
            return float("inf")
        time.sleep(0.01)
    return time.monotonic() - since


def _words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} (child of {process.ppid()}, {process.status()}): {' '.join(process.cmdline())[:80]}"
    return str(process.pid)


def _noise(told: str) -> str:
    """The caller's own traceback is right, with what it was chained to; another, or an ignored exception, is not."""
    chained = told.count("During handling of the above") + told.count("was the direct cause of the following")
    return told if told.count("Traceback (most recent") > 1 + chained or "Exception ignored" in told else ""


def hunt(moments: Iterator[Moment]) -> list[tuple[Moment, Outcome]]:
    """Every moment with what came of it; what is wrong is printed as it is found."""
    callers, tried = Callers(), []
    try:
        # Kernels last: a process that is forked while there is one would shut it down when it exits.
        for moment in sorted(moments, key=lambda moment: moment.caller == "kernel"):
            tried.append((moment, callers.try_at(moment)))
            if not tried[-1][1].right:
                print(f"{len(tried)}. {moment}\n{tried[-1][1]}", flush=True)
    finally:
        callers.close()
    return tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument(
        "--no-kernels", action="store_true", help="leave out notebooks, which take the longest to start"
    )
    options = parser.parse_args()
    tried = hunt(draw_moments(options.seed, options.moments, kernels=not options.no_kernels))
    wrong = sum(not outcome.right for _, outcome in tried)
    print(f"seed {options.seed}: {len(tried)} signals, {wrong} wrong; seconds until the end:")
    for caller in Counter(moment.caller for moment, _ in tried):
        ended = sorted(outcome.ended for moment, outcome in tried if moment.caller == caller)
        gone = sorted(outcome.gone for moment, outcome in tried if moment.caller == caller)
        line = ", ".join(f"{share:.0%} {ended[int(share * (len(ended) - 1))]:.2f}" for share in (0.5, 0.9, 0.99, 1))
        print(f"  {caller:9} {len(ended):5}: {line}; nothing left after {gone[-1]:.2f}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
