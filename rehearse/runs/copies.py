"""Trials run in a child process: whatever they do to the run, this process keeps it as it is.

The child is a fork, so that it has the very objects, and whatever it does to them stays with it. What it writes lands
in its temporary folder (see ``rehearse._own_files``). With its workers it ends when it has answered, when its time is
up (the CPU's, so that other processes count for nothing), when it does nothing any more, or with this process.
Where this process cannot be forked (a GPU that is in use, Windows), copies of the objects are sent to another, which is
forked in its place; where that one cannot be forked either (a model that is on the GPU), each trial has a process that
it is sent to. Where somebody watches and it takes longer than a few seconds, a line says what is being tried.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from course_lib._processes import end_with, fork_server
from course_lib.launch import RankError, RankTimeout, run_ranks
from rehearse._own_files import write_only_below
from rehearse._processes import cpu_seconds, is_ready, seconds_without_a_core
from rehearse.report import LIBRARY, in_a_line

AT_ONCE = 2
"""How many trials run at the same time."""
SENT_SECONDS = 5.0
"""What a process that trials are sent to may take beyond theirs, to load what they need."""


@dataclass(frozen=True)
class Answer:
    """What a trial returned, or why it did not return."""

    value: Any = None
    error: str = ""
    """Empty where the trial returned."""
    refused: str = ""
    """Where the run is refused by Lightning or by course_lib, in a sentence of theirs: that sentence."""
    timed_out: bool = False
    """Whether it was ended, for it took too long or did nothing any more."""
    hung: bool = False
    """Whether it was ended because it did nothing any more."""


def try_on_copies(
    trials: Sequence[Callable[[Path], Any]], *, seconds: float, folder: Path | None = None
) -> list[Answer]:
    """Run each trial in a child process of its own, with a temporary folder, and return their answers in order.

    ``seconds`` is the CPU time that each may take, with its workers. What they return is pickled. ``folder`` is theirs
    instead, and stays.
    """
    with contextlib.ExitStack() as stack:
        folders = [folder or Path(stack.enter_context(temporary_folder())) for _ in trials]
        placed = list(zip(trials, folders, strict=True))
        return _forked(placed, seconds) if _can_be_forked() else _sent(placed, seconds)


def _can_be_forked() -> bool:
    return hasattr(os, "fork") and not torch.cuda.is_initialized()


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rehearse-", ignore_cleanup_errors=True)


# ------------------------------------------------------------------------------------------------------- forks


Trials = list[tuple[Callable[[Path], Any], Path]]
"""Each with its folder."""


IDLE_SECONDS = 8.0
IDLE_SHARE = 0.03
"""Who asks for less of a core for so long waits for something that does not come. To be ready and to have no core, as
on a busy machine, is to ask for one."""
MOST_TIMES = 30
"""The wall clock's time in multiples of the CPU's limit: the end of what does a little now and then."""
LOOK_SECONDS = 0.5
"""Between two looks at what a trial has used."""


@dataclass
class _Child:
    pid: int
    pipe: int
    seconds: float
    answer: bytes = b""
    began: float = field(default_factory=time.monotonic)
    used: float = 0.0
    """CPU time, with that of its workers."""
    waited: float = 0.0
    """For a core, as long as its threads live."""
    asked: float = 0.0
    """Seconds for which it used a core, or was ready to and had none."""
    watched: float = 0.0
    """Seconds between looks; where this process has no core itself, they are far apart and count as near ones."""
    worked: tuple[float, float] = (0.0, 0.0)
    """How long it had been watched when it was last seen to work, and for how long it had asked for a core by then."""
    looked: float = 0.0

    def over(self) -> Answer | None:
        """The answer of a trial whose time is up; None while it is not."""
        now = time.monotonic() - self.began
        if now < self.looked + min(LOOK_SECONDS, self.seconds / 2):
            return None
        idle = min(IDLE_SECONDS, self.seconds)
        used, waited = max(self.used, cpu_seconds(self.pid)), seconds_without_a_core(self.pid)
        self.asked += used - self.used + max(0.0, waited - self.waited)  # it is less where a thread has ended
        self.watched += min(now - self.looked, 2 * LOOK_SECONDS)
        self.looked, self.used, self.waited = now, used, waited
        if self.asked - self.worked[1] > IDLE_SHARE * idle or is_ready(self.pid):
            self.has_worked()
        if self.used >= self.seconds or now >= MOST_TIMES * self.seconds:
            return Answer(error=f"it did not finish in {self.seconds:g} s", timed_out=True)
        if self.watched - self.worked[0] >= idle:
            return Answer(error=f"it did nothing for {idle:g} s", timed_out=True, hung=True)
        return None

    def has_worked(self) -> None:
        self.worked = self.watched, self.asked


def _forked(trials: Trials, seconds: float) -> list[Answer]:
    waiting = list(enumerate(trials))
    running: dict[int, _Child] = {}
    answers = [Answer(error="was not started")] * len(trials)
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, (trial, folder) = waiting.pop(0)
                running[number] = _fork(trial, folder, seconds)
            pause = min(LOOK_SECONDS, seconds / 4)
            readable, _, _ = select.select([child.pipe for child in running.values()], [], [], pause)
            now_trying()
            for number, child in list(running.items()):
                done = child.pipe in readable and not _read(child)
                ended = None if done else child.over()
                if done or ended:
                    del running[number]
                    code = _end(child)
                    answers[number] = ended or _answer_of(child, code)
    finally:
        for child in running.values():
            _end(child)
    return answers


def _fork(trial: Callable[[Path], Any], folder: Path, seconds: float) -> _Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    generator, parent = random.getstate(), os.getpid()
    with warnings.catch_warnings():
        # Python warns of forks where there are threads; the child uses none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        random.setstate(generator)  # Python seeds it again in a child
        _be_the_child(trial, folder, writing, parent)
    os.close(writing)
    return _Child(pid, reading, seconds)


def _be_the_child(trial: Callable[[Path], Any], folder: Path, pipe: int, parent: int) -> NoReturn:
    # Never back into the caller's code: that would run twice.
    try:
        os.setsid()  # its workers end with it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        end_with(parent)
        if server := fork_server():
            server.__init__()  # it would serve the parent alone
        _hide_gpus()
        torch.set_num_threads(1)  # the pool of threads was not forked
        with _silent():
            answer = pickle.dumps(_answered(trial, folder))
        with os.fdopen(pipe, "wb") as file:
            file.write(answer)
    finally:
        os.killpg(0, signal.SIGKILL)  # workers that live on would keep the pipe open
        os._exit(1)


def _hide_gpus() -> None:
    """See no GPU: a fork cannot use one where its parent has asked for one, and this one's run is on the CPU."""
    for module in (torch.cuda, torch.accelerator):
        vars(module).update(is_available=lambda: False, device_count=lambda: 0)


