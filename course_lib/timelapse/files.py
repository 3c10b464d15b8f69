"""The files of a script that is played: read where they are, and written in a folder of the play's own.

What was written is read back from there, under the path that the script gave. This holds for what Python opens and
for what torch and safetensors save; what a program that the script starts writes is that program's own.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course_lib.timelapse.lapse import take_place

DEVICES = ("/dev/", "/proc/", "/sys/")


class OwnFiles:
    """Takes the place of what opens, makes, moves, lists and removes files; ``folder`` is the play's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder.resolve())
        self.written = os.path.join(self.folder, "files")
        self.removed: set[str] = set()
        self._stat = os.stat

    def to_read(self, path: Any) -> Any:
        """Where a path is read from."""
        own = self._own(path)
        if own is None:
            return path
        return own if self._is_there(own) or os.path.abspath(os.fsdecode(path)) in self.removed else path

    def to_write(self, path: Any, *, keep: bool = False) -> Any:
        """Where a path is written to; with ``keep``, what it holds is there already."""
        own = self._own(path)
        if own is None:
            return path
        real = os.path.abspath(os.fsdecode(path))
        parent, own_parent = os.path.dirname(real), os.path.dirname(own)
        if not self._is_there(own_parent) and self._is_there(parent):
            with self._untouched():
                os.makedirs(own_parent, exist_ok=True)
        if keep and not self._is_there(own) and self._is_there(real) and real not in self.removed:
            with self._untouched():
                shutil.copy2(real, own)
        self.removed.discard(real)
        return own

    def _own(self, path: Any) -> str | None:
        """The path in the play's folder; None for an open file, a device, and what is in that folder already."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        real = os.path.abspath(os.fsdecode(path))
        if real.startswith((self.folder + os.sep, *DEVICES)) or real == self.folder:
            return None
        return os.path.join(self.written, real.lstrip(os.sep))

    def _is_there(self, path: str) -> bool:
        try:
            self._stat(path)
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """Within, paths mean what they say."""
        own, self._own = self._own, lambda path: None  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            self._own = own  # type: ignore[method-assign]

    # ------------------------------------------------------------------------------------------------ in their place

    def install(self) -> None:
        take_place(builtins, self._opening(builtins.open))
        io.open = builtins.open
        take_place(os, *self._listing(), *self._changing(), self._opening_low())
        for name in ("stat", "lstat", "access", "readlink"):
            take_place(os, self._reading(getattr(os, name)))
        for name in ("utime", "chmod", "truncate"):
            take_place(os, self._touching(getattr(os, name)))
        take_place(sqlite3, self._touching(sqlite3.connect))
        vars(shutil)["_use_fd_functions"] = False  # it would remove by numbers of open folders

    def _opening(self, real: Any) -> Any:
        @functools.wraps(real)
        def open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            writes = set(mode) & set("wax+")
            file = self.to_write(file, keep="w" not in mode) if writes else self.to_read(file)
            return real(file, mode, *arguments, **options)

        return open

    def _opening_low(self) -> Any:
        real = os.open

        @functools.wraps(real)
        def open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if options.get("dir_fd") is None:
                writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                path = self.to_write(path, keep=not flags & os.O_TRUNC) if writes else self.to_read(path)
            return real(path, flags, *arguments, **options)

        return open

    def _reading(self, real: Any) -> Any:
        @functools.wraps(real)
        def read(path: Any, *arguments: Any, **options: Any) -> Any:
            there = path if options.get("dir_fd") is not None else self.to_read(path)
            return real(there, *arguments, **options)

        return read

    def _touching(self, real: Any) -> Any:
        @functools.wraps(real)
        def touch(path: Any, *arguments: Any, **options: Any) -> Any:
            return real(self.to_write(path, keep=True), *arguments, **options)

        return touch

    def _listing(self) -> tuple[Any, ...]:
        names_in, entries_in = os.listdir, os.scandir

        @functools.wraps(names_in)
        def listdir(path: Any = ".") -> list[Any]:
            own = self._own(path)
            if own is None or not self._is_there(own):
                names = names_in(path)
            else:
                names = sorted({*names_in(own), *(names_in(path) if self._is_there(os.fsdecode(path)) else ())})
            return [name for name in names if self._is_listed(path, name)]

        @functools.wraps(entries_in)
        def scandir(path: Any = ".") -> Any:
            own = self._own(path)
            entries: dict[Any, Any] = {}
            for place in (path, own):
                if place is not None and ((place is path and own is None) or self._is_there(os.fsdecode(place))):
                    entries |= {entry.name: entry for entry in entries_in(place)}
            if not entries and (own is None or not self._is_there(own)):
                entries_in(path).close()  # raises where there is no such folder
            return _Entries([entry for name, entry in entries.items() if self._is_listed(path, name)])

        return listdir, scandir

    def _is_listed(self, path: Any, name: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True
        return os.path.join(os.path.abspath(os.fsdecode(path)), os.fsdecode(name)) not in self.removed

    def _changing(self) -> tuple[Any, ...]:
        move, make, drop, drop_folder = os.replace, os.mkdir, os.unlink, os.rmdir

        @functools.wraps(make)
        def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
            there = self.to_read(path)
            make(there if self._is_there(os.fsdecode(there)) else self.to_write(path), *arguments, **options)

        @functools.wraps(move)
        def replace(src: Any, dst: Any, **options: Any) -> None:
            move(self.to_write(src, keep=True), self.to_write(dst), **options)
            self._hide(src)

        @functools.wraps(drop)
        def unlink(path: Any, **options: Any) -> None:
            self._drop(drop, path, options)

        @functools.wraps(drop_folder)
        def rmdir(path: Any, **options: Any) -> None:
            self._drop(drop_folder, path, options)

        os.rename, os.remove = replace, unlink
        return mkdir, replace, unlink, rmdir

    def _drop(self, drop: Any, path: Any, options: dict[str, Any]) -> None:
        own = None if options.get("dir_fd") is not None else self._own(path)
        if own is None or not (self._is_there(own) or self._is_there(os.fsdecode(path))):
            drop(path, **options)
            return
        if self._is_there(own):
            drop(own)
        self._hide(path)

    def _hide(self, path: Any) -> None:
        """What is really there is gone for the script."""
        if self._own(path) is not None:
            self.removed.add(os.path.abspath(os.fsdecode(path)))


class _Entries:
    """What ``os.scandir`` returns: an iterator, and a context manager."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    close = __exit__
