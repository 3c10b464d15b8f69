"""From numbers that grow to the names of what grows.

A container shows by its length that it grows; a closure's cell, an instance or a module's globals by the bytes and the
graph nodes of the tensors that it holds itself. What grows in no such place is told without a name.
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
from course_lib.leaks.census import Census, Count, tensors_in
from course_lib.leaks.graphs import graph_roots, saved_storages
from course_lib.leaks.holders import attributes_of, holder_of, is_ours, kind_of
from course_lib.leaks.trend import growth, slowest_third

SMALL = 1024
"""Bytes a step below which a log of numbers or strings may grow: a float in a list takes 32."""
SMALL_IN_TENSORS = 128
"""The same for tensors that get longer: a log of a few numbers may."""
SMALL_IN_WORKERS = 64 * 1024
"""The same for each worker process: prefetching makes noise, and a page that this process copies becomes theirs."""
SMALL_IN_PROCESS = 1024 * 1024
"""The same for this process, where nothing else explains its growth."""
_MOST_NAMED = 8
"""Holders of tensors that are named, those that grow most: to ask for a name takes tenths of a second."""


@dataclass(frozen=True)
class Culprit:
    """One thing that grows. Its bytes are those of the storages and Python objects that nothing else holds."""

    kind: str
    """graph, tensors, hooks, exceptions, objects, workers or process."""
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


def find_culprits(census: Census, counts: list[Count], series: dict[str, list[int]]) -> list[Culprit]:
    """Containers, and tensors in one place; then the workers; then what only the numbers show."""
    alive = _look_around(census, counts)
    found = [culprit for grown in alive.grown if (culprit := _container(grown, alive)) is not None]
    found += _in_places(alive)
    found += _workers(growth(series["worker_bytes"], slowest=0), slowest_third(series["worker_bytes"]))
    if found or any(_has_an_end(one.container) for one in alive.grown):
        return found
    return _without_a_name(series)


# ------------------------------------------------------------------------------------ what containers account for


# All that is held here is in lists and named tuples of running functions, so that no search finds it by a name.
class _LongerContainer(NamedTuple):
    container: Any
    rate: float
    entries: int
    """How many it got while it was watched."""


class _LargerTensor(NamedTuple):
    tensor: Tensor
    bytes_per_step: float
    nodes_per_step: float


class _ObjectsAlive(NamedTuple):
    """What the census leaves behind for the search: what is there after the last step."""

    grown: list[_LongerContainer]
    larger: list[_LargerTensor]
    new: set[int]
    tensors: list[Tensor]
    held_elsewhere: set[int]
    """Storages of weights, of a dataset."""


def _look_around(census: Census, counts: list[Count]) -> _ObjectsAlive:
    containers = census.containers()
    grown = []
    for i in counts[-1].changed:
        if i < len(containers) and (rate := growth(lengths := _series(census, counts, i))):
            grown.append(_LongerContainer(containers[i], rate, lengths[-1] - census.measures.item(i)))
    named = {id(one.container) for one in grown}
    larger = _larger_tensors(census, counts, named)
    new = {id(o) for o in gc.get_objects()} - set(map(id, containers))
    held = bytes_by_storage(t for holder in census.holders() if id(holder) not in named for t in tensors_in(holder))
    alive = _ObjectsAlive(grown, larger, new, census.tensors(), set(held))
    census.thaw()
    return alive


def _series(census: Census, counts: list[Count], place: int) -> list[int]:
    return [count.changed.get(place, census.measures.item(place)) for count in counts]


def _larger_tensors(census: Census, counts: list[Count], named: set[int]) -> list[_LargerTensor]:
    """In each holder that grows, the largest tensor of those that it did not hold like that at the beginning."""
    found: dict[int, _LargerTensor] = {}  # once, though two hold it
    holders, first = census.holders(), len(census.containers())
    for i, (holder, before, now) in enumerate(zip(holders, census.held, census.sizes(), strict=True), first):
        in_bytes, in_nodes = growth(_series(census, counts, i)), growth(_series(census, counts, i + len(holders)))
        if id(holder) not in named and (in_bytes >= SMALL_IN_TENSORS or in_nodes >= 0.5):
            changed = {key: size for key, size in now.items() if size not in before} or now
            sizes = {key: size.nodes if in_nodes >= 0.5 else size.bytes for key, size in changed.items()}
            largest = max(sizes, key=sizes.__getitem__)
            tensor = next(tensor for tensor in tensors_in(holder) if id(tensor) == largest)
            found[largest] = _LargerTensor(tensor, in_bytes, in_nodes)
    return list(found.values())


class _HeldByNewEntries(NamedTuple):
    """What hangs on the new entries of a container, and on nothing that was there before."""

    tensors: list[Tensor]
    errors: bool
    bytes_per_step: float
    tensors_per_step: float
    nodes_per_step: float


def _held_by_new_entries(grown: _LongerContainer, alive: _ObjectsAlive) -> _HeldByNewEntries:
    objects = _reached(_newest(grown.container, grown.entries, alive.new), alive.new)
    tensors = [o for o in objects if issubclass(type(o), Tensor)]
    # Without the leaves, which all steps share.
    nodes = [node for _, nodes in graph_roots(tensors) for node in nodes if node.next_functions]
    stored = bytes_by_storage(tensors) | saved_storages(nodes)
    size = sum(map(_size, objects)) + sum(n for storage, n in stored.items() if storage not in alive.held_elsewhere)
    per_step = grown.rate / grown.entries
    errors = any(isinstance(o, BaseException) and o.__traceback__ is not None for o in objects)
    return _HeldByNewEntries(tensors, errors, size * per_step, len(tensors) * per_step, len(nodes) * per_step)


def _container(grown: _LongerContainer, alive: _ObjectsAlive) -> Culprit | None:
    container, rate = grown.container, grown.rate
    if _has_an_end(container):
        return None
    one = _held_by_new_entries(grown, alive)
    holder = holder_of(container) or f"{kind_of(container)} without a name"
    kind = _kind_of_growth(one, holder)
    if kind == "objects" and one.bytes_per_step < SMALL:
        return None
    what = f"gets {_number(rate)} more {'entry' if rate == 1 else 'entries'} a step"
    if one.tensors:
        usual = Counter(map(_description, one.tensors)).most_common(1)[0][0]
        what += f", with {_number(one.tensors_per_step)} of {usual}"
    if one.nodes_per_step:
        what += f" and a graph of {_number(one.nodes_per_step)} nodes"
    advice = _ADVICE[kind]
    if kind in ("graph", "tensors") and isinstance(container, dict):
        advice = _ADVICE["dict"]
    return Culprit(kind, holder, rate, one.bytes_per_step, what, advice)


def _has_an_end(container: Any) -> bool:
    return isinstance(container, deque) and container.maxlen is not None


def _kind_of_growth(one: _HeldByNewEntries, holder: str) -> str:
    if re.search(r"`_\w*hooks`", holder):
        return "hooks"
    if one.errors:
        return "exceptions"
    if one.nodes_per_step:
        return "graph"
    return "tensors" if one.tensors else "objects"


def _newest(container: Any, count: int, new: set[int]) -> list[tuple[Any, ...]]:
    """The entries that came while it was watched. gc doesn't know numbers, strings and arrays: of these, the last."""
    entries = list(dict.items(container)) if isinstance(container, dict) else [(o,) for o in container]
    known = [entry for entry in entries if any(id(o) in new for o in entry)]
    plain = [entry for entry in entries if not any(map(gc.is_tracked, entry))]
    return known + plain[len(plain) - max(0, count - len(known)) :]


