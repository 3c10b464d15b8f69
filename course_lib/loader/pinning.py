"""Pinning: a batch in page-locked memory, from which a GPU copies by itself while the training step goes on.

With workers a thread does it, one batch ahead of the step; it takes the answers where the loader would.
"""

from __future__ import annotations

import queue
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory  # it keeps the structure of a batch

from course_lib.loader.workers import TIMED_OUT, Crew, Failure, StreamEnds


class PinningThread:
    """Takes the answers of a crew ahead of the training step, and pins them."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._pinned: queue.SimpleQueue[Any] = queue.SimpleQueue()
        arguments = (torch.accelerator.current_device_index(),)
        self._thread = crew.thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def answer(self, timeout: float) -> Any:
        """As :meth:`Crew.answer`."""
        if not self._thread.is_alive() and self._pinned.empty():  # in a fork there is no thread
            raise self._crew.ended()
        try:
            answer = self._pinned.get(timeout=timeout or None)
        except queue.Empty:
            raise RuntimeError(TIMED_OUT.format(timeout)) from None
        if isinstance(answer, _ThreadEnds):
            self._pinned.put(answer)  # for the next one who asks
            raise answer.error
        return answer

    def _run(self, device_index: int) -> None:
        torch.set_num_threads(1)  # of this thread: the copy is not to take the training step's cores
        torch.accelerator.set_device_index(device_index)
        try:
            while True:
                self._crew.tickets.acquire()
                self._pinned.put(_pinned(self._crew.answer(timeout=0), device_index))
        except BaseException as error:
            self._pinned.put(_ThreadEnds(error))


@dataclass(frozen=True)
class _ThreadEnds:
    """Behind the last batch of the thread."""

    error: BaseException


def _pinned(answer: Any, device_index: int) -> Any:
    if isinstance(answer, Failure | StreamEnds):
        return answer
    try:
        return pin_memory(answer)
    except Exception as error:
        return Failure.of(error, f"in pin memory thread for device {device_index}")


def can_pin(loader: DataLoader[Any]) -> bool:
    if not loader.pin_memory:
        return False
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "mps":
        lack = "no accelerator is found" if accelerator is None else "it is not supported on MPS now"
        warnings.warn(
            f"'pin_memory' argument is set as true but {lack}, then device pinned memory won't be used", stacklevel=4
        )
        return False
    return True
