"""A script is rehearsed to its end in seconds: ``play_each([Play("train.py", ("--epochs", "14"))])`` -> its journal.

A training script's control flow is cheap, its arithmetic is dear. So the first micro-batches are real, and after them a
forward returns what it returned for inputs of these shapes, steps are recorded and not computed, and a loader hands
out its indices and repeats a batch of that length. What is counted is what the script itself would do.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Any, BinaryIO

import psutil

from rehearse._processes import cpu_seconds, interrupts_held, started_by
from rehearse.scripts.journal import Journal

GONE_SECONDS = 10.0
"""How long a rehearsal may wait until what it has killed is gone."""
IDLE_SECONDS = 60.0
"""Without any use of the CPU, after which a script waits for something that does not come."""
GRACE_SECONDS = 5.0
"""Of CPU time beyond its limit, after which it is told to end."""
MOST_FOR_THE_JOURNAL = 0.5
"""As a share of that limit: what it may then take to write down millions of events."""
POLL_SECONDS = 0.05
TERMINAL_SIZE = (24, 80)
"""Lines, and characters in each."""
END_OF_INPUT = b"\x04"
MOST_PRINTED = 20_000
"""Bytes of what a script has printed that are kept: the last ones."""
LOOK_SECONDS = 0.5
"""Between two looks at what it has used."""


@dataclass(frozen=True)
class Play:
    """What is asked of a process that rehearses a script, whose files stay as they are."""

    script: str | os.PathLike[str]
    arguments: tuple[str, ...] = ()
    seconds: float = 300.0
    ranks: int = 1
    rank: int = 0
    values: int = 0
    """Which way the outputs of networks are moved: 0, they stand still; 1, and -1 against that."""
    ends_at: int | None = None
    """An event behind which nothing is rehearsed."""
    kept: str | os.PathLike[str] | None = None
    """A folder of the caller's for all that is written, for a second life to find; else it goes with the process."""
    stage: str = "rehearse.scripts.stage"
    """The module that takes the script's process."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What only that module understands."""


