"""From numbers that grow to the names of what grows.

A container shows by its length that it grows; a closure's cell, an instance or a module's globals by the bytes and the
graph nodes of the tensors that it holds itself. Tensors that grow in no such place are told without a name.
"""

from __future__ import annotations

import gc
import re
import sys
import types
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from course_lib._tensors import bytes_by_storage
from course_lib._words import counted, readable_bytes
from course_lib.leaks.census import Census, Count, series_of, tensors_in
from course_lib.leaks.graphs import graph_roots
from course_lib.leaks.holders import holder_of, is_ours, kind_of
from course_lib.leaks.trend import growth, slowest_third

SMALL = 1024
"""Bytes a step below which a log of numbers or strings may grow: a float in a list takes 32."""
SMALL_IN_TENSORS = 128
"""The same for tensors that get longer: a log of a few numbers may."""
SMALL_IN_WORKERS = 64 * 1024
"""The same for each worker process: prefetching makes noise, and a page that this process copies becomes theirs."""
_MOST_NAMED = 8
"""Holders of tensors that are named, those that grow most: to ask for a name takes tenths of a second."""
_MOST_OBJECTS = 100_000
"""How far new entries are followed."""


@dataclass(frozen=True)
class Culprit:
    """One thing that grows. Its bytes are those of the tensors and Python objects that came while it was watched, and
    not of what a graph saves."""

    kind: str
    """graph, tensors, hooks, exceptions, objects or workers."""
    holder: str
    """list `losses` (attribute of Trainer)"""
    per_step_count: float
    """Entries of the container, nodes of the graph, or tensors; 0 where only bytes are known."""
    per_step_bytes: float
    what: str
    """What comes with each step, in words."""
    advice: str

    def __str__(self) -> str:
        size = f", {readable_bytes(self.per_step_bytes)} a step" if self.per_step_bytes else ""
        return f"{self.kind}: {self.holder} {self.what}{size}\n    -> {self.advice}"


def find_culprits(census: Census, counts: list[Count]) -> list[Culprit]:
    """Containers, and tensors in one place; then the workers; then tensors that are in no place."""
    series = series_of(counts)
    longer = _longer_containers(census, counts)
    larger = _larger_tensors(census, counts, {id(one.container) for one in longer})
    old = set(bytes_by_storage(census.tensors_before()))  # storages of weights, of a dataset
    tensors = census.tensors()
    census.thaw()
    found = [culprit for one in longer if (culprit := _container(one, old)) is not None]
    found += _in_places(larger, tensors)
    found += _workers(slowest_third(series["worker_bytes"]))
    # A deque that fills up has an end: so have the tensors in it.
    return found if found or any(_has_an_end(one.container) for one in longer) else _without_a_name(series)


# What is held here is in lists and named tuples of running functions, so that no search finds it by a name.
class _LongerContainer(NamedTuple):
    container: Any
    rate: float
    """Entries a step."""
    share: float
    """A step's part of what came while it was watched."""
    held: list[Any]
    """What came with its new entries, and is there through them."""


class _LargerTensor(NamedTuple):
    tensor: Tensor
    bytes_per_step: float
    nodes_per_step: float


# ------------------------------------------------------------------------------------- containers that get longer


def _longer_containers(census: Census, counts: list[Count]) -> list[_LongerContainer]:
    containers = census.containers()
    new = {id(o) for o in gc.get_objects()} - {id(containers)}  # as the census has put aside what is older
    found = []
    for place in counts[-1].lengths:
        lengths = census.lengths(place, counts)
        if rate := growth(lengths):
            entries = lengths[-1] - lengths[0]
            held = _reached(_last(containers[place], entries), new)
            found.append(_LongerContainer(containers[place], rate, rate / entries, held))
    return found


def _last(container: Any, number: int) -> list[Any]:
    """The entries that came last; of a dict its keys, and its values."""
    if isinstance(container, dict):
        return [*list(dict.keys(container))[-number:], *list(dict.values(container))[-number:]]
    return list(container)[-number:]


