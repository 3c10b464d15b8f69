"""What travels between the caller and a rank: the surroundings, the function, what it returns or raises.

Functions and classes of a notebook's cells travel by value, and what comes back has the caller's own classes.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import linecache
import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from course_lib._processes import variables_of_a_job

_ID_OF_CLASS = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
_CLASS_OF_ID = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
"""The classes that have travelled by value, and the names by which both sides know them."""


@dataclass(frozen=True)
class Call:
    """What the caller asks for."""

    world_size: int
    backend: str
    forked: bool
    """Whether the ranks are forks of the process that watches over them; else they are spawned."""
    timeout: float
    surroundings: bytes
    payload: bytes
    folder: str
    """The folder for temporary ones."""


def pack_surroundings(hide_gpus: bool) -> bytes:
    """What a rank must have before it loads anything else."""
    environment = dict(os.environ)
    for name in variables_of_a_job(environment):  # the ranks are a job of their own
        del environment[name]
    if hide_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # The source of notebook cells exists in this process alone; with it a rank's traceback shows the cell's lines.
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    start_method = multiprocessing.get_start_method(allow_none=True)
    return pickle.dumps((environment, os.getcwd(), sys.path, sys.argv, cells, start_method))


def enter_surroundings(surroundings: bytes) -> None:
    environment, folder, path, argv, cells, start_method = pickle.loads(surroundings)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:], sys.argv[:] = path, argv
    linecache.cache.update(cells)
    multiprocessing.set_start_method(start_method, force=True)  # for its DataLoader's workers: as the caller's


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return _dumps((fn, args))
    except Exception as error:
        raise ValueError(
            f"this cannot be sent to a rank: {_what_cannot(fn, args) or error}. "
            "Make it inside the function, or pass in args what it is made from"
        ) from error


def unpack_call(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    fn, args = cloudpickle.loads(payload)
    # Plain pickle, as in all_gather_object, looks the caller's functions and classes up in __main__.
    main = vars(sys.modules["__main__"])
    main.update((name, value) for name, value in getattr(fn, "__globals__", {}).items() if name[:2] != "__")
    main.update((cls.__qualname__, cls) for cls in list(_ID_OF_CLASS) if cls.__module__ == "__main__")
    _Answer.classes_of_the_caller = set(_CLASS_OF_ID)
    return fn, args


def pack_value(value: Any) -> bytes:
    try:
        return _dumps(value, _Answer)
    except Exception as error:
        raise TypeError(f"what the function returned cannot be sent back: {type(value).__name__}: {error}") from None


def pack_exception(error: BaseException) -> bytes | None:
    """None if it cannot travel."""
    with contextlib.suppress(Exception):
        return _dumps(error, _Answer)
    return None


def unpack_exception(content: bytes | None) -> BaseException | None:
    with contextlib.suppress(Exception):
        exception = pickle.loads(content or b"")
        return exception if isinstance(exception, BaseException) else None
    return None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends two kinds of objects as cloudpickle does not.

    A module of a class of its own, as ``torch.backends.cudnn`` is, goes by name: it cannot be pickled. And code keeps
    the name of its file, which cloudpickle leaves out from 3.1.3 on: without it no traceback of a rank shows a line of
    the caller's functions.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            name = obj.__name__
            if sys.modules.get(name) is obj:
                return importlib.import_module, (name,)
        if isinstance(obj, types.CodeType):
            make, arguments = self.dispatch_table[types.CodeType](obj)
            return _code_of_file, (obj.co_filename, make, arguments)
        return super().reducer_override(obj)


class _Answer(_Pickler):
    """Of a rank: the caller's classes go back by name, as the caller has them and their attributes already."""

    classes_of_the_caller: set[str] = set()  # noqa: RUF012 - a rank has one caller

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and _ID_OF_CLASS.get(obj) in self.classes_of_the_caller:
            return _class_of_id, (_ID_OF_CLASS[obj],)
        return super().reducer_override(obj)


def _dumps(value: Any, pickler: type[_Pickler] = _Pickler) -> bytes:
    with io.BytesIO() as file:
        pickler(file).dump(value)
        return file.getvalue()


def _class_of_id(number: str) -> type:
    return _CLASS_OF_ID[number]  # type: ignore[no-any-return]


def _code_of_file(name: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=name)


def _what_cannot(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The arguments that cannot be pickled, and the variables that a function takes from outside."""
    parts = {f"args[{index}]": value for index, value in enumerate(args)}
    with contextlib.suppress(TypeError, ValueError):  # no function of Python's, or a variable without a value
        outside = inspect.getclosurevars(fn)
        parts |= {**outside.globals, **outside.nonlocals}
    told = []
    for name, value in parts.items():
        try:
            _dumps(value)
        except Exception as error:
            told.append(f"{name} ({type(value).__name__}: {error})")
    return "; ".join(told)
