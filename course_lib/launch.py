"""Run a function on several ranks from wherever you are: a notebook cell, a script, a test.

A process group needs several processes, and a notebook is one. Forking it hangs once it has used OpenMP or CUDA,
spawning takes seconds and cannot see what a cell defines, and a deadlock freezes the kernel without a word. The rule:
*ranks start from a clean server that has torch loaded, the function travels by value, and every end is reported.*

    >>> def total(rank, weight):
    ...     x = torch.tensor([weight * rank])
    ...     torch.distributed.all_reduce(x)
    ...     return x.item()
    >>> [result.value for result in run_ranks(total, 2, args=(10,))]
    [10, 10]

A rank that raises ends the call with a :class:`RankError`, a hang with a :class:`RankTimeout`; both show where every
rank was. No process outlives the call, however it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import inspect
import io
import linecache
import multiprocessing
import numbers
import os
import pickle
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from course_lib._arguments import int_of_at_least

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "lightning", "course_lib.launch")
"""What the server loads once, so that no rank has to: torch._dynamo alone is seconds of a rank's first optimizer."""

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


@dataclass(frozen=True)
class RankResult:
    """What one rank returned."""

    rank: int
    value: Any
    stdout: str
    """What the rank printed, its native code included."""
    stderr: str
    seconds: float
    """Time inside the function, without start and end."""


@dataclass(frozen=True)
class RankReport:
    """Where one rank was when the call ended badly."""

    rank: int
    state: str
    """``"raised"``, ``"was killed by SIGKILL"``, ``"exited with code 3"``, ``"was running"`` or ``"had returned"``."""
    error: str
    """The exception in one line; empty if the rank raised none."""
    details: str
    """The traceback of what was raised, or the stack of a rank that was running."""
    functions: tuple[str, ...]
    """Names of the functions on that stack, the innermost last."""
    stdout: str
    stderr: str

    @property
    def headline(self) -> str:
        return f"rank {self.rank} {self.state}" + (f": {self.error}" if self.error else "")

    def __str__(self) -> str:
        # A rank that raised tells its story in the traceback; of one that died, the last words may be all there is.
        last_words = "" if self.state in ("raised", "had returned") else "\n".join(self.stderr.splitlines()[-10:])
        parts = [
            f"--- {self.headline}",
            self.details.rstrip(),
            last_words and f"its last lines on stderr:\n{last_words}",
        ]
        return "\n".join(part for part in parts if part)


