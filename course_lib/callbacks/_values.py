"""Values that a run keeps beside its tensors, as a checkpoint holds them: looked at, copied and put back.

Numbers, words, tensors, NumPy arrays, and what lists, tuples, dicts, sets and deques hold of them.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
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
DICT_NAMES = tuple(kind.__name__ for kind in DICTS)
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
    """A tensor behind no graph, or a NumPy array or number that torch has a type for."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout is torch.strided and (value.is_leaf or not value.requires_grad)
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
    level = [*value.keys(), *value.values()] if isinstance(value, dict) else tuple(value)
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


def tensors_only(value: Any) -> bool:
    """Whether it is a tensor that can be kept, or a list or tuple of such."""
    tensors = value if type(value) in (list, tuple) else (value,)
    return bool(tensors) and all(isinstance(one, Tensor) and _is_of_numbers(one) for one in tensors)


def shapes_of(value: Any) -> set[torch.Size]:
    return {one.shape for one in (value if type(value) in (list, tuple) else (value,))}


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
    left, count, numbers = [container], 0, 0
    level: Collection[Any]
    while left:
        one = left.pop()
        level = [*one.keys(), *one.values()] if isinstance(one, dict) else tuple(one)  # a thread may go on filling it
        count += len(level)
        numbers += sum(value.size for value in level if type(value) is np.ndarray)
        if count > LONGEST or numbers > LARGEST_ARRAY:
            raise _NotKept
        yield head_of(one)
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
    return {"kind": kind, "items": list(map(copy_of, tuple(value))), "maxlen": getattr(value, "maxlen", None)}


def fits(own: Any, kept: Any) -> bool:
    """Whether what :func:`copy_of` was given can stand in the place of ``own``: not in that of another length."""
    if not isinstance(kept, dict) or "kind" not in kept or type(own) not in (list, set, deque, *DICTS):
        return True
    if isinstance(own, deque):
        return own.maxlen == kept["maxlen"]
    return isinstance(own, dict) == (kept["kind"] in DICT_NAMES) and len(own) == len(kept["items"])


def put_value(own: Any, kept: Any, device: torch.device) -> Any:
    """What :func:`copy_of` was given; a tensor or an array in ``own`` itself, as it may have another name as well.

    Containers are made anew: their first contents may be one thing several times, or somebody else's as well.
    """
    if not isinstance(kept, dict):
        return kept
    if "tensor" in kept:
        return _put_tensor(own, kept["tensor"].to("cpu" if kept["on_cpu"] else device))
    if "array" in kept:
        return _put_array(own, kept)
    if kept["kind"] in DICT_NAMES:
        keys = [put_value(None, key, device) for key, _ in kept["items"]]
        mine = _once(own.get(key) if isinstance(own, dict) else None for key in keys)
        values = [put_value(one, item, device) for one, (_, item) in zip(mine, kept["items"], strict=True)]
        return _dict_like(own, kept["kind"], zip(keys, values, strict=True))
    items = kept["items"]
    mine = list(own)[: len(items)] if isinstance(own, list | tuple | deque) else []
    mine = _once([*mine, *[None] * (len(items) - len(mine))])
    values = [put_value(one, item, device) for one, item in zip(mine, items, strict=True)]
    if kept["kind"] == "deque":
        return deque(values, kept["maxlen"])
    return {"list": list, "tuple": tuple, "set": set}[kept["kind"]](values)


def _once(values: Iterable[Any]) -> list[Any]:
    """Those that come once; None in the place of others, which stand for several."""
    values = list(values)
    times = Counter(map(id, values))
    return [value if times[id(value)] == 1 else None for value in values]


def _dict_like(own: Any, kind: str, items: Iterable[tuple[Any, Any]]) -> Any:
    made: dict[Any, Any]
    if kind == "defaultdict" and isinstance(own, defaultdict):
        made = defaultdict(own.default_factory)
    else:
        made = OrderedDict() if kind == "OrderedDict" else Counter() if kind == "Counter" else {}
    for key, value in items:  # a Counter's update() would count them
        made[key] = value
    return made


def _put_array(own: Any, kept: dict[str, Any]) -> Any:
    array = kept["array"].numpy().copy()
    if kept["is_number"]:
        return array[()]
    alike = type(own) is np.ndarray and (own.shape, own.dtype) == (array.shape, array.dtype)
    if alike and own.flags.writeable:
        own[...] = array
        return own
    return array


def _put_tensor(own: Any, value: Tensor) -> Tensor:
    alike = isinstance(own, Tensor) and (own.shape, own.dtype) == (value.shape, value.dtype)
    if isinstance(own, Tensor) and alike and not own.is_inference() and not is_expanded(own):
        with torch.no_grad():
            own.copy_(value)  # in place: it may be another name for a parameter
        return own
    return value.clone()
