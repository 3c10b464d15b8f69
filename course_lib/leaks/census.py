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
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType, FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib._tensors import bytes_by_storage
from course_lib.leaks.graphs import graph_roots
from course_lib.leaks.processes import Children
from course_lib.leaks.trend import growth

# As the builtin types count it: a subclass's own `__len__` is the caller's code.
_LENGTHS: dict[type, Callable[[Any], int]] = {
    list: list.__len__,
    dict: dict.__len__,
    set: set.__len__,
    deque: deque.__len__,
}
_MANY = 1000
"""Instances of a class, or entries of a dict, from which on they are data: to look at what they hold would copy the
pages that a dataset shares with workers."""
# Python before 3.12.6 corrupts a list of asyncio's when it is asked what that module holds (python/cpython #122695).
_NO_NAMESPACES = (type, tuple, FrameType, ModuleType, Tensor, *_LENGTHS)


@dataclass(frozen=True)
class Count:
    """One look after a step."""

    tensors: int
    tensor_bytes: int
    graph_nodes: int
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    """Of each of `Census.containers()`."""
    nodes_held: list[int]
    """By each of `Census.holders`: nodes of the graph behind the tensors that it holds itself."""
    worker_bytes: int
    """Counted last, as the look itself writes to pages that the workers share."""


class Census:
    """Counts what is alive, from `begin` on. It holds the containers and holders of that moment until it is left.

    Measured are the length of each container, and for each *holder* (a closure's cell, an instance, a dict of names
    such as a module's globals) the graph behind the tensors that it holds itself.

    `gc.freeze` puts aside what is alive at the beginning, so that a look costs milliseconds and copies no pages that
    are shared with DataLoader workers. What a caller had frozen before is not watched. For such a caller, everything
    that is alive at the end is frozen, as `gc.freeze` cannot choose.
    """

    def __init__(self) -> None:
        self._by_kind: dict[type, list[Any]] = {}
        self.holders: list[Any] = []
        self._tensors_before: list[weakref.ref[Tensor]] = []
        self._children = Children()

    def __enter__(self) -> Census:
        self._frozen_before = frozen_by_caller()
        self._by_kind = {kind: [] for kind in _LENGTHS}
        self._put_aside()
        return self

    def begin(self) -> None:
        """Put aside what a warm-up has made, too. What grows from here on is counted.

        Workers that the warm-up forks share their pages with this process until one of the two writes to them, if only
        a reference count. So `__enter__` has already looked at what is older than the workers.
        """
        self._children.private_bytes()  # what starts is not to be seen as growing
        self._put_aside()
        self.holders[:] = [holder for holder in self.holders if tensors_in(holder)]

    def _put_aside(self) -> None:
        gc.collect()
        objects = gc.get_objects()
        namespaces = _namespaces(objects)
        # gc does not track a dict of numbers, strings or arrays; what gives it a name is tracked.
        found = {id(o): o for o in gc.get_referents(*namespaces) if type(o) is dict and not gc.is_tracked(o)}
        known = {id(o) for o in self._by_kind[dict]} | {id(objects), id(namespaces)}
        kinds = {t: next((k for k in _LENGTHS if issubclass(t, k)), None) for t in {dict, *map(type, objects)}}
        for kind, group in self._by_kind.items():
            group += [o for o in (*objects, *found.values()) if kinds[type(o)] is kind and id(o) not in known]
        self.holders += namespaces
        self._tensors_before += [weakref.ref(o) for o in objects if issubclass(type(o), Tensor)]
        del objects, namespaces, found
        gc.freeze()

    def __exit__(self, *_: object) -> None:
        self.thaw()
        if self._frozen_before:
            gc.freeze()

    def thaw(self) -> None:
        """Let go of what was put aside, for a search that has to see it. Nothing can be counted after that."""
        # An error's traceback keeps this object for as long as somebody keeps the error; and these lists, which were
        # there when lists were looked for, hold themselves.
        for group in (*self._by_kind.values(), self.holders, self._tensors_before):
            group.clear()
        gc.unfreeze()

    def count(self) -> Count:
        gc.collect()
        tensors = self.tensors()
        groups = [(_LENGTHS[kind], group) for kind, group in self._by_kind.items()]
        return Count(
            len(tensors),
            sum(bytes_by_storage(tensors).values()),
            sum(len(nodes) for _, nodes in graph_roots(tensors)),
            np.concatenate([np.fromiter(map(length, group), np.int64, len(group)) for length, group in groups]),
            self._nodes_held(),
            self._children.private_bytes(),
        )

    def tensors(self) -> list[Tensor]:
        """All that Python reaches, and the `.grad` of leaves, which C++ alone may hold."""
        found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)] + self.tensors_before()
        gradients = [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
        return list({id(tensor): tensor for tensor in found + gradients}.values())

    def tensors_before(self) -> list[Tensor]:
        """Those of the beginning that are still there."""
        return [tensor for ref in self._tensors_before if (tensor := ref()) is not None]

    def containers(self) -> list[Any]:
        return [o for group in self._by_kind.values() for o in group]

    def growing(self, counts: Sequence[Count]) -> list[tuple[Any, list[int]]]:
        """The containers that get longer, and their lengths after each step."""
        containers, lengths = self.containers(), np.stack([count.lengths for count in counts])
        longer = np.flatnonzero(lengths[-1] > lengths[0])
        found = ((containers[place], lengths[:, place].tolist()) for place in longer)
        return [(container, after_each) for container, after_each in found if growth(after_each)]

    def _nodes_held(self) -> list[int]:
        held = [tensors_in(holder) for holder in self.holders]
        # Among these alone: a tensor that a graph has saved may live on in Python, held by nobody there.
        roots = graph_roots({id(tensor): tensor for tensors in held for tensor in tensors}.values())
        nodes = {id(tensor): len(reached) for tensor, reached in roots}
        return [sum(nodes.get(id(tensor), 0) for tensor in tensors) for tensors in held]


def series_of(counts: Sequence[Count]) -> dict[str, list[int]]:
    """The numbers of each count, by their names."""
    names = ("tensors", "tensor_bytes", "graph_nodes", "worker_bytes")
    return {name: [getattr(count, name) for count in counts] for name in names}


def tensors_in(holder: Any) -> list[Tensor]:
    """Those that it holds itself, each once."""
    return list({id(o): o for o in gc.get_referents(holder) if issubclass(type(o), Tensor)}.values())


def _namespaces(objects: list[Any]) -> list[Any]:
    """What gives names: cells, instances of classes that have few, and their dicts; modules' globals."""
    counts = Counter(map(type, objects))
    few = {t for t, n in counts.items() if n <= _MANY and not issubclass(t, _NO_NAMESPACES)} | {CellType}
    instances = [o for o in objects if type(o) in few]
    dicts = [o for o in gc.get_referents(*instances) if issubclass(type(o), dict) and len(o) <= _MANY]
    dicts += [vars(o) for o in objects if issubclass(type(o), ModuleType)]
    return list({id(o): o for o in instances + dicts}.values())


def frozen_by_caller() -> bool:
    """Whether somebody called `gc.freeze`. Its count doesn't tell, as some releases of Python 3.12 start with some."""
    return not any(o is vars(torch) for o in gc.get_objects())
