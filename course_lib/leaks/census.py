"""What is alive after a step: containers and their lengths, tensors, the autograd graph behind them, processes.

`torch.cuda.memory_allocated` says how much, never whose, and does not see the CPU. Python's garbage collector knows
every container there is, and so every tensor that Python can reach, and from these the graphs.

    with Census() as census:
        census.begin()                             # puts aside what is alive now: only what comes later is searched
        step()
        census.count().tensors
"""

from __future__ import annotations

import functools
import gc
import heapq
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib._tensors import bytes_by_storage
from course_lib.leaks.graphs import graph_roots
from course_lib.leaks.processes import Children, resident_bytes

LruCache: Any = type(functools.lru_cache(lambda: None))
# As the builtin types count it: a subclass's own `__len__` is the caller's code.
_LENGTHS: dict[type, Callable[[Any], int]] = {
    list: list.__len__,
    dict: dict.__len__,
    set: set.__len__,
    deque: deque.__len__,
    LruCache: lambda cache: int(cache.cache_info().currsize),
}
_MOST_ROOTS = 50
_SHORT = 1000
"""Elements of a list up to which they are looked at: that copies the pages that a dataset shares with workers."""
# What `map(sys.getrefcount, objects)` says of an object that only the list `objects` holds.
_ALONE = next(map(sys.getrefcount, [[]]))


@dataclass(frozen=True)
class Count:
    """One look after a step. `lengths` has what is no longer as at the beginning: lengths of containers, then the bytes
    of the arrays in each holder."""

    tensors: int
    tensor_bytes: int
    graph_nodes: int
    host_bytes: int
    worker_bytes: int
    device_bytes: int
    lengths: dict[int, int]


