"""Numbers that came from a tensor: their classes, and what is computed of them stays one of them.

A held number is the number that it is, also to ``isinstance``, ``json`` and ``pickle``; NumPy computes with it and with
lists of it, and gives a held number or a :class:`HeldArray`. What becomes of a held number when it is compared is the
business of who watches: see :mod:`rehearse.scripts.values`.
"""

from __future__ import annotations

import dis
import functools
import importlib
import itertools
import math
import operator
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rehearse.scripts.lapse import is_below

ARITHMETIC = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ "
    "__rmod__ __pow__ __rpow__ __divmod__ __rdivmod__ __neg__ __pos__ __abs__ __round__"
).split()
HERE = str(Path(__file__).parent)
ASKING = ("isfinite", "isnan", "isinf", "isclose")
OF_ARRAYS = (
    "all any argmax argmin argsort astype copy cumsum item max mean min prod ravel reshape round "
    "squeeze std sum tolist var"
).split()
"""Methods of NumPy's arrays and numbers that give what is computed of one."""


class _ByNumPy:
    """NumPy's functions give held numbers where they are given one of these; of a list they do by :func:`held_call`."""

    answered: Callable[[bool], bool] = staticmethod(bool)
    """What becomes of a yes or no that NumPy gives."""

    def __array_ufunc__(self, function: Any, method: str, *values: Any, **options: Any) -> Any:
        result = getattr(function, method)(*plain(values), **plain(options))
        is_asked = type(result) is not np.bool_ or not _by_a_function_without_lines(sys._getframe(1))
        return _given(result) if is_asked else result

    def __array_function__(self, function: Any, types: Any, values: Any, options: Any) -> Any:
        result = function(*plain(values), **plain(options))
        return result if function in OF_KINDS else _given(result)


class HeldFloat(_ByNumPy, float):
    """A float that came from a tensor."""

    def __reduce__(self) -> Any:
        return float, (float(self),)


class HeldInt(_ByNumPy, int):
    """A whole number that came from a tensor."""

    def __reduce__(self) -> Any:
        return int, (int(self),)


class HeldFloat64(np.float64, _ByNumPy):  # type: ignore[misc]  # NumPy's own quarrel with float
    """NumPy's float, computed of held numbers; its first base is what NumPy takes its type from."""

    def __reduce__(self) -> Any:
        return np.float64, (float(self),)


class HeldFloat32(np.float32, _ByNumPy):
    """The same of half the width, as what is computed of a loss's ``numpy()``."""

    def __reduce__(self) -> Any:
        return np.float32, (float(self),)


class HeldInt64(np.int64, _ByNumPy):
    """NumPy's whole number, as a sum of counts, or the place of the smallest loss."""

    def __reduce__(self) -> Any:
        return np.int64, (int(self),)

    def __repr__(self) -> str:  # NumPy 2.0's own ends the process for a class of this kind
        return repr(np.int64(self))


class HeldArray(_ByNumPy, np.ndarray):  # type: ignore[misc]  # one __array_ufunc__ for all of them
    """NumPy's array, computed of held numbers, or of a tensor of one number."""

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()

    def __bool__(self) -> bool:
        return self.answered(bool(self.view(np.ndarray)))

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))


def _by_a_function_without_lines(frame: Any) -> bool:
    """Whether C compares, called from this line, as a generator's ``choice`` does with its ``p``; and not the line."""
    calls = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL"))
    return calls and not is_below(frame.f_code.co_filename, HERE)


NUMBERS: tuple[tuple[Any, Any], ...] = (
    (HeldFloat, float),
    (HeldInt, int),
    (HeldFloat64, np.float64),
    (HeldFloat32, np.float32),
    (HeldInt64, np.int64),
)
"""The held kinds, and what each is otherwise."""
OF_KINDS = (np.size, np.ndim, np.shape, np.isscalar, np.iterable, np.iscomplexobj, np.isrealobj, np.result_type)
"""Functions whose answers hang on no value."""
_FUNCTIONS = (np.ufunc, type(np.mean))
OF_NUMPY = (HeldFloat64, HeldFloat32, HeldInt64)


def is_held(value: Any) -> bool:
    return isinstance(value, _ByNumPy)


def held(value: Any) -> Any:
    """A number, or those of a tuple, a list or an array, as held ones."""
    if type(value) in (tuple, list):
        return type(value)(map(held, value))
    for kind, base in NUMBERS:
        if type(value) is base:
            return kind(value)
    return value.view(HeldArray) if type(value) is np.ndarray else value


def holds_one(value: Any) -> bool:
    """Whether it is a held number, or a list that NumPy would take one from; a tensor of one number is as good."""
    if type(value) in (tuple, list, deque):
        return any(map(holds_one, value))
    return is_held(value) or (isinstance(value, Tensor) and not value.ndim)


def held_call(function: Any, /, *values: Any, **options: Any) -> Any:
    """What a function of NumPy gives, where the script calls it."""
    if function in OF_KINDS or not any(map(holds_one, (*values, *options.values()))):
        return function(*values, **options)
    plain_values = [plain(value) for value in values]
    pairs = zip(values, plain_values, strict=True)
    lists = [(given, own, [*own]) for given, own in pairs if type(given) is list and given is not own]
    result = function(*plain_values, **plain(options))
    for given, own, before in lists:
        if any(map(operator.is_not, own, before)):  # it works in place, as np.random.shuffle
            theirs = dict(zip(map(id, before), given, strict=True))
            given[:] = [theirs[id(one)] for one in own]
    return _given(result)