class RankError(RuntimeError):
    """A rank raised, died, or returned what cannot be sent back.

    ``reports`` holds a :class:`RankReport` for every rank, the first cause first. If the first cause is an exception
    that can travel, it is the ``__cause__``.
    """

    def __init__(self, summary: str, reports: Sequence[RankReport]) -> None:
        self.summary = summary
        self.reports = list(reports)
        super().__init__("\n\n".join([summary, *map(str, reports)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.summary, self.reports)

    def _render_traceback_(self) -> list[str]:
        # IPython's hook: the ranks' tracebacks say it all, the launcher's own frames would bury them.
        return f"{type(self).__name__}: {self}".splitlines()


class RankTimeout(RankError, TimeoutError):
    """The ranks did not return in time. ``reports`` holds each rank's stack, in the order of ranks."""


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
    group, and torch uses one CPU thread a rank, as under torchrun.

    Args:
        fn: Any callable; what it and its classes need of a notebook's or script's globals travels along, as a copy.
        world_size: Number of ranks.
        args: Passed to ``fn`` after the rank.
        timeout: Seconds that ``fn`` may take on all ranks together.
        backend: ``"auto"``: NCCL with one GPU for each rank where there are enough GPUs, else gloo on CPUs, with the
            GPUs hidden from the ranks so that ``accelerator="auto"`` agrees. ``"nccl"``. ``"gloo"``: the GPUs stay
            visible, so that ranks may share one; a Trainer inside then takes them unless it has ``accelerator="cpu"``.
        start_method: ``"forkserver"`` (the default on Linux: the first call starts the server, each later one takes
            tenths of a second) or ``"spawn"`` (elsewhere: seconds a call).

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
    surroundings, payload = _pack_surroundings(hide_gpus), _pack(fn, args)

    folder = tempfile.mkdtemp(prefix="run_ranks-")
    ranks: list[_Rank] = []
    try:
        context = _context(start_method)
        port = _free_port()
        for number in range(world_size):
            ranks.append(_Rank(number, folder))
            ranks[-1].start(context, world_size, backend, port)
        for rank in ranks:
            rank.send(surroundings, payload)
        _wait_for_all(ranks, float(timeout))
        results = [rank.result() for rank in ranks]
        _let_end(ranks)
        return results
    except _Unreadable as error:
        raise RankError(f"rank {error.rank} returned what cannot be read here: {error.__cause__!r}", []) from error
    finally:
        _kill(ranks)
        shutil.rmtree(folder, ignore_errors=True)


def rank_device() -> torch.device:
    """Where a rank's tensors belong in collectives: on its GPU under NCCL, else on the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# ---------------------------------------------------------------------------------------------- the calling process


class _Rank:
    """The caller's end of one rank: its process, its pipe, and what came through it."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank = rank
        self.folder = folder
        self.process: Any = None
        self.ready = False
        self.returned: tuple[bytes, float] | None = None
        self.failure: _Failure | None = None
        self.stack: list[traceback.FrameSummary] | None = None
        self.connection, self._rank_end = multiprocessing.Pipe()

    def start(self, context: Any, world_size: int, backend: str, port: int) -> None:
        self.process = context.Process(
            target=_rank_main,
            args=(self.rank, world_size, self._rank_end, self.folder, os.getpid(), backend, port),
            name=f"rank {self.rank}",
        )
        with _hidden_main():
            self.process.start()
        self._rank_end.close()

    def send(self, surroundings: bytes, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # a rank that died meanwhile is reported as that
            self.connection.send_bytes(surroundings)
            self.connection.send_bytes(payload)

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
                    self.stack = [traceback.FrameSummary(*frame) for frame in content]
        if not self.settled and not self.process.is_alive():
            code = self.process.exitcode
            died = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
            # The others notice its closed connections within milliseconds: their failures are consequences.
            self.failure = _Failure(time.monotonic() - NOTICE_SECONDS, died, "", [], "", None)

    def ask_for_stack(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send("stack")

    def result(self) -> RankResult:
        assert self.returned is not None
        content, seconds = self.returned
        try:
            value = _Unpickler(content).load()
        except Exception as error:
            raise _Unreadable(self.rank) from error
        return RankResult(self.rank, value, self.output("out"), self.output("err"), seconds)

    def report(self) -> RankReport:
        if self.failure is not None:
            state, error, details = self.failure.state, self.failure.error, self.failure.traceback
            frames = [traceback.FrameSummary(*frame) for frame in self.failure.frames]
        elif self.returned is not None:
            state, error, details, frames = "had returned", "", "", []
        else:
            state, error, frames = "was running", "", self.stack or self._stack_by_signal()
            details = "".join(traceback.format_list(frames))
            if self.stack is None:
                details += "It did not answer: it is stopped, or native code holds the interpreter lock."
        return RankReport(
            self.rank,
            state,
            error,
            _readable_places(details),
            tuple(frame.name for frame in frames),
            self.output("out"),
            self.output("err"),
        )

    def output(self, stream: str) -> str:
        path = _output_path(self.folder, self.rank, stream)
        return path.read_bytes().decode("utf-8", errors="replace") if path.exists() else ""

    def _stack_by_signal(self) -> list[traceback.FrameSummary]:
        """The stack of a rank that cannot answer, because native code holds the interpreter lock."""
        if not hasattr(signal, "SIGUSR1"):
            return []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, signal.SIGUSR1)
        written, before = "", None
        deadline = time.monotonic() + GRACE_SECONDS
        while written != before or not written:  # until it is there, and grows no more
            if time.monotonic() > deadline:
                return []
            time.sleep(0.05)
            written, before = self.output("stack"), written
        threads = [re.findall(r'File "(.*)", line (\d+) in (.*)', thread) for thread in written.split("\n\n")]
        main = next((frames for frames in threads if any(name == "_rank_main" for *_, name in frames)), [])
        found = [traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(main)]
        return _own_frames(traceback.StackSummary.from_list(found))

    def let_end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send("end")

    def kill(self) -> None:
        """End the rank and every process of its group."""
        if self.process is not None and self.process.pid is not None:
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()

    def forget(self) -> None:
        if self.process is not None and self.process.pid is not None:
            self.process.join(END_SECONDS)
            with contextlib.suppress(ValueError):
                self.process.close()
        self.connection.close()
        self._rank_end.close()


class _Unreadable(Exception):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class _Unpickler(pickle.Unpickler):
    """Leaves the caller's own classes alone: cloudpickle would write the rank's copy of their attributes into them."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._ours = set(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name != "_class_setstate":
            return found
        ids = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
        return lambda cls, state: cls if ids.get(cls) in self._ours else found(cls, state)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _let_end(ranks: list[_Rank]) -> None:
    """Give all ranks together the time to end by themselves: workers, communicators."""
    for rank in ranks:
        rank.let_end()
    deadline = time.monotonic() + END_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def _kill(ranks: list[_Rank]) -> None:
    try:
        for rank in ranks:
            rank.kill()
    finally:  # once more, should an impatient second Ctrl-C have come between
        for rank in ranks:
            rank.kill()
    for rank in ranks:
        rank.forget()


def _wait_for_all(ranks: list[_Rank], timeout: float) -> None:
    """Return when every rank has returned; raise when one failed or time is up."""
    deadline = time.monotonic() + START_SECONDS
    started = False
    while not all(rank.settled for rank in ranks):
        if not started and all(rank.ready for rank in ranks):
            started, deadline = True, time.monotonic() + timeout
        _listen(ranks, deadline)
        if any(rank.failure for rank in ranks):
            _raise_rank_error(ranks)
        if time.monotonic() >= deadline:
            _collect_stacks(ranks)
            limit = f"return within {timeout:g} s" if started else f"start within {START_SECONDS:g} s"
            late = [rank.rank for rank in ranks if not rank.settled]
            raise RankTimeout(f"{_named(late)} of {len(ranks)} did not {limit}", [rank.report() for rank in ranks])
    if any(rank.failure for rank in ranks):
        _raise_rank_error(ranks)


def _listen(ranks: list[_Rank], deadline: float) -> None:
    """Wait until an unsettled rank says something, dies, or the deadline comes."""
    sources = [source for rank in ranks if not rank.settled for source in (rank.connection, rank.process.sentinel)]
    wait(sources, min(3600.0, max(0.0, deadline - time.monotonic())))
    for rank in ranks:
        if not rank.settled:
            rank.receive()


def _raise_rank_error(ranks: list[_Rank]) -> NoReturn:
    grace = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < grace and not all(rank.settled for rank in ranks):
        _listen(ranks, grace)
    _collect_stacks(ranks)
    failed = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.failure.time)  # type: ignore[union-attr]
    reports = [rank.report() for rank in [*failed, *(rank for rank in ranks if not rank.failure)]]
    assert failed[0].failure is not None
    cause = failed[0].failure.load_exception()
    raise RankError(
        f"{_named([r.rank for r in failed])} of {len(ranks)} failed; first: {reports[0].headline}", reports
    ) from cause


def _collect_stacks(ranks: list[_Rank]) -> None:
    running = [rank for rank in ranks if not rank.settled]
    for rank in running:
        rank.ask_for_stack()
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline and any(rank.stack is None and not rank.settled for rank in running):
        _listen(running, deadline)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


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


def _context(start_method: str | None) -> Any:
    start_method = start_method or ("forkserver" if sys.platform == "linux" else "spawn")
    if start_method not in ("forkserver", "spawn"):
        raise ValueError(f'start_method must be "forkserver" or "spawn", got {start_method!r}')
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        from multiprocessing import forkserver

        context.set_forkserver_preload([name for name in PRELOAD if importlib.util.find_spec(name.split(".")[0])])
        _forget_server_of_parent(forkserver._forkserver)
        # Asking the driver for GPUs would make CUDA unusable in every process forked from the server: ask NVML.
        with _environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
            try:
                forkserver.ensure_running()
            except OSError as error:
                if "too long" not in str(error):
                    raise
                raise OSError(
                    f"the temporary directory {tempfile.gettempdir()!r} has a path too long for the address of a "
                    "socket (about 70 characters are left to it): set TMPDIR to a shorter one"
                ) from error
    return context


def _forget_server_of_parent(server: Any) -> None:
    # In a forked child of a process that has called us, multiprocessing still believes in the parent's server.
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]


_main_lock = threading.Lock()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    # multiprocessing would run the caller's script again in every rank. The function travels by value, so no rank
    # needs the script, and a script needs no `if __name__ == "__main__"`.
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _free_port() -> int:
    # For whoever asks for MASTER_PORT in a rank; the group itself meets in a file.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pack_surroundings(hide_gpus: bool) -> bytes:
    """What a rank must have before it loads anything else."""
    environment = dict(os.environ)
    if hide_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # The source of notebook cells exists in this process alone; with it a rank's traceback shows the cell's lines.
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return pickle.dumps((environment, cells, multiprocessing.get_start_method(allow_none=True)))


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return cloudpickle.dumps((fn, args))
    except Exception as error:
        culprits = _unsendable(fn, getattr(fn, "__name__", "fn"), set()) + _unsendable(args, "args", set())
        raise ValueError(
            f"this cannot be sent to a rank: {'; '.join(culprits) or error}. "
            "Make it inside the function, or pass in args what it is made from"
        ) from error


def _unsendable(value: Any, path: str, seen: set[int]) -> list[str]:
    """Name the smallest parts of ``value`` that cannot be pickled."""
    if id(value) in seen or isinstance(value, types.GetSetDescriptorType) or path.count(".") + path.count("[") > 50:
        return []
    seen.add(id(value))
    try:
        cloudpickle.dumps(value)
        return []
    except Exception as error:
        inner = [name for part, part_path in _parts(value, path) for name in _unsendable(part, part_path, seen)]
        return inner or [f"{path} ({type(value).__name__}: {error})"]


def _parts(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, types.MethodType):
        yield value.__self__, f"{path}.__self__"
        yield value.__func__, path
    elif isinstance(value, types.FunctionType):
        names = set(_global_names(value.__code__))
        yield from ((value.__globals__[name], f"{path} → {name}") for name in names if name in value.__globals__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                yield cell.cell_contents, f"{path} → {name}"
        yield value.__defaults__ or (), f"{path}.__defaults__"
        yield value.__kwdefaults__ or {}, f"{path}.__kwdefaults__"
    elif isinstance(value, functools.partial):
        yield value.func, f"{path}.func"
        yield value.args, f"{path}.args"
        yield value.keywords, f"{path}.keywords"
    elif isinstance(value, dict):
        yield from ((item, f"{path}[{key!r}]") for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((item, f"{path}[{index}]") for index, item in enumerate(value))
    else:
        slots = [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
        yield from ((getattr(value, name), f"{path}.{name}") for name in slots)
        yield from ((item, f"{path}.{name}") for name, item in getattr(value, "__dict__", {}).items())


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _readable_places(text: str) -> str:
    """Write library paths relative to their installation, and a notebook's cells by their number."""
    libraries = {str(Path(torch.__file__).parents[1]), str(Path(os.__file__).parent)}
    for folder in sorted(libraries, key=len, reverse=True):
        text = text.replace(f'File "{folder}{os.sep}', 'File "')
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        for name in list(linecache.cache):
            label = shell.compile.format_code_name(name)
            if label is not None:
                text = text.replace(f'File "{name}"', " ".join(label))
    return text


# ----------------------------------------------------------------------------------------------- the rank's process


@dataclass(frozen=True)
class _Failure:
    time: float
    """On the clock that all processes of a machine share."""
    state: str
    error: str
    frames: list[tuple[str, int | None, str]]
    traceback: str
    exception: bytes | None

    def load_exception(self) -> BaseException | None:
        with contextlib.suppress(Exception):
            if self.exception is not None:
                exception = _Unpickler(self.exception).load()
                return exception if isinstance(exception, BaseException) else None
        return None


def _rank_main(
    rank: int, world_size: int, connection: Connection, folder: str, caller: int, backend: str, port: int
) -> None:
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a group of its own: its DataLoader workers end with it
    guard = _guard(caller, folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and ends the ranks
    _redirect_output(folder, rank)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, open(_output_path(folder, rank, "stack"), "wb"))  # noqa: SIM115
    surroundings, payload = connection.recv_bytes(), connection.recv_bytes()
    say = _Speaker(connection)
    let_end = threading.Event()
    threading.Thread(target=_obey, args=(connection, say, threading.get_ident(), let_end, folder), daemon=True).start()
    try:
        _enter(surroundings)
        _set_launcher_environment(rank, world_size, port)
        fn, args = _unpack(payload)
        torch.set_num_threads(1)
        np.random.seed()  # noqa: NPY002 - a fork of the server would draw what every other one draws
        if backend == "nccl":
            torch.cuda.set_device(rank)
        say("ready")
        # This call's own timeout comes first; the group's is for what may be left behind.
        dist.init_process_group(
            backend, store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size,
            timeout=timedelta(days=1),
        )  # fmt: skip
        begin = time.perf_counter()
        value = fn(rank, *args)
        seconds = time.perf_counter() - begin
        _flush()
        say("returned", (_pack_value(value), seconds))
    except BaseException as error:
        _flush()
        say("failed", _describe(error))
    # Stay until the caller knows how all ranks ended: a rank that leaves early breaks the others' connections,
    # and their complaints would hide the first cause.
    let_end.wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    if guard is not None:
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)


def _guard(caller: int, folder: str) -> int | None:
    """Fork a small process that ends the rank's group when the caller is gone, and return its pid.

    The thread that listens to the caller does that too, but native code can keep it from running.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    if pid := os.fork():
        return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        select.select([os.pidfd_open(caller)], [], [])
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.killpg(0, signal.SIGKILL)
    return None


class _Speaker:
    """Sends messages to the caller from more than one thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def __call__(self, kind: str, content: Any = None) -> None:
        with self._lock:
            self._connection.send((kind, content))


def _obey(connection: Connection, say: _Speaker, main_thread: int, let_end: threading.Event, folder: str) -> None:
    """Answer the caller while the function runs; if the caller is gone, clean up for it and end."""
    while True:
        try:
            command = connection.recv()
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            if hasattr(os, "killpg"):
                os.killpg(0, signal.SIGKILL)
            os._exit(1)
        if command == "end":
            let_end.set()
            continue
        frames = traceback.extract_stack(sys._current_frames()[main_thread])
        say("stack", [(frame.filename, frame.lineno, frame.name) for frame in _own_frames(frames)])


def _redirect_output(folder: str, rank: int) -> None:
    for number, stream in ((1, "out"), (2, "err")):
        file = os.open(_output_path(folder, rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # Unbuffered, so that what a rank printed before it was killed is there.
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), "utf-8", newline="", write_through=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), "utf-8", newline="", write_through=True)  # noqa: SIM115


def _output_path(folder: str, rank: int, stream: str) -> Path:
    return Path(folder, f"rank{rank}.{stream}")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()


def _enter(surroundings: bytes) -> None:
    environment, cells, start_method = pickle.loads(surroundings)
    multiprocessing.set_start_method(start_method, force=True)  # for its DataLoader's workers: as the caller's
    os.environ.clear()
    os.environ.update(environment)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    linecache.cache.update(cells)


def _unpack(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    fn, args = cloudpickle.loads(payload)
    # Plain pickle, as in all_gather_object, looks the caller's functions and classes up in __main__.
    main = vars(sys.modules["__main__"])
    main.update((name, value) for name, value in getattr(fn, "__globals__", {}).items() if name[:2] != "__")
    for cls in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()):
        if cls.__module__ == "__main__":
            main[cls.__qualname__] = cls
    return fn, args


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


def _pack_value(value: Any) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        culprits = _unsendable(value, "value", set())
        raise TypeError(f"what the function returned cannot be sent back: {'; '.join(culprits) or error}") from None


def _describe(error: BaseException) -> _Failure:
    told = traceback.TracebackException.from_exception(error)
    told.stack[:] = _own_frames(told.stack)
    try:
        exception = cloudpickle.dumps(error)
    except Exception:
        exception = None
    return _Failure(
        time.monotonic(),
        "raised",
        "".join(told.format_exception_only()).strip(),
        [(frame.filename, frame.lineno, frame.name) for frame in told.stack],
        "".join(told.format()),
        exception,
    )


def _own_frames(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Leave out what stands above the function (the launcher, multiprocessing), and torch's logging wrapper."""
    frames = traceback.StackSummary.from_list([f for f in frames if not f.filename.endswith("c10d_logger.py")])
    start = [
        index + 1 for index, frame in enumerate(frames) if frame.filename == __file__ and frame.name == "_rank_main"
    ]
    return frames[start[-1] :] if start else list(frames)
