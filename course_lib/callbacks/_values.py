"""Values that a run keeps beside its tensors, as a checkpoint holds them: looked at, copied and put back.

Numbers, words, tensors, NumPy arrays, and what lists, tuples, dicts, sets and deques hold of them.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib._tensors import is_expanded, version_of

PLAIN = (bool, int, float, complex, str, type(None))
AT_ONCE = frozenset(PLAIN)
LARGEST = 1_000_000
"""Of a tensor that is kept, in numbers: a larger one (a batch, generated images) would make every checkpoint long."""
LARGEST_ARRAY = 100_000
"""Of a NumPy array, which is read through before each window, as it has no version."""
LONGEST = 1_000
"""Of a container, with all that is in those within it: it is read through before each window, too."""
DICTS = (dict, OrderedDict, Counter, defaultdict)
NOTES = (list, set, *DICTS)
CONTAINERS = (list, tuple, set, deque, *DICTS)


class Look(tuple[Any, ...]):
    """What tells whether something has moved, where it is not the thing itself."""


class _NotKept(Exception):
    """Something is in a container that no checkpoint is given."""


def is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(is_plain, value)))


def can_be_looked_at(value: Any) -> bool:
    return is_plain(value) or type(value) in CONTAINERS or _is_of_numbers(value)


def _is_of_numbers(value: Any) -> bool:
    """A tensor without a graph, or a NumPy array or number that torch has a type for."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
    if isinstance(value, np.generic):
        return _torch_has(value.dtype)
    return type(value) is np.ndarray and _torch_has(value.dtype) and value.size <= LARGEST_ARRAY


def _torch_has(dtype: np.dtype[Any]) -> bool:
    """None of dates and texts, of more than double precision, or in another machine's order of bytes."""
    return dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def look_of(value: Any) -> Any:
    """What is another one when the value has been moved."""
    if isinstance(value, Tensor):
        return Look(version_of(value))
    if isinstance(value, np.ndarray):
        return Look((value.shape, value.dtype, zlib.crc32(value.tobytes())))
    if is_plain(value) or type(value) not in CONTAINERS:
        return value
    head = head_of(value)
    if len(value) > LONGEST:
        return head
    level = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if AT_ONCE.issuperset(map(type, level)):
        return Look((*head, *level))
    try:
        return Look((*head, *map(look_of, _within(value))))
    except _NotKept:
        return head


def head_of(value: Any) -> Look:
    """What the look of a container begins with."""
    return Look((type(value), len(value)) if type(value) in CONTAINERS else ())


def is_a_note(before: Any, now: Any) -> bool:
    """Whether a list, set or dict has another length than before, by its looks: mostly notes of what was seen."""
    kind = now[0] if isinstance(now, Look) and now else None
    return kind in NOTES and not (isinstance(before, Look) and before[:2] == now[:2])


def holds_results(container: Any) -> bool:
    """Whether a tensor or a float is in it, as a loss would be; indices are mere notes."""
    try:
        return any(isinstance(one, Tensor | np.ndarray | float) for one in _within(container))
    except _NotKept:
        return any(isinstance(one, Tensor) for one in container)  # with a graph


def why_not_kept(value: Any) -> str:
    """What it is, where it is too large or holds something else; else ``""``."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.numel():,} numbers" if value.numel() > LARGEST else ""
    if is_plain(value) or type(value) not in CONTAINERS:
        return ""
    try:
        numbers = sum(one.numel() for one in _within(value) if isinstance(one, Tensor))
    except _NotKept as holds:
        return f"a {type(value).__name__} of {len(value):,}{holds}"
    return f"a {type(value).__name__} of tensors of {numbers:,} numbers" if numbers > LARGEST else ""


def _within(container: Any) -> Iterator[Any]:
    """All that it holds, and what the containers in it hold, each with its kind and length ahead.

    Raises:
        _NotKept: It is too long, or holds something else.
    """
    left, count = [container], 0
    level: Collection[Any]
    while left:
        one = left.pop()
        level = [*one.keys(), *one.values()] if isinstance(one, dict) else one
        count += len(level)
        if count > LONGEST:
            raise _NotKept
        yield Look((type(one), len(one)))
        for value in level:
            if is_plain(value) or _is_of_numbers(value):
                yield value
            elif type(value) in CONTAINERS and len(left) < LONGEST:
                left.append(value)
            else:
                raise _NotKept(f", which holds a {type(value).__name__}")


def copy_of(value: Any) -> Any:
    """In a form that ``torch.load(weights_only=True)`` takes as well; to be put back by :func:`put_value`."""
    if isinstance(value, Tensor):
        return {"tensor": value.detach().clone(), "on_cpu": value.device.type == "cpu"}
    if isinstance(value, np.ndarray | np.generic):
        return {"array": torch.from_numpy(np.array(value)), "is_number": isinstance(value, np.generic)}
    if is_plain(value):
        return value
    kind = type(value).__name__
    if isinstance(value, dict):
        return {"kind": kind, "items": [(copy_of(key), copy_of(one)) for key, one in value.items()]}
    return {"kind": kind, "items": list(map(copy_of, value)), "maxlen": getattr(value, "maxlen", None)}


def put_value(own: Any, kept: Any, device: torch.device) -> Any:
    """What :func:`copy_of` was given; in ``own`` itself where that is alike, as it may have another name as well."""
    if not isinstance(kept, dict):
        return kept
    if "tensor" in kept:
        return _put_tensor(own, kept["tensor"].to("cpu" if kept["on_cpu"] else device))
    if "array" in kept:
        array = kept["array"].numpy().copy()
        return array[()] if kept["is_number"] else array
    if kept["kind"] in [kind.__name__ for kind in DICTS]:
        return _put_dict(own, kept, device)
    mine = list(own) if isinstance(own, list | tuple | deque) else []
    mine += [None] * (len(kept["items"]) - len(mine))
    items = [put_value(one, item, device) for one, item in zip(mine, kept["items"], strict=False)]
    if kept["kind"] == "tuple":
        return tuple(items)
    if type(own).__name__ != kept["kind"] or getattr(own, "maxlen", None) != kept["maxlen"]:
        own = deque(maxlen=kept["maxlen"]) if kept["kind"] == "deque" else set() if kept["kind"] == "set" else []
    own.clear()
    own.update(items) if isinstance(own, set) else own.extend(items)
    return own


def _put_dict(own: Any, kept: dict[str, Any], device: torch.device) -> Any:
    if not isinstance(own, dict):
        own = OrderedDict() if kept["kind"] == "OrderedDict" else Counter() if kept["kind"] == "Counter" else {}
    keys = [put_value(None, key, device) for key, _ in kept["items"]]
    items = {key: put_value(own.get(key), one, device) for key, (_, one) in zip(keys, kept["items"], strict=True)}
    own.clear()
    own.update(items)
    return own


def _put_tensor(own: Any, value: Tensor) -> Tensor:
    alike = isinstance(own, Tensor) and (own.shape, own.dtype) == (value.shape, value.dtype)
    if isinstance(own, Tensor) and alike and not own.is_inference() and not is_expanded(own):
        with torch.no_grad():
            own.copy_(value)  # in place: it may be another name for a parameter
        return own
    return value.clone()