class HeldFunction:
    """A function of NumPy that the script has given another name, as ``self.is_better = np.less``."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *values: Any, **options: Any) -> Any:
        return held_call(self.function, *values, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.function == (other.function if isinstance(other, HeldFunction) else other))

    def __hash__(self) -> int:
        return hash(self.function)

    def __repr__(self) -> str:
        return repr(self.function)

    def __reduce__(self) -> Any:
        return held_function, (self.function,)


@functools.cache
def _held_function(function: Any) -> HeldFunction:
    return HeldFunction(function)  # one of each, as the script may ask by `is`


def held_function(value: Any) -> Any:
    """What the script takes of NumPy and does not call: functions as those that hold, anything else as it is."""
    return _held_function(value) if isinstance(value, _FUNCTIONS) else value


def _given(value: Any) -> Any:
    """What NumPy gives of held numbers: more of them, or an answer that is asked for."""
    if isinstance(value, bool | np.bool_):
        return type(value)(_ByNumPy.answered(bool(value)))
    return held(value)


def plain(value: Any) -> Any:
    """A value without held numbers, in dicts, lists and tuples; what holds none is given back as it is."""
    if isinstance(value, HeldArray):
        return value.view(np.ndarray)
    for kind, base in NUMBERS:
        if isinstance(value, kind):
            return base(value)
    if type(value) is dict:
        made = {key: plain(part) for key, part in value.items()}
        return made if any(made[key] is not value[key] for key in value) else value
    if type(value) is deque:
        return plain(list(value))
    if type(value) in (list, tuple):
        parts = [plain(part) for part in value]
        changed = any(new is not old for new, old in zip(parts, value, strict=True))
        return type(value)(parts) if changed else value
    return value


def keep_what_is_computed(answered: Callable[[bool], bool]) -> None:
    """From here on, what is computed of a held number is held, and each answer about one is what ``answered`` gives."""
    _ByNumPy.answered = staticmethod(answered)
    for kind, base in NUMBERS:
        for name in ARITHMETIC:
            setattr(kind, name, _computing_plainly(name) if kind in OF_NUMPY else _computing(base, name))
        setattr(kind, "__hash__", base.__hash__)  # noqa: B010  # goes with __eq__
    for name in OF_ARRAYS:
        for of_numpy in (*OF_NUMPY, HeldArray):
            setattr(of_numpy, name, _computing_plainly(name))
    setattr(HeldArray, "__getitem__", _computing_plainly("__getitem__"))  # noqa: B010  # for a rehearsal alone, as the others
    _have_yaml_write_them()
    for module in (math, statistics):
        for name, compute in vars(module).copy().items():
            if callable(compute) and not isinstance(compute, type) and name[0] != "_":
                setattr(module, name, _asking(compute, answered) if name in ASKING else _computing_if_held(compute))


def _computing(base: type, name: str) -> Any:
    compute = getattr(base, name)
    with_ints = base is int

    def computed(value: Any, *others: Any) -> Any:
        if others and isinstance(others[0], np.generic):
            return NotImplemented  # by Python's rules it is for NumPy to compute, and so is the kind of the result
        result = compute(value, *others)
        if result is NotImplemented and with_ints and others and isinstance(others[0], float):
            # An int does not compute with a float; the float does, and its class knows of no held ones.
            operation = getattr(operator, name.strip("_").removeprefix("r"), None)
            if operation is not None and not name.startswith("__r"):
                return held(operation(float(value), float(others[0])))
        return held(result)

    return computed


def _computing_plainly(name: str) -> Any:
    """One of NumPy's methods, which compute by others: what they give is held once, at the end."""

    def computed(value: Any, *others: Any, **options: Any) -> Any:
        return _given(getattr(plain(value), name)(*plain(others), **options))

    return computed


def _computing_if_held(compute: Any) -> Any:
    """A function of numbers, or of iterables of them."""

    @functools.wraps(compute)
    def computed(*values: Any, **options: Any) -> Any:
        values = tuple(list(one) if isinstance(one, Iterable) else one for one in values)
        result = compute(*values, **options)
        given = itertools.chain.from_iterable(one if isinstance(one, list) else (one,) for one in values)
        return held(result) if any(map(is_held, given)) else result

    return computed


def _asking(ask: Any, answered: Callable[[bool], bool]) -> Any:
    @functools.wraps(ask)
    def asked(*values: Any, **options: Any) -> bool:
        answer: bool = ask(*values, **options)
        return answered(answer) if any(map(is_held, values)) else answer

    return asked


def _have_yaml_write_them() -> None:
    """As the numbers that they are; PyYAML goes by the exact class, where json and pickle do not."""
    try:
        representer: Any = importlib.import_module("yaml.representer")
    except ImportError:
        return
    for into in (representer.SafeRepresenter, representer.Representer):
        into.add_representer(HeldFloat, lambda dumper, value: dumper.represent_float(float(value)))
        into.add_representer(HeldInt, lambda dumper, value: dumper.represent_int(int(value)))