@dataclass(frozen=True)
class Task:
    """What is to be rehearsed, as the stage is told."""

    script: str
    arguments: tuple[str, ...]
    folder: str
    """Where what the stage gives back is written to."""
    seconds: float
    """Of CPU time that the script may take."""
    rank: int = 0
    values: int = 0
    ends_at: int | None = None
    caller: int = 0
    """The process without which this one ends."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def given(cls) -> Task:
        """The task that this process was started with."""
        values = json.loads(sys.argv[1])
        return cls(**{**values, "arguments": tuple(values["arguments"])})

    def give_back(self, value: object) -> None:
        unfinished = Path(self.folder, "unfinished")
        unfinished.write_bytes(pickle.dumps(value))
        unfinished.rename(Path(self.folder, "given_back"))


def play_each(plays: Sequence[Play], *, others_seconds: Callable[[Journal], float] | None = None) -> list[Journal]:
    """The journals of several plays; ``others_seconds``: what those beside the first may take, by its journal."""
    journals = []
    for asked, (given_back, why_not, printed) in zip(
        plays, stage_each(plays, others_seconds=others_seconds), strict=True
    ):
        journal = given_back or Journal(rank=asked.rank, says=why_not)
        journal.printed = printed
        journals.append(journal)
    return journals


def stage_each(
    plays: Sequence[Play], *, at_once: int = 2, others_seconds: Callable[[Any], float] | None = None
) -> list[tuple[Any, str, str]]:
    """What each stage gave back; or None, and why it gave nothing back; and what the script has printed.

    They run side by side; an interrupt ends all of them. ``others_seconds``: see :func:`play_each`.
    """
    waiting = list(enumerate(plays))
    running: dict[int, _Playing] = {}
    done: dict[int, tuple[Any, str, str]] = {}
    most = math.inf
    with interrupts_held() as interrupts:
        try:
            while (waiting or running) and not interrupts:
                while waiting and len(running) < at_once:
                    number, asked = waiting.pop(0)
                    running[number] = _Playing(asked)
                time.sleep(POLL_SECONDS)
                for number, playing in list(running.items()):
                    if playing.has_ended(most):
                        del running[number]
                        done[number] = (playing.given_back, playing.why, playing.printed)
                        if number == 0 and others_seconds is not None and playing.given_back is not None:
                            most = others_seconds(playing.given_back)
        finally:
            for playing in running.values():
                playing.stop()
    return [done[number] for number in range(len(plays))]


class _Playing:
    """A rehearsal that goes on in its process."""

    def __init__(self, asked: Play) -> None:
        path = Path(asked.script).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"there is no script {os.fspath(asked.script)!r}: give the path of a Python file")
        self.asked = asked
        # Not below the one that is asked for, whose path may be too long for the sockets of workers.
        self.folder = Path(asked.kept or tempfile.mkdtemp(prefix="played-")).resolve()
        Path(self.folder, "given_back").unlink(missing_ok=True)
        self.output = self.folder / "output.txt"
        arguments = tuple(map(str, asked.arguments))
        told = (asked.seconds, asked.rank, asked.values, asked.ends_at, os.getpid(), dict(asked.options))
        task = Task(str(path), arguments, str(self.folder), *told)
        self.keyboard, screen = _terminal()
        with self.output.open("wb") as file:
            self.process = Popen(
                [sys.executable, "-m", asked.stage, json.dumps(asdict(task))],
                env=_environment(asked.ranks, asked.rank, self.folder),
                stdin=screen,
                stdout=file,
                stderr=STDOUT,
                start_new_session=True,
            )
        os.close(screen)
        self.used, self.looked = 0.0, time.monotonic()
        self.worked = self.looked
        """When it was last seen to have used some of the CPU."""
        self.told_to_end = False
        self.started: set[psutil.Process] = set()
        """What it was seen to have started, some of it in sessions of their own."""
        self.why = ""
        """Why it was ended, or gave nothing back."""
        self.given_back: Any = None
        self.printed = ""

    def has_ended(self, most: float) -> bool:
        """Whether it has, by itself or at its limit, which is at most so many seconds."""
        if self.process.poll() is not None:
            self.why = f"its process ended with exit code {self.process.returncode}"
            if self.told_to_end and self.process.returncode == -signal.SIGTERM:  # nothing of ours had taken that over
                self.why = f"nothing was rehearsed yet after {self.used:.1f} s of CPU time: give it more (seconds=)"
        elif time.monotonic() > self.looked + LOOK_SECONDS:
            self._look(min(most, self.asked.seconds))
        if self.why:
            self.stop()
        return bool(self.why)

    def _look(self, seconds: float) -> None:
        self.looked, used = time.monotonic(), cpu_seconds(self.process.pid)
        self.started.update(started_by(self.process.pid))
        if used > self.used + 0.01:
            self.used, self.worked = used, self.looked
        if self.looked > self.worked + IDLE_SECONDS:
            self.why = f"it waited for {IDLE_SECONDS:g} s without computing anything, as for another process"
            if hasattr(signal, "SIGUSR1"):
                self.process.send_signal(signal.SIGUSR1)  # it writes where it waits
                time.sleep(0.3)
        if self.used > seconds + GRACE_SECONDS and not self.told_to_end:
            self.process.send_signal(signal.SIGTERM)
            self.told_to_end = True
        if self.used > (1 + MOST_FOR_THE_JOURNAL) * seconds + 3 * GRACE_SECONDS:
            self.why = f"it did not end in {seconds:g} s of CPU time"

    def stop(self) -> None:
        """End its process, and those that it has started."""
        self.started.update(started_by(self.process.pid))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in self.started:
            with contextlib.suppress(psutil.Error):  # which knows a process by more than its number
                process.kill()
        self.process.wait()
        deadline = time.monotonic() + GONE_SECONDS
        while any(map(_lives, self.started)) and time.monotonic() < deadline:  # a busy machine may take a while
            time.sleep(0.01)
        self.keyboard.close()
        written = self.folder / "given_back"
        if written.exists():
            self.given_back = pickle.loads(written.read_bytes())
        self.printed = self.output.read_bytes()[-MOST_PRINTED:].decode("utf-8", errors="replace")
        if not self.asked.kept:
            shutil.rmtree(self.folder, ignore_errors=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _terminal() -> tuple[BinaryIO, int]:
    """Both ends of a terminal, 80 characters wide, whose size scripts ask for; nobody types, and what is read ends."""
    import termios  # which Windows lacks

    try:
        keyboard, screen = os.openpty()
    except OSError:  # a container may have none
        return open(os.devnull, "wb"), os.open(os.devnull, os.O_RDONLY)  # closed with the rehearsal
    termios.tcsetwinsize(screen, TERMINAL_SIZE)
    os.write(keyboard, END_OF_INPUT * 64)
    return os.fdopen(keyboard, "wb"), screen


def _environment(ranks: int, rank: int, folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    if ranks > 1:
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return environment