def _reached(entries: list[tuple[Any, ...]], new: set[int]) -> list[Any]:
    """What they reach through new objects; not what the watch itself holds."""
    reached: dict[int, Any] = {}
    ahead = [o for entry in entries for o in entry]
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


_MOST_OBJECTS = 100_000


def _size(o: Any) -> int:
    try:
        return sys.getsizeof(o)
    except Exception:  # a type's own __sizeof__
        return 0


# ------------------------------------------------------------------------------ what a variable or an attribute holds


def _in_places(alive: _ObjectsAlive) -> list[Culprit]:
    """One for each name, which the keys and values of many layers share."""
    by_name: dict[str, list[_LargerTensor]] = {}
    largest = sorted(alive.larger, key=lambda one: (one.nodes_per_step, one.bytes_per_step), reverse=True)
    for one in largest[:_MOST_NAMED]:
        by_name.setdefault(_holder(one.tensor, alive.tensors) or "a tensor without a name", []).append(one)
    return [_larger(name, tensors, alive) for name, tensors in by_name.items()]


def _larger(name: str, tensors: list[_LargerTensor], alive: _ObjectsAlive) -> Culprit:
    nodes_per_step = sum(one.nodes_per_step for one in tensors)
    if nodes_per_step >= 0.5:
        nodes = [node for _, nodes in graph_roots(one.tensor for one in tensors) for node in nodes]
        saved = sum(size for storage, size in saved_storages(nodes).items() if storage not in alive.held_elsewhere)
        inner = sum(bool(node.next_functions) for node in nodes)
        what = f"has {_number(nodes_per_step)} more graph nodes a step"
        return Culprit("graph", name, nodes_per_step, saved * nodes_per_step / max(1, inner), what, _ADVICE["variable"])
    more = f", as {counted(len(tensors) - 1, 'other')} of that name" if len(tensors) > 1 else ""
    what = f"gets longer{more}: it is now of {_description(tensors[0].tensor)}"
    return Culprit("tensors", name, 0, sum(one.bytes_per_step for one in tensors), what, _ADVICE["tensors"])


