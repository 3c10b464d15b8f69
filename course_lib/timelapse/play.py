"""Play a script through to its end in seconds: ``play("train.py", ["--epochs", "14"])`` -> its journal.

A training script's control flow is cheap, its arithmetic is dear. So the first micro-batches are real, and after them a
forward returns what it returned for inputs of these shapes, steps are recorded and not computed, and a loader hands
out its indices and repeats a batch of that length. What is counted is what the script itself would do.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from course_lib.timelapse.journal import SILENT, Journal
from course_lib.timelapse.stage import Task

IDLE_SECONDS = 20.0
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
        folder: Where the script's files and its output land; by default a temporary one, which stays.

    Raises:
        FileNotFoundError: There is no such script.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {os.fspath(script)!r}: give the path of a Python file")
    kept = Path(folder or tempfile.mkdtemp(prefix="timelapse-"))
    work = kept / "files"
    work.mkdir(parents=True, exist_ok=True)
    task = Task(str(path), tuple(map(str, arguments)), str(kept), seconds, rank, flipped)
    output = kept / "output.txt"
    command = [sys.executable, "-m", "course_lib.timelapse.stage", task.to_json()]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=_environment(ranks, rank, kept),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            waited = _wait(process, seconds)
        finally:
            _end(process)
    written = kept / "journal"
    journal = pickle.loads(written.read_bytes()) if written.exists() else Journal(rank=rank)
    if not written.exists():
        journal.says = waited or f"its process ended with exit code {process.returncode}"
    journal.output = str(output)
    return journal


def _environment(ranks: int, rank: int, folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    if ranks > 1:
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return environment


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for the end of a play; why it was ended, where it did not end by itself."""
    used, since, asked = 0.0, time.monotonic(), False
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        now = _cpu_seconds(process.pid)
        if now > used + 0.01:
            used, since = now, time.monotonic()
        if time.monotonic() - since > IDLE_SECONDS:
            return f"it waited for {IDLE_SECONDS:g} s without computing anything, as for an input or another process"
        if used > seconds + GRACE_SECONDS and not asked:
            process.send_signal(signal.SIGTERM)
            asked = True
        if used > seconds + 2 * GRACE_SECONDS:
            return f"it did not end in {seconds:g} s of CPU time"
    return ""


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


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failed_silently(journal: Journal) -> bool:
    """Whether the play ended without a journal."""
    return journal.end == SILENT