def _reached(entries: list[Any], new: set[int]) -> list[Any]:
    """What they reach through new objects; not what the watch itself holds."""
    reached: dict[int, Any] = {}
    ahead = list(entries)
    while ahead and len(reached) < _MOST_OBJECTS:
        o = ahead.pop()
        if id(o) in reached or (gc.is_tracked(o) and id(o) not in new) or isinstance(o, type | types.ModuleType):
            continue
        if isinstance(o, types.FrameType) and is_ours(o):
            continue  # an exception's frames lead back to here
        reached[id(o)] = o
        ahead += gc.get_referents(o)
        if issubclass(type(o), np.ndarray) and o.base is not None:  # gc doesn't know what an array is a view of
            ahead.append(o.base)
    return list(reached.values())


def _container(one: _LongerContainer, old: set[int]) -> Culprit | None:
    if _has_an_end(one.container):
        return None
    tensors = [o for o in one.held if issubclass(type(o), Tensor)]
    # Without the leaves, which all steps share.
    nodes = [node for _, reached in graph_roots(tensors) for node in reached if node.next_functions]
    stored = sum(size for storage, size in bytes_by_storage(tensors).items() if storage not in old)
    size = stored + sum(map(_size, one.held))
    holder = holder_of(one.container) or f"{kind_of(one.container)} without a name"
    if re.search(r"`_\w*hooks`", holder):
        kind = "hooks"
    elif any(isinstance(o, BaseException) and o.__traceback__ is not None for o in one.held):
        kind = "exceptions"
    elif nodes:
        kind = "graph"
    elif tensors:
        kind = "tensors"
    elif size * one.share >= SMALL:
        kind = "objects"
    else:
        return None
    what = f"gets {_number(one.rate)} more {'entry' if one.rate == 1 else 'entries'} a step"
    if tensors:
        usual = Counter(map(_description, tensors)).most_common(1)[0][0]
        what += f", with {_number(len(tensors) * one.share)} of {usual}"
    if nodes:
        what += f" and a graph of {_number(len(nodes) * one.share)} nodes"
    in_a_dict = kind in ("graph", "tensors") and isinstance(one.container, dict)
    return Culprit(kind, holder, one.rate, size * one.share, what, _ADVICE["dict" if in_a_dict else kind])


def _has_an_end(container: Any) -> bool:
    return isinstance(container, deque) and container.maxlen is not None


def _size(o: Any) -> int:
    try:
        return sys.getsizeof(o)
    except Exception:  # a type's own __sizeof__
        return 0


# ------------------------------------------------------------------------------ what a variable or an attribute holds


def _larger_tensors(census: Census, counts: list[Count], named: set[int]) -> list[_LargerTensor]:
    """In each holder that grows, the tensor that has most."""
    found: dict[int, _LargerTensor] = {}  # once, though two hold it
    before = set(map(id, census.tensors_before()))
    for place, holder in enumerate(census.holders):
        in_bytes = growth([count.held[place].bytes for count in counts])
        in_nodes = growth([count.held[place].nodes for count in counts])
        if id(holder) in named or (in_bytes < SMALL_IN_TENSORS and in_nodes < 0.5):
            continue
        tensors = tensors_in(holder)
        if in_nodes >= 0.5:
            largest = max(graph_roots(tensors), key=lambda root: len(root[1]))[0]
        else:
            new = [tensor for tensor in tensors if id(tensor) not in before] or tensors
            largest = max(new, key=lambda tensor: sum(bytes_by_storage([tensor]).values()))
        found[id(largest)] = _LargerTensor(largest, in_bytes, in_nodes)
    return list(found.values())


def _in_places(larger: list[_LargerTensor], tensors: list[Tensor]) -> list[Culprit]:
    """One for each name, which the keys and values of many layers share."""
    by_name: dict[str, list[_LargerTensor]] = {}
    for one in sorted(larger, key=lambda one: (one.nodes_per_step, one.bytes_per_step), reverse=True)[:_MOST_NAMED]:
        by_name.setdefault(_holder(one.tensor, tensors) or "a tensor without a name", []).append(one)
    return [_larger(name, alike) for name, alike in by_name.items()]


def _larger(name: str, alike: list[_LargerTensor]) -> Culprit:
    nodes_per_step = sum(one.nodes_per_step for one in alike)
    if nodes_per_step >= 0.5:
        what = f"has {_number(nodes_per_step)} more graph nodes a step"
        return Culprit("graph", name, nodes_per_step, 0, what, _ADVICE["variable"])
    more = f", as {counted(len(alike) - 1, 'other')} of that name" if len(alike) > 1 else ""
    what = f"gets longer{more}: it is now of {_description(alike[0].tensor)}"
    return Culprit("tensors", name, 0, sum(one.bytes_per_step for one in alike), what, _ADVICE["tensors"])


