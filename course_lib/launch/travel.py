"""What travels between the caller and a rank: the surroundings, the function, what it returns or raises.

Functions and classes of a notebook's cells travel by value. What cannot travel is named, down to the part.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import linecache
import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from course_lib._job import variables_of_a_job


def pack_surroundings(hide_gpus: bool) -> bytes:
    """What a rank must have before it loads anything else."""
    environment = dict(os.environ)
    for name in variables_of_a_job(environment):  # the ranks are a job of their own
        del environment[name]
    if hide_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # The source of notebook cells exists in this process alone; with it a rank's traceback shows the cell's lines.
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return pickle.dumps((environment, cells, multiprocessing.get_start_method(allow_none=True)))


def enter_surroundings(surroundings: bytes) -> None:
    environment, cells, start_method = pickle.loads(surroundings)
    multiprocessing.set_start_method(start_method, force=True)  # for its DataLoader's workers: as the caller's
    os.environ.clear()
    os.environ.update(environment)
    linecache.cache.update(cells)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return _dumps((fn, args))
    except Exception as error:
        culprits = _unsendable(fn, getattr(fn, "__name__", "fn"), set()) + _unsendable(args, "args", set())
        raise ValueError(
            f"this cannot be sent to a rank: {'; '.join(culprits) or error}. "
            "Make it inside the function, or pass in args what it is made from"
        ) from error


def unpack_call(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    fn, args = cloudpickle.loads(payload)
    # Plain pickle, as in all_gather_object, looks the caller's functions and classes up in __main__.
    main = vars(sys.modules["__main__"])
    main.update((name, value) for name, value in getattr(fn, "__globals__", {}).items() if name[:2] != "__")
    for cls in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()):
        if cls.__module__ == "__main__":
            main[cls.__qualname__] = cls
    return fn, args


def pack_value(value: Any) -> bytes:
    try:
        return _dumps(value)
    except Exception as error:
        culprits = _unsendable(value, "value", set())
        raise TypeError(f"what the function returned cannot be sent back: {'; '.join(culprits) or error}") from None


def unpack_value(content: bytes) -> Any:
    return _Unpickler(content).load()


def pack_exception(error: BaseException) -> bytes | None:
    """None if it cannot travel."""
    try:
        return _dumps(error)
    except Exception:
        return None


def unpack_exception(content: bytes | None) -> BaseException | None:
    if content is None:
        return None
    try:
        exception = unpack_value(content)
    except Exception:
        return None
    return exception if isinstance(exception, BaseException) else None


def _dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


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


def _code_of_file(name: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=name)


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


def _unsendable(value: Any, path: str, seen: set[int]) -> list[str]:
    """Name the smallest parts of ``value`` that cannot be pickled."""
    if id(value) in seen or isinstance(value, types.GetSetDescriptorType) or path.count(".") + path.count("[") > 50:
        return []
    seen.add(id(value))
    try:
        _dumps(value)
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
