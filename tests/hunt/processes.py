"""The processes that lives are played in: forked from this one, or ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from course_lib.launch import RankError, RankTimeout, run_ranks

SECONDS = 60.0
"""What a life may take. It takes less than one; nothing but a hang comes near, also on a busy machine."""


class Unfinished(Exception):
    """The time of a run is over, and not that of a life: nothing is known of the run."""


@dataclass(frozen=True)
class End:
    """How a life ended."""

    values: list[Any]
    """What each rank returned; none where one of them raised, died or hung."""
    error: str = ""
    """What was raised first, in one line, as ``"ValueError: …"``; empty where a process died without a word."""
    details: str = ""
    """The traceback of it, or the stacks of a hang."""
    hung: bool = False


def played(
    life: Callable[..., Any], ranks: int, arguments: tuple[Any, ...], ends: float, *, clean: bool = False
) -> End:
    """One life, in as many processes as it has ranks; the run has until ``ends``, by ``time.monotonic()``.

    Args:
        clean: Also one process alone is a rank, and so no fork of this one: CUDA is refused to forks of a process in
            which something has asked for it.
    """
    seconds = min(SECONDS, ends - time.monotonic())
    if seconds <= 0:
        raise Unfinished
    alone = ranks == 1 and not clean
    end = _forked(lambda: life(0, *arguments), seconds) if alone else _of_ranks(life, ranks, arguments, seconds)
    if end.hung and seconds < SECONDS:
        raise Unfinished
    return end


def _of_ranks(life: Callable[..., Any], ranks: int, arguments: tuple[Any, ...], seconds: float) -> End:
    try:
        results = run_ranks(life, ranks, args=arguments, timeout=seconds, backend="gloo")
        return End([result.value for result in results])
    except RankTimeout as error:
        return End([], "RankTimeout", str(error), hung=True)
    except RankError as error:
        first = error.reports[0]
        return End([], first.error, first.details)


def _forked(act: Callable[[], Any], seconds: float) -> End:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; the child uses none of them
        child = os.fork()
    if child == 0:
        _be_the_child(act, reading, writing)
    os.close(writing)
    pieces, ends, lives = [], time.monotonic() + seconds, True
    while time.monotonic() < ends:
        if not select.select([reading], [], [], 0.05)[0]:
            if not lives:
                break  # its workers may hold the pipe's other end
            lives = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            continue
        piece = os.read(reading, 1 << 20)
        if not piece:
            break
        pieces.append(piece)
    hung = time.monotonic() >= ends
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its workers, too
    os.close(reading)
    os.waitpid(child, 0)
    if hung:
        return End([], "it hangs", hung=True)
    content = b"".join(pieces)
    return pickle.loads(content) if content else End([])


def _be_the_child(act: Callable[[], Any], reading: int, writing: int) -> None:
    try:
        os.setsid()
        os.close(reading)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        try:
            end = End([act()])
        except BaseException as error:
            text = " ".join(str(error).split())
            end = End([], f"{type(error).__name__}: {text}", traceback.format_exc())
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(end, pipe)
    finally:
        os._exit(0)