def _holder(tensor: Tensor, tensors: list[Tensor]) -> str | None:
    name = holder_of(tensor)
    if name is None:  # C++ alone holds gradients
        owner = next((t for t in tensors if t.is_leaf and t.grad is tensor), None)
        name = None if owner is None else holder_of(owner)
        return name and f"`.grad` of {name}"
    return name


# ------------------------------------------------------------------------------- the workers; what is in no place


def _workers(rate: float) -> list[Culprit]:
    """Where each worker's own memory grows in each third of the steps: then it comes with the batches."""
    # What torch's DataLoader and MiniDataLoader iterate with.
    iterators = [o for o in gc.get_objects() if issubclass(type(o), Iterator)] if rate >= SMALL_IN_WORKERS else []
    loaders = [own for o in iterators if {"_workers", "_dataset"} <= (own := getattr(o, "__dict__", {})).keys()]
    number = sum(len(own["_workers"]) for own in loaders)
    if rate < SMALL_IN_WORKERS * max(1, number):
        return []
    processes = counted(number, "DataLoader worker") if loaders else "child processes"
    records = max((found for own in loaders for found in _records(own["_dataset"])), default=None)
    holder = f"{records[1]}, read by {processes}" if records else processes
    return [Culprit("workers", holder, 0, rate, "is copied into the workers' own memory", _ADVICE["workers"])]


_MANY_RECORDS = 1000  # fewer can't be the bytes that are copied in each step


def _records(dataset: Any, depth: int = 3) -> Iterator[tuple[int, str]]:
    """Length and name of the containers in a dataset, and in the datasets that it wraps."""
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, list | dict | set | tuple) and len(value) >= _MANY_RECORDS:
            yield len(value), f"{kind_of(value)} `{name}` (attribute of {type(dataset).__name__})"
        if depth:
            for inner in value if isinstance(value, list | tuple) and len(value) < 100 else [value]:
                yield from _records(inner, depth - 1)


def _without_a_name(series: dict[str, list[int]]) -> list[Culprit]:
    """Where no place was found: what is new in each step is in tuples, in a list that is made anew, or in C++."""
    nodes, tensors, size = (growth(series[name]) for name in ("graph_nodes", "tensors", "tensor_bytes"))
    if nodes >= 0.5:
        what = f"is behind {_number(nodes)} more graph nodes a step"
        return [Culprit("graph", _NO_NAME, nodes, size, what, _ADVICE["nameless"])]
    if tensors >= 0.5 or size >= SMALL_IN_TENSORS:
        what = f"is one of {_number(tensors)} more a step" if tensors else "gets longer"
        return [Culprit("tensors", _NO_NAME, tensors, size, what, _ADVICE["nameless"])]
    return []


_NO_NAME = "a tensor in no list, attribute or variable"


# ----------------------------------------------------------------------------------------------------- in words

_ADVICE = {
    "variable": "it keeps every step's graph: add `loss.item()` or `loss.detach()`; detach a state that goes from step "
    "to step; zero a gradient that `create_graph=True` made",
    "graph": "a tensor with a grad_fn keeps the graph of its step: keep `loss.item()` or `loss.detach()`",
    "tensors": "keep numbers (`.item()`) or a bounded deque, or empty it at the end of each window or epoch",
    "dict": "a key that is new in each step is never found again: bound the dict, use keys that come back, or store "
    "`.detach()`ed results only",
    "hooks": "register once before the loop, or call `handle.remove()` at the end of the step",
    "exceptions": "an exception's traceback holds its frames and their tensors: keep `str(error)`, or "
    "`error.with_traceback(None)`",
    "objects": "empty it at the end of each window or epoch, or write it to disk",
    "nameless": "look for a list that each step makes anew, for tuples in tuples, for a cache of tensors, and for "
    "`create_graph=True`, by which a parameter and its gradient hold each other",
    "workers": "reading a Python object writes its reference count, and so copies its page to each worker: keep the "
    "records in one array or tensor. What `__getitem__` caches, each worker caches for itself",
}


def _description(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}, {tensor.device}"


def _number(n: float) -> str:
    return f"{n:.1f}".removesuffix(".0")
