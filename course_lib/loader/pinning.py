"""Pinning: a batch in page-locked memory, from which a GPU copies by itself while the training step goes on.

With workers a thread does it, one batch ahead of the step; it takes the answers where the loader would.
"""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import warnings
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from course_lib.loader.workers import LOOK_SECONDS, Crew, Failure, StreamEnds


class PinningThread:
    """Takes the answers of a crew ahead of the training step, and pins them."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._pinned: queue.SimpleQueue[Any] = queue.SimpleQueue()
        crew.thread = threading.Thread(target=self._run, args=(torch.accelerator.current_device_index(),), daemon=True)
        crew.thread.start()

    def answer(self, timeout: float) -> tuple[int, Any] | None:
        try:
            item = self._pinned.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            self._pinned.put(item)  # for the next one who asks
            raise item
        return item  # type: ignore[no-any-return]

    def _run(self, device_index: int) -> None:
        torch.set_num_threads(1)  # of this thread: the copy is not to take the training step's cores
        torch.accelerator.set_device_index(device_index)
        try:
            while True:
                self._crew.tickets.acquire()
                while (item := self._crew.answer(LOOK_SECONDS)) is None:
                    self._crew.look()
                self._pinned.put((item[0], self._pin(item[1], device_index)))
                del item  # so that no batch is held while waiting for the next
        except BaseException as error:
            self._pinned.put(error)

    @staticmethod
    def _pin(answer: Any, device_index: int) -> Any:
        if isinstance(answer, Failure | StreamEnds):
            return answer
        try:
            return pin(answer)
        except Exception as error:
            return Failure.of(error, f"in pin memory thread for device {device_index}")


def can_pin(loader: DataLoader[Any]) -> bool:
    if not loader.pin_memory:
        return False
    if loader.pin_memory_device:
        warnings.warn("pin_memory_device is deprecated and ignored: the accelerator is used", stacklevel=4)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "mps":
        lack = "no accelerator is found" if accelerator is None else "it is not supported on MPS now"
        warnings.warn(
            f"'pin_memory' argument is set as true but {lack}, then device pinned memory won't be used", stacklevel=4
        )
        return False
    return True


def pin(data: Any) -> Any:
    """The batch with its tensors, and whatever else has a ``pin_memory`` method, pinned; its structure is kept."""
    if hasattr(data, "pin_memory"):
        return data.pin_memory()
    if isinstance(data, str | bytes):
        return data
    if isinstance(data, Mapping):
        pinned: Any = {key: pin(value) for key, value in data.items()}
    elif isinstance(data, Sequence):
        pinned = [pin(value) for value in data]
    else:
        return data
    if isinstance(data, tuple):
        return type(data)(*pinned) if hasattr(data, "_fields") else type(data)(pinned)
    with contextlib.suppress(TypeError):  # a type that can be neither filled nor made of its elements: a dict or list
        if isinstance(data, MutableMapping):
            return _filled(data, pinned.items())
        if isinstance(data, MutableSequence):
            return _filled(data, enumerate(pinned))
        return type(data)(pinned)  # type: ignore[call-arg]
    return pinned


def _filled(data: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """A copy, which keeps whatever else the type holds."""
    clone = copy.copy(data)
    for key, value in items:
        clone[key] = value
    return clone
