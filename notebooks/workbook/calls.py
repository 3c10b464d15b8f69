"""A reader's function, called so that it can do no harm: bounded in time, and watched for what it changes.

A right value is half of a right answer. Code that sorts the caller's list, seeds a global generator, leaves gradients
switched off or never comes back spoils the run that it is copied into, and no comparison of values shows it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import os
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rehearse._processes import threads_without_a_core

F = TypeVar("F", bound=Callable[..., Any])
AGAIN_AFTER = 0.5
"""Seconds after which code that has caught its interruption is interrupted again."""


class OutOfTime(BaseException):
    """Raised in code whose time is up; no `except Exception` of that code catches it."""


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End what runs inside by :class:`OutOfTime`, also where it sleeps or waits for a lock.

    A second thread sends SIGINT, which every system has and which Jupyter's own interrupt uses too; one that was sent
    by somebody else goes where it went before. A handler runs in the main thread only, so elsewhere there is no bound.
    What the machine's other work takes does not count, where Linux tells how long threads have waited for a core; but
    all in all it takes at most 20 times the seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over, expired = threading.Event(), threading.Event()
    main = threading.get_ident()
    before, traced_before = signal.getsignal(signal.SIGINT), sys.gettrace()
    strikes = itertools.count()

    def interrupted(number: int, frame: types.FrameType | None) -> None:
        if not expired.is_set():
            if callable(before):
                before(number, frame)
        elif not over.is_set():
            if not (lines := next(strikes)):
                raise OutOfTime
            _raise_after(lines, frame)

    begun, starved_before = time.monotonic(), threads_without_a_core(os.getpid())

    def seconds_left() -> float:
        elapsed = time.monotonic() - begun
        starved = min(threads_without_a_core(os.getpid()) - starved_before, 0.95 * elapsed)
        return seconds - (elapsed - starved)

    def interrupt() -> None:
        wait = seconds
        while not over.wait(wait):
            if not expired.is_set() and (left := seconds_left()) > 0.01:
                wait = left
                continue
            expired.set()
            if hasattr(signal, "pthread_kill"):
                signal.pthread_kill(main, signal.SIGINT)  # wakes a sleep, and a wait for a lock
            else:
                signal.raise_signal(signal.SIGINT)
            wait = AGAIN_AFTER

    signal.signal(signal.SIGINT, interrupted)
    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()  # after this no signal of its own comes
        sys.settrace(traced_before)
        signal.signal(signal.SIGINT, before)


def _raise_after(lines: int, frame: types.FrameType | None) -> None:
    """Interrupt code that catches everything after so many of its lines, until one comes that no `try` holds."""

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename in (__file__, contextlib.__file__):
            return None
        if event == "line":
            lines -= 1
        if lines <= 0:
            raise OutOfTime
        return trace

    sys.settrace(trace)
    while frame:
        frame.f_trace = trace
        frame = frame.f_back


@dataclass(frozen=True)
class Allowed:
    """What a right answer may do beside returning its value."""

    change_arguments: bool = False
    draw: bool = False
    """From the global generators of Python, NumPy and torch."""


NOTHING = Allowed()


@dataclass
class Call:
    """What came of a call: its value, what it printed, and in a sentence what it changed."""

    value: Any = None
    printed: str = ""
    changed: str | None = None


def call(function: Callable[..., Any], *args: Any, allowed: Allowed = NOTHING, **kwargs: Any) -> Call:
    """Call a function and watch what it changes and prints."""
    arguments = _named(function, args, kwargs)
    before, around = _snapshot(arguments), _Surroundings.now()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        value = function(*args, **kwargs)
    changed = around.change(allowed) or (None if allowed.change_arguments else _changed(arguments, before))
    return Call(value, printed.getvalue(), changed)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Global generators and the mode of gradients are afterwards as they were before."""
    around = _Surroundings.now()
    try:
        yield
    finally:
        around.put_back()


