"""The processes of a loader: *one pipe for each worker, one answer for each task*.

Torch's loader has one queue for the answers of all workers: they come as they are ready, wait in a dictionary for
their turn, and a worker that is killed while it holds the queue's lock blocks the others. With a pipe for each worker
the answers of one worker are in the order of its tasks, so that who dealt the tasks in turn only has to read the pipes
in turn; and a pipe ends with its worker, so that a death is seen at once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import pickle
import queue
import random
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # its pickler passes tensors through shared memory
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker  # what torch.utils.data.get_worker_info() reads

LOOK_SECONDS = 5.0
"""How often a side that waits checks that the other one lives. Most ends are seen at once, by the end of the pipe."""


@dataclass(frozen=True)
class EpochBegins:
    """To a worker, ahead of an epoch's tasks: read the dataset from its beginning."""


@dataclass(frozen=True)
class StreamEnds:
    """From a worker: there is no more in its part of the stream."""

    worker: int


@dataclass(frozen=True)
class Failure:
    """From a worker: an error, as what the main process can raise."""

    kind: type[BaseException]
    message: str

    @classmethod
    def of(cls, error: BaseException, where: str) -> Failure:
        text = "".join(traceback.format_exception(error))
        kind = RuntimeError if isinstance(error, StopIteration) else type(error)  # it would end the epoch
        return cls(kind, f"Caught {type(error).__name__} {where}.\nOriginal {text}")

    def error(self) -> BaseException:
        try:
            if getattr(self.kind, "message", None):
                return self.kind(message=self.message)  # type: ignore[call-arg]
            return self.kind(_Verbatim(self.message))
        except Exception:  # its constructor wants something else
            return RuntimeError(self.message)


class _Verbatim(str):
    """Keeps its lines in a KeyError too, which shows a message's repr."""

    __repr__ = str.__str__


def work(
    pipe: Any,
    forked_from: int | None,
    worker_id: int,
    num_workers: int,
    base_seed: int,
    dataset: Any,
    make_fetch: Any,
    init_fn: Any,
) -> None:
    """A worker: answers each task, one after another, until the main process hangs up or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the main process's handler: a Trainer's, while it fits
    torch.set_num_threads(1)
    _seed_generators(base_seed, worker_id)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=num_workers, seed=base_seed + worker_id, dataset=dataset
    )
    # Threads, so that the main process never waits to send a task, nor this one to have a large answer taken.
    tasks, large = queue.SimpleQueue[Any](), queue.Queue[Any]()
    for target, arguments in ((_watch, (pipe, forked_from)), (_receive, (pipe, tasks)), (_send, (pipe, large))):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    failed_start: Failure | None = None
    try:
        if init_fn is not None:
            init_fn(worker_id)
    except Exception as error:
        failed_start = Failure.of(error, _in_worker(worker_id))
    fetch: Any = None
    while (task := tasks.get()) is not None:
        if isinstance(task, EpochBegins):
            fetch = failed_start or _attempt(worker_id, make_fetch)
            continue
        # A worker that could not begin, or whose stream is over, says so to each task.
        answer = fetch if isinstance(fetch, Failure | StreamEnds) else _attempt(worker_id, fetch, *task)
        if isinstance(answer, StreamEnds):
            fetch = answer
        message = _pack(answer, worker_id)
        if len(message) > INLINE_BYTES or large.unfinished_tasks:
            large.put(message)
        else:  # at once: what was fetched before a worker dies is delivered
            with contextlib.suppress(OSError):  # nobody listens any more: so will say the next task
                pipe.send_bytes(message)
        del task, answer, message  # not to hold a batch while waiting for the next task


def _seed_generators(base_seed: int, worker_id: int) -> None:
    """As torch seeds its workers, which also gives NumPy four words: other than the library seeds elsewhere."""
    random.seed(base_seed + worker_id)
    torch.manual_seed(base_seed + worker_id)
    words = np.random.SeedSequence([worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]).generate_state(4)
    np.random.seed(words)  # noqa: NPY002 - the generator that datasets draw from


def _watch(pipe: Any, forked_from: int | None) -> None:
    """Hang up for a main process that was killed: its forks, this worker too, hold copies of its end of the pipe."""
    if forked_from is not None:
        while os.getppid() == forked_from:
            time.sleep(LOOK_SECONDS)
        _hang_up(pipe)


def _receive(pipe: Any, tasks: queue.SimpleQueue[Any]) -> None:
    """Take tasks as they come. When the main process hangs up, ``None`` replaces those that are still waiting."""
    try:
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(pipe.recv())
    finally:
        with contextlib.suppress(queue.Empty):
            while True:
                tasks.get_nowait()
        tasks.put(None)


def _send(pipe: Any, large: queue.Queue[Any]) -> None:
    with contextlib.suppress(OSError):
        while True:
            pipe.send_bytes(large.get())
            large.task_done()


def _attempt(worker_id: int, act: Callable[..., Any], *arguments: Any) -> Any:
    """What ``act`` returns, or else a message that says how it ended."""
    try:
        return act(*arguments)
    except StopIteration:
        return StreamEnds(worker_id)
    except Exception as error:
        return Failure.of(error, _in_worker(worker_id))


def _in_worker(worker_id: int) -> str:
    return f"in DataLoader worker process {worker_id}"


INLINE_BYTES = 2**16
"""The largest answer that counts as small: a few of them fit into a pipe that nobody is reading."""


class _Pickler(ForkingPickler):
    """Torch's, but small tensors are part of the message: in shared memory each takes a connection of its own."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.UntypedStorage or not 0 < value.nbytes() <= INLINE_BYTES:
            return NotImplemented
        if value.device.type != "cpu":
            return NotImplemented
        return _storage_of, (bytearray(torch.empty(0, dtype=torch.uint8).set_(value).numpy()),)


