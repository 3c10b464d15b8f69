"""What a trial writes lands in its own folder and is read back from there; nothing of the reader's changes.

Python's functions that open, make, move and remove are redirected: each path has a twin below the folder. A trial's
working directory is a twin as well, with links to what is in the real one, so that relative paths of C code and of
subprocesses end there too. What still aims elsewhere is refused: from Python by an audit hook, from C code and from
subprocesses by Linux's Landlock, where the kernel has it.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import io
import multiprocessing
import os
import platform
import shutil
import sqlite3
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

MOST_ENTRIES = 5_000
"""Of a directory that gets a twin with links to all of them."""
DIRECT = ("/dev/", "/proc/", "/sys/")
READING = [name for name in "stat lstat access readlink chdir statvfs".split() if hasattr(os, name)]
WRITING = "utime chmod truncate".split()
REMOVING = "remove unlink rmdir".split()


class WritesAFile(PermissionError):
    """The trial would have written to a file of the reader's."""


def write_only_below(folder: Path, *, written: str = "") -> None:
    """Redirect what is written, for the rest of this process and of those that it starts.

    ``written``: the name of the folder in it that holds the twins; one that is there already is gone on with.
    """
    sys.dont_write_bytecode = True
    tempfile.tempdir = str(folder)
    os.environ["TMPDIR"] = str(folder)
    inside = os.path.realpath(folder)
    # Of the sockets that workers are sent tensors by: a folder of this process's, made anew.
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    OwnFiles(inside, written or f"written-{os.getpid()}").redirect()
    _refuse_outside(inside)
    _restrict_by_landlock(inside)


