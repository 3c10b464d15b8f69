"""What is alive after a step: containers and their lengths, tensors, the autograd graph behind them, processes.

`torch.cuda.memory_allocated` says how much, never whose, and does not see the CPU. Python's garbage collector knows
every container there is, and so every tensor that Python can reach, and from these the graphs.

    with Census() as census:
        census.begin()                             # puts aside what is alive now: only what comes later is searched
        step()
        census.count().tensors
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from course_lib._tensors import bytes_by_storage
from course_lib.leaks.graphs import graph_roots
from course_lib.leaks.processes import Children, resident_bytes

# As the builtin types count it: a subclass's own `__len__` is the caller's code.
_LENGTHS: dict[type, Callable[[Any], int]] = {
    list: list.__len__,
    dict: dict.__len__,
    set: set.__len__,
    deque: deque.__len__,
}
_SHORT = 1000
"""Elements of a list up to which they are looked at: that copies the pages that a dataset shares with workers."""
_NO_HOLDERS = (type, tuple, FrameType, ModuleType, Tensor)
# What `map(sys.getrefcount, objects)` says of an object that only the list `objects` holds.
_ALONE = next(map(sys.getrefcount, [[]]))


@dataclass(frozen=True)
class Count:
    """One look after a step. `changed` has the measures that are not as at the beginning, by their place there."""

    tensors: int
    tensor_bytes: int
    graph_nodes: int
    host_bytes: int
    worker_bytes: int
    device_bytes: int
    changed: dict[int, int]


class Census:
    """Counts what is alive, from `begin` on. It holds the containers and holders of that moment until it is left.

    Measured are the length of each container, and for each *holder* (a closure's cell, an instance, a module's globals,
    a list) the bytes and the graph nodes of the tensors that it holds itself.

    `gc.freeze` puts aside what is alive at the beginning, so that a look costs milliseconds and copies no pages that
    are shared with DataLoader workers. What a caller had frozen before is not watched. For such a caller, everything
    that is alive at the end is frozen, as `gc.freeze` cannot choose.
    """

    def __init__(self) -> None:
        self.groups: dict[type, list[Any]] = {}
        """The containers, by the builtin type that they are of; under `object`, the holders of tensors."""
        self.measures = np.zeros(0, np.int64)
        """At the beginning: lengths of `containers()`, then bytes, then nodes of `holders()`."""
        self.held: list[set[TensorSize]] = []
        """What each of `holders()` held at the beginning."""
        self.tensors_before: list[weakref.ref[Tensor]] = []
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
        self.groups[object] = _holders_of_tensors(self.groups[object])
        sizes = self.sizes()
        self.measures = self._measure(sizes)
        self.held = [set(held.values()) for held in sizes]

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
        short = [o for o in objects if type(o) not in skipped or (type(o) in rows and len(o) <= _SHORT)]
        objects += {id(o): o for o in gc.get_referents(*short) if type(o) is dict and not gc.is_tracked(o)}.values()
        mine.update(map(id, self.groups[dict]))  # a dict may have been found before, untracked
        mine.update(map(id, self.groups[object]))
        kinds = {t: next((k for k in _LENGTHS if issubclass(t, k)), None) for t in types | {dict}}
        for o in objects:
            kind = kinds[type(o)]
            if kind is not None and o is not objects and id(o) not in mine:
                self.groups[kind].append(o)
        self.tensors_before += [weakref.ref(o) for o in objects if issubclass(type(o), Tensor)]
        self.groups[object] += [o for o in _places(objects, short) if id(o) not in mine and o is not objects]
        del objects, o, short
        gc.freeze()

    def __exit__(self, *_: object) -> None:
        self.thaw()
        if self._frozen_before:
            gc.freeze()

    def thaw(self) -> None:
        """Let go of what was put aside, for a search that has to see it. Nothing can be counted after that."""
        # An error's traceback keeps this object for as long as somebody keeps the error.
        self.groups, self.measures, self.held, self.tensors_before = {}, np.zeros(0, np.int64), [], []
        gc.unfreeze()

    def count(self) -> Count:
        gc.collect()
        tensors = self.tensors()
        return Count(
            len(tensors),
            sum(bytes_by_storage(tensors).values()),
            sum(len(nodes) for _, nodes in graph_roots(tensors)),
            resident_bytes(),
            self._children.private_bytes(),
            _device_bytes(),
            self._changed(),
        )

    def tensors(self) -> list[Tensor]:
        """All that Python reaches, and the `.grad` of leaves, which C++ alone may hold."""
        found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        found += [tensor for ref in self.tensors_before if (tensor := ref()) is not None]
        grads = [t.grad for t in found if t.is_leaf and t.grad is not None]
        return list({id(t): t for t in found + grads}.values())

    def containers(self) -> list[Any]:
        return [o for kind in _LENGTHS for o in self.groups[kind]]

    def holders(self) -> list[Any]:
        return self.groups[object]

    def sizes(self) -> list[dict[int, TensorSize]]:
        """Of the tensors in each of `holders()`, by their ids."""
        held = [tensors_in(holder) for holder in self.holders()]
        # Among these alone: a tensor that a graph has saved may live on in Python, held by nobody there.
        roots = graph_roots({id(tensor): tensor for tensors in held for tensor in tensors}.values())
        nodes = {id(tensor): len(nodes) for tensor, nodes in roots}
        return [
            {id(t): TensorSize(sum(bytes_by_storage([t]).values()), nodes.get(id(t), 0)) for t in tensors}
            for tensors in held
        ]

    def _measure(self, sizes: list[dict[int, TensorSize]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        lengths = [_of_each(length, self.groups[kind]) for kind, length in _LENGTHS.items()]
        held = [_of_each(lambda held: sum(size.bytes for size in held.values()), sizes)]
        held += [_of_each(lambda held: sum(size.nodes for size in held.values()), sizes)]
        return np.concatenate([*lengths, *held])

    def _changed(self) -> dict[int, int]:
        for kind, group in self.groups.items():
            for i in np.flatnonzero(_of_each(sys.getrefcount, group) == _ALONE).tolist():
                group[i] = kind()  # this list alone holds it: the run has let it go
        now = self._measure(self.sizes())
        changed = np.flatnonzero(now != self.measures)
        return dict(zip(changed.tolist(), now[changed].tolist(), strict=True))


class TensorSize(NamedTuple):
    bytes: int
    nodes: int
    """Of its graph, those that no older tensor in a holder reaches."""


def tensors_in(holder: Any) -> list[Tensor]:
    """Those that it holds itself, and their gradients."""
    held = [o for o in gc.get_referents(holder) if issubclass(type(o), Tensor)]
    return held + [tensor.grad for tensor in held if tensor.is_leaf and tensor.grad is not None]


def _places(objects: list[Any], short: list[Any]) -> list[Any]:
    """What may come to hold a tensor itself: cells, globals, instances with their dicts; and lists that hold one now.

    Of a class with many instances, none is one, as a look at what these hold would copy the pages of a dataset.
    """
    counts = Counter(map(type, objects))
    left_out = (*_NO_HOLDERS, *_LENGTHS)
    few = {t for t, n in counts.items() if n <= _SHORT and not issubclass(t, left_out)} | {CellType}
    places = [o for o in objects if type(o) in few]
    dicts = [o for o in gc.get_referents(*places) if issubclass(type(o), dict) and len(o) <= _SHORT]
    module_globals = [vars(o) for o in objects if issubclass(type(o), ModuleType)]
    return list({id(o): o for o in places + dicts + module_globals + _holders_of_tensors(short)}.values())


def _holders_of_tensors(objects: list[Any]) -> list[Any]:
    """Of a thousand objects at once, as hardly any holds a tensor."""
    found = []
    for i in range(0, len(objects), 1000):
        some = objects[i : i + 1000]
        if any(issubclass(t, Tensor) for t in set(map(type, gc.get_referents(*some)))):
            found += [o for o in some if not isinstance(o, _NO_HOLDERS) and tensors_in(o)]
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
