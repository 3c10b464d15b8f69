"""Play a script through to its end in seconds: ``play("train.py", ["--epochs", "14"])`` -> its journal.

A training script's control flow is cheap, its arithmetic is dear. So the first micro-batches are real, and after them a
forward returns what it returned for inputs of these shapes, steps are recorded and not computed, and a loader hands
out its indices and repeats a batch of that length. What is counted is what the script itself would do.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from course_lib.timelapse.journal import Journal

IDLE_SECONDS = 60.0
"""Without any use of the CPU, after which a script waits for something that does not come."""
GRACE_SECONDS = 5.0
"""Of CPU time that it may take to write the journal, once it is told to end."""
POLL_SECONDS = 0.05


def play(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    seconds: float = 300.0,
    ranks: int = 1,
    rank: int = 0,
    flipped: str = "",
    folder: str | os.PathLike[str] | None = None,
) -> Journal:
    """The journal of a script that is played in a process of its own.

    Args:
        script: The path of the script; it stays as it is, and so do the files that it would write.
        arguments: The script's own.
        seconds: Of CPU time that the play may take; what was played until then is in the journal.
        ranks: How many processes the run has, of which one is played; for a script that torchrun starts.
        rank: Which of them is played.
        flipped: A line that compares a value, ``"train.py:57"``, and answers the other way round.
        folder: Where the script's output is kept; by default a temporary one, which stays. The files that it writes
            are gone with the play.

    Raises:
        FileNotFoundError: There is no such script.
    """
    [journal] = play_each([Play(script, tuple(arguments), seconds, ranks, rank, flipped, folder)])
    return journal


@dataclass(frozen=True)
class Play:
    """What :func:`play` is asked for."""

    script: str | os.PathLike[str]
    arguments: tuple[str, ...] = ()
    seconds: float = 300.0
    ranks: int = 1
    rank: int = 0
    flipped: str = ""
    folder: str | os.PathLike[str] | None = None


def play_each(plays: Sequence[Play], *, at_once: int = 2) -> list[Journal]:
    """The journals of several plays, which run side by side; an interrupt ends all of them."""
    waiting = list(enumerate(plays))
    running: dict[int, _Playing] = {}
    journals: dict[int, Journal] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, asked = waiting.pop(0)
                running[number] = _Playing(asked)
            time.sleep(POLL_SECONDS)
            for number, playing in list(running.items()):
                if playing.has_ended():
                    del running[number]
                    journals[number] = playing.journal()
    finally:
        for playing in running.values():
            playing.stop()
    return [journals[number] for number in range(len(plays))]


@dataclass(frozen=True)
class Task:
    """What is to be played, and where."""

    script: str
    arguments: tuple[str, ...]
    folder: str
    """Where the journal is written to."""
    seconds: float
    """Of CPU time that the script may take."""
    rank: int = 0
    flipped: str = ""
    """The line that answers the other way round."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class _Playing:
    """A play that goes on in its process."""

    def __init__(self, asked: Play) -> None:
        path = Path(asked.script).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"there is no script {os.fspath(asked.script)!r}: give the path of a Python file")
        self.asked = asked
        kept = Path(asked.folder or tempfile.mkdtemp(prefix="timelapse-")).resolve()
        kept.mkdir(parents=True, exist_ok=True)
        self.output = kept / "output.txt"
        # Not in the other one, whose path may be too long for the sockets of workers.
        self.folder = Path(tempfile.mkdtemp(prefix="played-")).resolve()
        arguments = tuple(map(str, asked.arguments))
        task = Task(str(path), arguments, str(self.folder), asked.seconds, asked.rank, asked.flipped)
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "course_lib.timelapse.stage", task.to_json()],
                env=_environment(asked.ranks, asked.rank, self.folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.used, self.seen, self.since = 0.0, 0.0, time.monotonic()
        self.told = False
        """Whether it was told to end."""
        self.why = ""
        """Why it was ended."""
        self._journal: Journal | None = None

    def has_ended(self) -> bool:
        if self.process.poll() is not None:
            self.stop()  # what it has started, and left
            return True
        now = _cpu_seconds(self.process.pid)
        if abs(now - self.seen) > 0.01:
            self.used += max(0.0, now - self.seen)  # less: a child has ended
            self.seen, self.since = now, time.monotonic()
        if time.monotonic() - self.since > IDLE_SECONDS:
            self.why = f"it waited for {IDLE_SECONDS:g} s without computing anything, as for another process"
            if hasattr(signal, "SIGUSR1"):
                self.process.send_signal(signal.SIGUSR1)  # it writes where it waits
                time.sleep(0.3)
        if self.used > self.asked.seconds + GRACE_SECONDS and not self.told:
            self.process.send_signal(signal.SIGTERM)
            self.told = True
        if self.used > self.asked.seconds + 3 * GRACE_SECONDS:
            self.why = f"it did not end in {self.asked.seconds:g} s of CPU time"
        if self.why:
            self.stop()
        return bool(self.why)

    def stop(self) -> None:
        """End its process, and those that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        written = self.folder / "journal"
        if written.exists():
            self._journal = pickle.loads(written.read_bytes())
        shutil.rmtree(self.folder, ignore_errors=True)

    def journal(self) -> Journal:
        ended = f"its process ended with exit code {self.process.returncode}"
        journal = self._journal or Journal(rank=self.asked.rank, says=self.why or ended)
        journal.output = str(self.output)
        return journal


def _environment(ranks: int, rank: int, folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    if ranks > 1:
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return environment


def _cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
    return total