class OwnFiles:
    """The twins of the paths that a trial writes to, below its folder."""

    def __init__(self, inside: str, written: str) -> None:
        self.inside, self.root = inside, os.path.join(inside, written)
        self.removed: set[str] = set()
        self.linked: set[str] = set()
        self.open = io.open
        self.real = {name: getattr(os, name) for name in (*READING, *WRITING, *REMOVING)}
        self.real |= {name: getattr(os, name) for name in ("open", "mkdir", "scandir", "rename", "replace")}
        os.makedirs(self.root, exist_ok=True)

    def place(self, path: Any, *, writes: bool = False, whole: bool = False) -> Any:
        """Where a path is found. ``writes``: and may be changed; ``whole``: what it held is not needed."""
        if not isinstance(path, str | bytes | os.PathLike):
            return path  # a file that is open already
        if path == ":memory:":
            return path
        absolute = os.path.abspath(os.fsdecode(path))
        if absolute.startswith(f"{self.root}/"):
            absolute = absolute.removeprefix(self.root)
        elif absolute.startswith((*DIRECT, f"{self.inside}/")) or absolute in (self.inside, self.root):
            return path
        twin = self.root + absolute
        gone = self._is_gone(absolute)
        if not writes:
            return twin if gone or self._is_there(twin) else absolute
        if os.path.isdir(os.path.dirname(absolute)):
            self._unfold(os.path.dirname(twin))
            if self._links_to(twin, absolute):  # a link to the reader's
                self.real["remove"](twin)
            if not whole and not gone and not self._is_there(twin) and os.path.isfile(absolute):
                with self.open(absolute, "rb") as held, self.open(twin, "wb") as copied:
                    shutil.copyfileobj(held, copied)
        self.removed.discard(absolute)
        return twin

    def _is_gone(self, absolute: str) -> bool:
        return any(absolute == one or absolute.startswith(f"{one}/") for one in self.removed)

    def _is_there(self, twin: str) -> bool:
        with contextlib.suppress(OSError):
            self.real["lstat"](twin)
            return True
        return False

    def _unfold(self, twin: str, links: int = 2) -> None:
        """Make a directory's twin, so that what is made there is made in the twin.

        It and the one above it have links to what is in them, for programs that are started there; those further up,
        which may hold thousands of files, are bare.
        """
        if twin == self.root:
            return
        self._unfold(os.path.dirname(twin), links - 1)
        absolute, entries = twin.removeprefix(self.root), []
        if links > 0 and twin not in self.linked:
            self.linked.add(twin)
            with contextlib.suppress(OSError):
                entries = [entry.name for entry in self.real["scandir"](absolute)]
        if os.path.islink(twin):
            self.real["remove"](twin)
        if not self._is_there(twin):
            self.real["mkdir"](twin)
        for entry in entries if len(entries) <= MOST_ENTRIES else ():
            link = os.path.join(twin, entry)
            if not self._is_there(link) and not self._is_gone(os.path.join(absolute, entry)):
                os.symlink(os.path.join(absolute, entry), link)

    def _gone(self, path: Any) -> Any:
        """Where a path is that is about to go."""
        twin = self.place(path, writes=True)
        if isinstance(twin, str) and twin.startswith(f"{self.root}/"):
            if os.path.isdir(path):
                self._unfold(twin)
            self.removed.add(twin.removeprefix(self.root))
        return twin

    def _entries(self, path: Any) -> Iterator[Any]:
        """What is in a directory: in its twin, and of the real one what is in none."""
        if isinstance(path, int):
            yield from self.real["scandir"](path)
            return
        absolute = os.path.abspath(os.fsdecode(path)).removeprefix(self.root)
        seen: set[str] = set()
        twin, gone = self.root + absolute, self._is_gone(absolute)
        places = [place for place in (twin, *([] if gone else [absolute])) if self._is_there(place)]
        for place in places or [twin if gone else absolute]:
            for entry in self.real["scandir"](place):
                own = os.path.join(absolute, entry.name)
                if entry.name in seen or own in self.removed or self._links_to(entry.path, own):
                    continue
                seen.add(entry.name)
                yield _Entry(entry, path)

    def _links_to(self, link: str, target: str) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.real["readlink"](link) == target)
        return False

    def redirect(self) -> None:
        with contextlib.suppress(OSError):
            here = os.getcwd()
            if not Path(here).is_relative_to(self.inside):
                self._unfold(self.root + here)
                os.chdir(self.root + here)

        def open_file(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            writes = bool(set(mode) & set("wax+"))
            return self.open(self.place(file, writes=writes, whole="w" in mode), mode, *arguments, **options)

        def open_number(path: Any, flags: int, *arguments: Any, **options: Any) -> Any:
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            if options.get("dir_fd") is None:
                path = self.place(path, writes=writes, whole=bool(flags & os.O_TRUNC))
            return self.real["open"](path, flags, *arguments, **options)

        def make(path: Any, *arguments: Any, **options: Any) -> None:
            if os.path.lexists(path):
                raise FileExistsError(17, "File exists", os.fsdecode(path))
            self.real["mkdir"](self.place(path, writes=True), *arguments, **options)

        def move(source: Any, target: Any, **options: Any) -> None:
            twin = self._gone(source)
            self.real["replace"](twin, self.place(target, writes=True, whole=True), **options)

        def scan(path: Any = ".") -> Any:
            return _Entries(self._entries(path))

        def redirected(real: Callable[..., Any], place: Callable[..., Any], number: int = 0) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                places = list(arguments)
                if len(places) > number and options.get("dir_fd") is None and not options.get("uri"):
                    places[number] = place(places[number])
                return real(*places, **options)

            return call

        def changed(path: Any) -> Any:
            return self.place(path, writes=True)

        def listed(path: Any = ".") -> list[Any]:
            return [entry.name for entry in self._entries(path)]

        for module in (builtins, io):
            vars(module).update(open=open_file)
        vars(os).update(open=open_number, mkdir=make, rename=move, replace=move, scandir=scan, listdir=listed)
        for names, place in ((READING, self.place), (WRITING, changed), (REMOVING, self._gone)):
            vars(os).update({name: redirected(self.real[name], place) for name in names})
        vars(torch).update(save=redirected(torch.save, changed, 1))
        vars(shutil).update(rmtree=redirected(shutil.rmtree, self._gone))
        for module in (sqlite3, sqlite3.dbapi2):
            vars(module).update(connect=redirected(sqlite3.dbapi2.connect, changed))


class _Entry(os.PathLike[Any]):
    """One of them, under the path that was asked for."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        self._entry = entry
        self.name: Any = os.fsencode(entry.name) if isinstance(folder, bytes) else entry.name
        self.path = os.path.join(folder, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


class _Entries:
    """What ``os.scandir`` gives: an iterator that is closed as a context."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held open."""


def _is_open(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a path is one in a directory that is open already."""
    return event not in ("open", "os.truncate") and arguments[-1] not in (-1, None)


def _refuse_outside(inside: str) -> None:
    """Refuse what Python would still change elsewhere, by a function that was imported by its own name."""
    first = dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.rename"), 0)
    changes = first | {"os.link": 1, "os.symlink": 1}
    # By event: which of its arguments names what is changed. The last one is a directory that is open, or -1.

    def judge(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            if not writes and not (isinstance(mode, str) and set(mode) & set("wax+")):
                return
        elif event in changes:
            path = arguments[changes[event]]
        else:
            return
        if not isinstance(path, str | bytes | os.PathLike) or _is_open(event, arguments):
            return  # a file, or a directory, that is open already
        name = os.path.abspath(os.fsdecode(path))
        if event == "open":
            name = os.path.realpath(name)
        if not name.startswith((f"{inside}/", *DIRECT)):
            raise WritesAFile(f"the trial was not allowed to write to {os.fsdecode(path)}")

    sys.addaudithook(judge)


# ----------------------------------------------------------------------------------------------------- Linux's Landlock


CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls; the same numbers on every architecture."""
WRITES = 0b1_1111_1111_0010
"""Write a file, remove and make whatever there is: bits 1 and 4 to 12 of the first version."""
MOVE, TRUNCATE = 1 << 13, 1 << 14
"""From the second and from the third version on; a right to move that nobody names is never given."""
NO_NEW_PRIVILEGES = 38


def landlock_version() -> int:
    """Of this kernel's Landlock; 0 where it has none."""
    if platform.system() != "Linux":
        return 0
    return max(0, int(_system_call(CREATE_RULESET, None, 0, 1)))


def _restrict_by_landlock(inside: str) -> None:
    version = landlock_version()
    if not version:
        return
    rights = WRITES | (MOVE if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    ruleset = _system_call(CREATE_RULESET, struct.pack("=Q", rights), 8, 0)
    if ruleset < 0:
        return
    for place in (inside, *DIRECT):
        with contextlib.suppress(OSError):
            folder = os.open(place, os.O_PATH)
            _system_call(ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, folder), 0)
            os.close(folder)
    ctypes.CDLL(None, use_errno=True).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _system_call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _system_call(number: int, *arguments: Any) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return int(call(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)))
