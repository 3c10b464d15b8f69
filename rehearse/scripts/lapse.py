"""The state of a rehearsal: whether it is in the lapse yet, and the journal that its rooms write to."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rehearse.scripts.events import Event
from rehearse.scripts.journal import CUT, Journal

REAL_MICRO_BATCHES = 2
MOST_REAL = 4
"""Real micro-batches where an optimizer has not stepped within the first two."""
TRAINERS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
TEXT = "<string>"
"""What Python makes of a text, as a dataclass's comparisons: the line that called it is the script's."""


class Numbered:
    """Numbers for things, in the order in which they come; it holds them, so that no id is used twice."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[int, int] = {}

    def __contains__(self, thing: object) -> bool:
        return id(thing) in self._numbers

    def number(self, thing: Any) -> int:
        known = self._numbers.get(id(thing))
        if known is None:
            known = self._numbers[id(thing)] = len(self.things)
            self.things.append(thing)
        return known


class Lapse:
    """What the rooms share. ``fast``: from here on, forwards are replayed and steps are recorded alone."""

    def __init__(
        self, journal: Journal, *, folder: str, limit: float, end: Callable[[str], None], ends_at: int | None = None
    ) -> None:
        self.journal = journal
        self.folder, self.limit, self._end = folder, limit, end
        self.ends_at = ends_at
        """An event whose line is asked for, and nothing that comes behind it."""
        self.fast = False
        self.backwards = 0
        self.steps = 0
        self.steps_made: set[int] = set()
        """Optimizers that have stepped."""
        self.optimizers = Numbered()
        self.trainer: Any = None
        """Of Lightning, where there is one."""
        self.averages = True
        """Whether the ranks would average the gradients of a backward pass."""
        self.wrapped: set[int] = set()
        """The parameters whose gradients a DistributedDataParallel averages, by their ids."""
        self.inside: dict[str, int] = {"step": 0, "backward": 0, "checkpoint": 0, "schedule": 0, "fetch": 0}
        """How deep the script is in each of these."""

    def write(self, event: Event) -> None:
        """Take an event down; ends the rehearsal where its time is up."""
        if len(self.journal.events) == self.ends_at:
            self.journal.line_asked_for = self.line()
            self._end(CUT)
        self.journal.events.append(event)
        if len(self.journal.events) % 256 == 0 and time.process_time() > self.limit:
            self._end(CUT)

    def note(self, text: str) -> None:
        if text not in self.journal.notes:
            self.journal.notes.append(text)

    @contextlib.contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """The script is in a step, a backward pass, a checkpoint, a schedule, or in what a loader calls."""
        self.inside[what] += 1
        try:
            yield
        finally:
            self.inside[what] -= 1

    def see_a_trainer(self) -> None:
        """The first one whose fit is going on; its next fits are counted."""
        if self.trainer is not None:
            return
        self.trainer, self.journal.trainer = trainer_around()
        if self.trainer is not None:
            self.journal.fits = 1
            kind = next(one for one in type(self.trainer).__mro__ if one.__module__ in TRAINERS)

            @instead_of(kind)
            def fit(run: Any, trainer: Any, *arguments: Any, **options: Any) -> Any:
                self.journal.fits += 1
                before = self.steps
                returned = run(trainer, *arguments, **options)
                if self.steps == before:
                    self.journal.fits_without_a_step.append(self.journal.fits)
                return returned

    def after_backward(self) -> None:
        self.backwards += 1
        self.begin_if_due()

    def begin_if_due(self) -> None:
        """Begin the lapse behind the real micro-batches; never inside a step, whose state would be half real."""
        if self.fast or self.inside["step"]:
            return
        all_stepped = len(self.steps_made) >= len(self.optimizers.things)
        self.fast = self.backwards >= (REAL_MICRO_BATCHES if all_stepped else MOST_REAL)
        if self.fast:
            self.journal.lapsed = True
            torch.set_num_threads(1)  # of what is left to compute; more of them wait for each other on a busy machine

    def is_own(self, file: str) -> bool:
        """Whether it is one of the script's own files: in its folder, or below it, and of no Python that lies there."""
        return is_below(file, self.folder) and "site-packages" not in file and not is_below(file, STANDARD_LIBRARY)

    def line(self) -> str:
        """The line of the script's own files that is being run; else the innermost outside of torch."""
        frame: Any = sys._getframe(1)
        innermost = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if not has_no_lines(file):
                place = f"{shortened(file)}:{frame.f_lineno}"
                if self.is_own(file):
                    return place
                innermost = innermost or place
            frame = frame.f_back
        return innermost


@functools.cache
def is_below(file: str, folder: str) -> bool:
    return Path(file).is_relative_to(folder)


def is_librarys(file: str) -> bool:
    """Whether a file is torch's, of what rehearses the script, or Python's own."""
    return file.startswith("<frozen") or any(is_below(file, folder) for folder in LIBRARIES)


def has_no_lines(file: str) -> bool:
    """Whether a file has no lines of a script."""
    return file == TEXT or is_librarys(file)


def trainer_around() -> tuple[Any, str]:
    """A Trainer whose ``fit`` is going on, and ``"lightning.pytorch"`` or ``"pytorch_lightning"``; else None."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "fit" and module in TRAINERS:
            return frame.f_locals.get("self"), module.removesuffix(".trainer.trainer")
        frame = frame.f_back
    return None, ""


def instead_of(*holders: Any) -> Callable[[Callable[..., Any]], Any]:
    """Put a function in the place of the one that a module or class has under its name, and that it is given first."""

    def put(function: Callable[..., Any]) -> Any:
        real = getattr(holders[0], function.__name__)

        @functools.wraps(real)
        def placed(*arguments: Any, **options: Any) -> Any:
            return function(real, *arguments, **options)

        for holder in holders:
            setattr(holder, function.__name__, placed)
        return placed

    return put


def instead_of_own(kind: type, function: Callable[..., Any]) -> None:
    """The same, in each class of a family that has a method of its own under that name, once."""
    for parent in kind.__mro__:
        real = vars(parent).get(function.__name__)
        if real is not None and not hasattr(real, "is_recorded"):
            instead_of(parent)(function).is_recorded = True


@functools.cache
def shortened(file: str) -> str:
    """``"train.py"``; of a library's file the path within it, ``"lightning/pytorch/callbacks/early_stopping.py"``."""
    _, found, within = file.rpartition("site-packages/")
    return within if found else Path(file).name