def _read(child: _Child) -> bool:
    """Take what has come; False where the child has closed its end."""
    piece = os.read(child.pipe, 1 << 20)
    child.answer += piece
    child.has_worked()  # it may have waited for this process to read
    return bool(piece)


def _end(child: _Child) -> int:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    os.close(child.pipe)
    with contextlib.suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    return 0


def _answer_of(child: _Child, code: int) -> Answer:
    if not child.answer:
        return Answer(error=f"its process ended without an answer (exit code {code})")
    answer: Answer = pickle.loads(child.answer)
    return answer


# ------------------------------------------------------------------------------------------------ copies that are sent


def _sent(trials: Trials, seconds: float) -> list[Answer]:
    together = _tried_elsewhere(trials, seconds) if hasattr(os, "fork") else []
    return together or [answer for trial in trials for answer in _tried_elsewhere([trial], seconds)]


def _tried_elsewhere(trials: Trials, seconds: float) -> list[Answer]:
    """The answers of another process; none where it would have to be forked for several, and cannot be."""

    def on_its_rank(rank: int) -> list[Answer]:
        dist.destroy_process_group()
        if _can_be_forked():
            return _forked(trials, seconds)
        if len(trials) > 1:
            return []
        [(trial, folder)] = trials
        with _silent():
            return [_answered(trial, folder)]

    try:
        # Where several can be forked there, each ends by its own limits.
        timeout = seconds * len(trials) * (MOST_TIMES if len(trials) > 1 else 1) + SENT_SECONDS
        answers: list[Answer] = run_ranks(on_its_rank, 1, timeout=timeout, backend="gloo")[0].value
    except RankTimeout:
        return [Answer(error=f"it did not finish in {seconds:g} s", timed_out=True)] * len(trials)
    except RankError as error:
        return [Answer(error=f"its process ended: {str(error).splitlines()[0]}")] * len(trials)
    except ValueError as error:
        why = f"this process can't be forked, and the run can't be sent to another: {error}"
        return [Answer(error=why)] * len(trials)
    return answers


