"""What all processes of a test are doing when its time is up: a run of the tests that hangs says where.

pytest-timeout ends the test. The failure that it is given here has the stack of every thread of this process and of
the processes that are forks of it, and names the other ones that this process has started.
"""

import faulthandler
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ANSWER_SECONDS = 0.3
"""How long a process may take to write its stacks."""


class Stacks:
    """A file into which this process and its later forks write the stacks of their threads at SIGUSR2."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - for as long as the tests run
        self.descriptor = self._file.fileno()
        self.answer()

    def answer(self) -> None:
        """Let forks answer; again before each test, as a Trainer sets signals back to what Python knows of them."""
        faulthandler.unregister(signal.SIGUSR2)  # else a handler that was replaced counts as one that is there
        faulthandler.register(signal.SIGUSR2, self._file, all_threads=True)

    def of_all_processes(self) -> str:
        """The stacks of this process, and those of each that it has started, with its state and its command."""
        this = psutil.Process()
        start = self._size()
        faulthandler.dump_traceback(self._file)
        own = f"Process {this.pid}, this one\n{self._written_from(start)}"
        return "\n\n".join([own, *map(self._of, this.children(recursive=True))])

    def _of(self, process: psutil.Process) -> str:
        start = self._size()
        try:
            title = f"Process {process.pid}, {process.status()}: {' '.join(process.cmdline())}"
            if not takes_signal(process.pid, signal.SIGUSR2):
                return f"{title}\n  It does not write its stacks: it has no handler of SIGUSR2."
            process.send_signal(signal.SIGUSR2)
        except (psutil.Error, OSError):
            return f"Process {process.pid} has ended."
        time.sleep(ANSWER_SECONDS)
        return f"{title}\n{self._written_from(start)}"

    def _size(self) -> int:
        return self._file.seek(0, 2)

    def _written_from(self, start: int) -> str:
        self._file.seek(start)
        return self._file.read().decode(errors="replace").rstrip()


def hear_sigint() -> None:
    """Where a script has put the tests into the background, SIGINT is ignored, and so it is in each of their children.

    Tests send it, and wait for what it does.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


STACKS = pytest.StashKey[Stacks]()


def takes_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler of this signal, as Linux's ``/proc`` tells; one without it may be ended by it."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (line for line in status if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def fail_with_stacks(stacks: Stacks, seconds: float) -> Any:
    """A handler of the signal by which pytest-timeout ends a test."""

    def end(_number: int, _frame: Any) -> None:
        pytest.fail(f"no end within {seconds:g} s\n\n{stacks.of_all_processes()}")

    return end