class Census:
    """Counts what is alive, from `begin` on. It holds the containers of that moment until it is left.

    `gc.freeze` puts aside what is alive at the beginning, so that a look costs milliseconds and copies no pages that
    are shared with DataLoader workers. What a caller had frozen before is not watched. For such a caller, everything
    that is alive at the end is frozen, as `gc.freeze` cannot choose.
    """

    def __init__(self) -> None:
        self.groups: dict[type, list[Any]] = {}
        """The containers, by the builtin type that they are of; under `object`, what else holds an array itself."""
        self.with_arrays: list[tuple[type, int]] = []
        """Where in `groups` there are containers that hold an array themselves."""
        self.lengths = np.zeros(0, np.int64)
        self.tensors_before: list[weakref.ref[Tensor]] = []
        self.graph_sizes: Counter[int] = Counter()
        """The nodes that each graph of the first look had, for itself and in all."""
        self.storage_sizes: Counter[int] = Counter()
        """How many storages have so many bytes at the first look."""
        self.array_sizes: set[int] = set()
        """The bytes of each array that was there at the beginning."""
        self._children = Children()

    def __enter__(self) -> Census:
        self._frozen_before = frozen_by_caller()
        self.groups = {kind: [] for kind in (*_LENGTHS, object)}
        self._put_aside()
        return self

    def begin(self) -> None:
        """Put aside what a warm-up has made, too. What grows from here on is counted.

        Workers that the warm-up forks share their pages with this process until one of the two writes to them, if only
        a reference count. So `__enter__` has already looked at what is older than the workers.
        """
        self._children.private_bytes()  # what starts is not to be seen as growing
        self._put_aside()
        self.lengths = self._lengths()
        self.array_sizes = {array.nbytes for holder in self.array_holders() for array in arrays_in(holder)}

    def _put_aside(self) -> None:
        gc.collect()
        objects = gc.get_objects()
        mine = {id(self.groups), id(self.tensors_before), *map(id, self.groups.values())}
        # gc does not track a dict of numbers, strings or arrays; what holds it is tracked. Long lists are left out, as
        # a look at their elements would copy the pages of a dataset; and modules, as Python before 3.12.6 corrupts a
        # list of asyncio's when it is asked what that module holds (python/cpython #122695).
        left_out = (list, tuple, set, deque, ModuleType)
        types = set(map(type, objects))
        skipped = {t for t in types if issubclass(t, left_out)}
        rows = {t for t in skipped if issubclass(t, list | tuple)}
        holders = [o for o in objects if type(o) not in skipped or (type(o) in rows and len(o) <= _SHORT)]
        objects += {id(o): o for o in gc.get_referents(*holders) if type(o) is dict and not gc.is_tracked(o)}.values()
        # A dict may have been found before, untracked.
        mine.update(map(id, self.groups[dict]))
        kinds = {t: next((k for k in _LENGTHS if issubclass(t, k)), None) for t in types | {dict}}
        for o in objects:
            kind = kinds[type(o)]
            if kind is not None and o is not objects and id(o) not in mine:
                self.groups[kind].append(o)
        inner = {id(o) for cache in self.groups[LruCache] for o in gc.get_referents(cache)}
        self.groups[dict] = [o for o in self.groups[dict] if id(o) not in inner]
        self.tensors_before += [weakref.ref(o) for o in objects if issubclass(type(o), Tensor)]
        known = {id(self.groups[kind][i]) for kind, i in self.with_arrays} | {id(o) for o in self.groups[object]}
        with_arrays = {id(o): o for o in _holders_of_arrays(holders) if id(o) not in mine | known}
        for kind in (list, dict, deque):
            places = [(kind, i) for i, o in enumerate(self.groups[kind]) if with_arrays.pop(id(o), None) is not None]
            self.with_arrays += places
        self.groups[object] += with_arrays.values()
        del objects, o, holders, with_arrays
        gc.freeze()

    def __exit__(self, *_: object) -> None:
        self.thaw()
        if self._frozen_before:
            gc.freeze()

    def thaw(self) -> None:
        """Let go of what was put aside, for a search that has to see it. Nothing can be counted after that."""
        # An error's traceback keeps this object for as long as somebody keeps the error.
        self.groups, self.with_arrays, self.lengths, self.tensors_before = {}, [], np.zeros(0, np.int64), []
        gc.unfreeze()

    def count(self) -> Count:
        gc.collect()
        tensors = self.tensors()
        roots = graph_roots(tensors, {})
        if not self.graph_sizes:
            newest, older = roots[-_MOST_ROOTS:], roots[:-_MOST_ROOTS]
            largest = heapq.nlargest(_MOST_ROOTS, older, key=lambda root: len(root[1]))
            whole = [len(nodes) for tensor, _ in newest + largest for _, nodes in graph_roots([tensor], {})]
            self.graph_sizes = Counter([0, *(len(nodes) for _, nodes in roots), *whole])
            self.storage_sizes = Counter(bytes_by_storage(tensors).values())
        workers = self._children.private_bytes()
        return Count(
            len(tensors),
            sum(bytes_by_storage(tensors).values()),
            sum(len(nodes) for _, nodes in roots),
            resident_bytes(),
            workers,
            _device_bytes(),
            self._changed_lengths(),
        )

    def tensors(self) -> list[Tensor]:
        """All that Python reaches, and the `.grad` of leaves, which C++ alone may hold."""
        found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        found += [tensor for ref in self.tensors_before if (tensor := ref()) is not None]
        grads = [t.grad for t in found if t.is_leaf and t.grad is not None]
        return list({id(t): t for t in found + grads}.values())

    def containers(self) -> list[Any]:
        """In the order of `lengths`, which goes on with `array_holders`."""
        return [o for kind in _LENGTHS for o in self.groups[kind]]

    def array_holders(self) -> list[Any]:
        return self.groups[object] + [self.groups[kind][i] for kind, i in self.with_arrays]

    def _lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        lengths = [_of_each(length, self.groups[kind]) for kind, length in _LENGTHS.items()]
        return np.concatenate([*lengths, _of_each(_array_bytes, self.array_holders())])

    def _changed_lengths(self) -> dict[int, int]:
        for kind in (list, dict, set, deque, object):
            group = self.groups[kind]
            for i in np.flatnonzero(_of_each(sys.getrefcount, group) == _ALONE).tolist():
                group[i] = kind()  # this list alone holds it: the run has let it go
        now = self._lengths()
        changed = np.flatnonzero(now != self.lengths)
        return dict(zip(changed.tolist(), now[changed].tolist(), strict=True))


def arrays_in(*holders: Any) -> list[np.ndarray]:
    """The arrays with memory of their own that these hold themselves, or in a dict that gc does not track."""
    held = gc.get_referents(*holders)
    held += [value for o in held if type(o) is dict and not gc.is_tracked(o) for value in o.values()]
    return [o for o in held if issubclass(type(o), np.ndarray) and o.base is None]


def _array_bytes(holder: Any) -> int:
    return sum(array.nbytes for array in arrays_in(holder))


def _holders_of_arrays(objects: list[Any]) -> list[Any]:
    """Of a thousand objects at once, as hardly any holds an array."""
    found = []
    for i in range(0, len(objects), 1000):
        some = objects[i : i + 1000]
        if arrays_in(*some):
            found += [o for o in some if not isinstance(o, type | FrameType) and arrays_in(o)]
    return found


def frozen_by_caller() -> bool:
    """Whether somebody called `gc.freeze`. Its count doesn't tell, as some releases of Python 3.12 start with some."""
    return not any(o is vars(torch) for o in gc.get_objects())


def _of_each(number: Callable[[Any], int], group: list[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(map(number, group), np.int64, len(group))


def _device_bytes() -> int:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))