# ---------------------------------------------------------------------------------------------------- in the child


def _answered(trial: Callable[[Path], Any], folder: Path) -> Answer:
    write_only_below(folder)
    try:
        return Answer(trial(folder))
    except BaseException as error:
        return Answer(error=in_a_line(error), refused=_refusal(error))


def _refusal(error: BaseException) -> str:
    """A sentence in which a library says that settings do not go together; empty for any other exception."""
    misconfigured = any(kind.__name__ == "MisconfigurationException" for kind in type(error).__mro__)
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    by_library = bool(files) and files[-1].is_relative_to(LIBRARY) and not files[-1].is_relative_to(LIBRARY / "launch")
    none_on_ranks = bool(files) and files[-1].parts[-3:] == ("loops", "optimization", "automatic.py")
    if (
        misconfigured
        or (by_library and isinstance(error, ValueError))
        or (none_on_ranks and isinstance(error, RuntimeError))
    ):
        return " ".join(str(error).split())
    return ""


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with open(os.devnull, "w", encoding="utf-8") as nowhere, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)  # handlers hold streams of their own
        for number in (1, 2):
            with contextlib.suppress(OSError):
                os.dup2(nowhere.fileno(), number)
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield


# ------------------------------------------------------------------------------------------- a line for whoever waits


AFTER_SECONDS = 4.0


class Progress:
    """Writes a line when a step begins, from :data:`AFTER_SECONDS` on, and for the step that is going on then.

    The environment variable ``REHEARSE_PROGRESS=0`` switches it off.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.began = time.monotonic()
        self.step = ""

    def tick(self) -> None:
        seconds = time.monotonic() - self.began
        if self.step and seconds >= AFTER_SECONDS:
            print(f"rehearse ({seconds:.0f} s): {self.step}", file=self.stream, flush=True)
            self.step = ""


_shown: ContextVar[Progress | None] = ContextVar("rehearse_progress", default=None)


@contextlib.contextmanager
def progress_shown() -> Iterator[None]:
    """Show the steps within, if stderr is a terminal or a notebook's."""
    token = _shown.set(Progress(sys.stderr) if _is_watched(sys.stderr) else None)
    try:
        yield
    finally:
        _shown.reset(token)


def _is_watched(stream: Any) -> bool:
    if os.environ.get("REHEARSE_PROGRESS") == "0":
        return False
    try:
        return type(stream).__module__.startswith("ipykernel") or bool(stream.isatty())
    except (AttributeError, ValueError):  # closed, or no file
        return False


def now_trying(what: str = "") -> None:
    """A step begins, or goes on while its trials are waited for."""
    progress = _shown.get()
    if progress is not None:
        progress.step = what or progress.step
        progress.tick()