def _storage_of(content: bytearray) -> torch.UntypedStorage:
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def _pack(answer: Any, worker_id: int) -> Any:
    try:
        return _Pickler.dumps(answer)
    except Exception as error:
        message = answer.message if isinstance(answer, Failure) else Failure.of(error, _in_worker(worker_id)).message
        return ForkingPickler.dumps(Failure(RuntimeError, message))


ENDED = "the workers of this iterator have ended: iter(loader) begins an epoch with new ones"
TOO_MANY_FILES = (
    "Too many open files: each large tensor from a worker takes one. Raise the limit (`ulimit -n`), or call "
    "torch.multiprocessing.set_sharing_strategy('file_system')"
)
HINTS = {
    "SIGKILL": " (often: the machine was out of memory)",
    "SIGBUS": " (often: shared memory is full; see `df /dev/shm`)",
}


class Crew:
    """The workers of an iterator, a pipe to each, and whose tasks are still to be answered."""

    def __init__(self, loader: DataLoader[Any], make_fetch: Callable[[], Any], base_seed: int) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        self.dealt: deque[int] = deque()
        self.in_order, self.timeout, self._owner = loader.in_order, loader.timeout, os.getpid()
        self._end = ""  # why it is closed
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        forked_from = os.getpid() if context.get_start_method() == "fork" else None
        try:
            for worker_id in range(loader.num_workers):
                ours, theirs = context.Pipe()
                self.pipes.append(ours)
                setting = (worker_id, loader.num_workers, base_seed, loader.dataset)
                arguments = (theirs, forked_from, *setting, make_fetch, loader.worker_init_fn)
                process = context.Process(target=work, args=arguments, daemon=True)
                process.start()
                theirs.close()  # else the pipe would not end with the worker
                self.processes.append(process)
        except BaseException as error:
            self.close()
            if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
                error.add_note("the start method of the workers pickles dataset, collate_fn and worker_init_fn")
            raise

    @property
    def closed(self) -> bool:
        return bool(self._end) or os.getpid() != self._owner  # a fork of the owner can neither use nor end them

    def send(self, worker: int, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # said when its answer is waited for
            self.pipes[worker].send(message)

    def deal(self, worker: int, indices: Any) -> None:
        self.send(worker, (indices,))
        self.dealt.append(worker)

    def answer(self) -> Any:
        """The next answer, waited for as long as the workers live; or for ``timeout`` seconds, where that is not 0."""
        deadline = time.monotonic() + (self.timeout or math.inf)
        ready: list[Any] = []
        while not ready:
            if self.closed:
                raise self.ended()
            if time.monotonic() >= deadline:
                raise RuntimeError(f"DataLoader timed out after {self.timeout} seconds")
            candidates = [self.dealt[0]] if self.in_order else list(dict.fromkeys(self.dealt))
            ready = wait([self.pipes[each] for each in candidates], min(LOOK_SECONDS, deadline - time.monotonic()))
            if not ready:
                self._look()
        worker = next(each for each in candidates if self.pipes[each] in ready)  # the longest without an answer
        try:
            answer = self.pipes[worker].recv()
        except (EOFError, ConnectionError):
            raise self._death_of(worker) from None
        except BaseException as error:  # half a message may be read
            if getattr(error, "errno", None) == errno.EMFILE or "items of ancdata" in str(error):
                self.close(TOO_MANY_FILES)
                raise self.ended() from error
            if isinstance(error, OSError):
                raise self._death_of(worker) from error
            self.close()
            raise
        self.dealt.remove(worker)
        return answer

    def _look(self) -> None:
        """Raise if a worker is gone that still has to answer, whose children may hold its pipe."""
        for worker in {*self.dealt}:
            if not self.processes[worker].is_alive():
                raise self._death_of(worker)

    def ended(self) -> RuntimeError:
        return RuntimeError(self._end or ENDED)

    def _death_of(self, worker: int) -> RuntimeError:
        """Of the first worker that died: behind it all pipes end, and this one's too."""
        if not self.closed:
            process = self.processes[worker]
            process.join(LOOK_SECONDS)
            code = process.exitcode or 0
            if code >= 0:
                end = f"(pid(s) {process.pid}) exited unexpectedly: worker {worker}, exit code {process.exitcode}"
            else:
                name = signal.Signals(-code).name
                end = f"(pid {process.pid}) is killed by signal: {name}{HINTS.get(name, '')}: worker {worker}"
            self.close(f"DataLoader worker {end}")
        return self.ended()

    def close(self, why: str = ENDED) -> None:
        """End the workers: politely first, and within ``LOOK_SECONDS`` in any case."""
        if self.closed:
            return
        self._end = why
        for pipe in self.pipes:
            _hang_up(pipe)
        deadline = time.monotonic() + LOOK_SECONDS
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also after a second Ctrl-C
            for process in self.processes:
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()


def _hang_up(pipe: Any) -> None:
    """End the connection also where another process, forked meanwhile, holds a copy of our end."""
    if os.name == "posix":
        connection = socket.socket(fileno=pipe.fileno())
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.detach()
    else:
        pipe.close()