@dataclass
class Watch:
    """What the calls of one answer did: the first change, and all that was printed."""

    allowed: Allowed = NOTHING
    changed: str | None = None
    printed: list[str] = field(default_factory=list)

    def over(self, function: F) -> F:
        """The function, watched; a class is handed back as it is, as others inherit from it and look inside."""
        if not isinstance(function, types.FunctionType):
            return function

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # A generator's body runs while it is read, and its caller may draw and print in between.
            if isinstance(value := self._called(function, args, kwargs), types.GeneratorType):
                return self._read(value, _named(function, args, kwargs))
            return value

        return watched  # type: ignore[return-value]

    def _called(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen = call(function, *args, allowed=self.allowed, **kwargs)
        self.changed = self.changed or seen.changed
        if seen.printed:
            self.printed.append(seen.printed)
        return seen.value

    def _read(self, values: Iterator[Any], arguments: dict[str, Any]) -> Iterator[Any]:
        before = _snapshot(arguments)
        yield from values
        if not self.allowed.change_arguments:
            self.changed = self.changed or _changed(arguments, before)


@dataclass
class _Surroundings:
    """The states that all code of a process shares."""

    python: Any
    numpy: Any
    torch: Tensor
    grad: bool
    dtype: Any

    @classmethod
    def now(cls) -> _Surroundings:
        numpys = np.random.get_state()  # noqa: NPY002  the global one is meant
        dtype = torch.get_default_dtype()
        return cls(random.getstate(), numpys, torch.get_rng_state(), torch.is_grad_enabled(), dtype)

    def change(self, allowed: Allowed) -> str | None:
        now = self.now()
        if now.grad != self.grad:
            state = "on" if now.grad else "off"
            return (
                f"Gradients are switched {state} afterwards, for all that follows. A `with torch.no_grad():` block "
                "puts back what it found."
            )
        if now.dtype != self.dtype:
            return (
                f"Afterwards torch's default dtype is {now.dtype}, for all that follows. Give `dtype=` to the tensors "
                "that need it."
            )
        if allowed.draw:
            return None
        moved = {
            "Python's": now.python != self.python,
            "NumPy's": not _equal(now.numpy, self.numpy),
            "torch's": not torch.equal(now.torch, self.torch),
        }
        for whose, has_moved in moved.items():
            if has_moved:
                return (
                    f"Afterwards {whose} global generator is not as it was: whatever draws from it next, dropout and "
                    "augmentation, draws other numbers. Use a generator of your own, or put this one back."
                )
        return None

    def put_back(self) -> None:
        torch.set_grad_enabled(self.grad)
        torch.set_default_dtype(self.dtype)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.torch)


def _named(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call itself tells what is wrong with the arguments
        return {}


def _changed(arguments: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    for (name, value), was in zip(arguments.items(), before.values(), strict=True):
        now = _snapshot(value)
        if _equal(now, was):
            continue
        if isinstance(value, nn.Module):
            return f"Afterwards `{name}` is not as it was: {_change_of_module(now, was)}"
        return f"The call changes `{name}`, which is its caller's: it was {was!r} and is {now!r}. Work on a copy."
    return None


def _change_of_module(now: dict[str, Any], was: dict[str, Any]) -> str:
    if now["modes"] != was["modes"]:
        mode = "training" if any(now["modes"]) else "evaluation"
        return f"its layers are in {mode} mode. Put back the mode that each was in."
    if now["trainable"] != was["trainable"]:
        return "other parameters require a gradient. `with torch.no_grad():` needs no change of the model."
    if not _equal(now["gradients"], was["gradients"]):
        return "its parameters have other gradients."
    return "its parameters or buffers have other values."


def _snapshot(value: Any) -> Any:
    """What is compared afterwards; of an object that is none of these, that it is the same object."""
    if isinstance(value, nn.Module):
        parameters = list(value.parameters())
        return {
            "modes": [module.training for module in value.modules()],
            "trainable": [parameter.requires_grad for parameter in parameters],
            "gradients": [None if p.grad is None else p.grad.clone() for p in parameters],
            "values": [v.detach().clone() for v in value.state_dict().values() if isinstance(v, Tensor)],
        }
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_snapshot, value))
    if isinstance(value, (set, bytearray)):
        return value.copy()
    return value


def _equal(a: Any, b: Any) -> bool:
    """NaN equals NaN: nothing has changed."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool(_alike(a, b).all())
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool(np.all(_alike(a, b)))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return a is b or (type(a) is type(b) and bool(a == b or (a != a and b != b)))


def _alike(a: Any, b: Any) -> Any:
    return (a == b) | ((a != a) & (b != b))