# ------------------------------------------------------------------------------------- what only processes show


def _workers(rate: float, slowest: float) -> list[Culprit]:
    # A worker also fills the gaps in the memory that it was forked with: much at first, less and less with each batch.
    least = min(rate, slowest)
    if least < SMALL_IN_WORKERS:
        return []
    # What torch's DataLoader and MiniDataLoader iterate with.
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Iterator)}
    iterators = [attributes_of(o) for o in objects if type(o) in kinds]
    loaders = [own for own in iterators if {"_workers", "_dataset"} <= own.keys()]
    number = sum(len(loader["_workers"]) for loader in loaders)
    # This process may copy pages that it shares with them, in bursts; what they copy themselves comes with each batch.
    if least < SMALL_IN_WORKERS * max(1, number):
        return []
    processes = counted(number, "DataLoader worker") if loaders else "child processes"
    records = max((found for loader in loaders for found in _records(loader["_dataset"])), default=None)
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
    growing = {name: growth(values) for name, values in series.items()}
    if growing["graph_nodes"] >= 0.5:
        what = f"is behind {_number(growing['graph_nodes'])} more graph nodes a step"
        return [Culprit("graph", _NO_NAME, growing["graph_nodes"], growing["tensor_bytes"], what, _ADVICE["nameless"])]
    if growing["tensors"] >= 0.5 or growing["tensor_bytes"] >= SMALL_IN_TENSORS:
        what = f"is one of {_number(growing['tensors'])} more a step" if growing["tensors"] else "gets longer"
        return [Culprit("tensors", _NO_NAME, growing["tensors"], growing["tensor_bytes"], what, _ADVICE["nameless"])]
    what = "holds more, and no Python container, tensor or graph accounts for it"
    if growing["device_bytes"] >= SMALL:
        return [Culprit("process", "the CUDA allocator", 0, growing["device_bytes"], what, _ADVICE["process"])]
    if growing["host_bytes"] >= SMALL_IN_PROCESS:
        return [Culprit("process", "this process", 0, growing["host_bytes"], what, _ADVICE["process"])]
    return []


_NO_NAME = "a tensor in no list, attribute or variable"


def _holder(tensor: Tensor, tensors: list[Tensor]) -> str | None:
    name = holder_of(tensor)
    if name is None:  # C++ alone holds gradients
        owner = next((t for t in tensors if t.is_leaf and t.grad is tensor), None)
        name = None if owner is None else holder_of(owner)
        return name and f"`.grad` of {name}"
    return name


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
    "process": "look for what is neither container nor tensor: a cache of a library, a string or an array in a "
    "variable that gets longer",
}


def _description(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}, {tensor.device}"


def _number(n: float) -> str:
    return f"{n:.1f}".removesuffix(".0")
