"""From numbers that grow to the names of what grows.

A container shows by its length that it grows; a closure's cell, an instance or a module's globals by the graph behind
the tensors that it holds itself. What else grows in tensors is told without a name.
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
from course_lib.leaks.naming import holder_of, is_ours, kind_of
from course_lib.leaks.trend import growth, slowest_third

SMALL = 1024
"""Bytes a step below which a log of numbers or strings may grow: a float in a list takes 32."""
SMALL_IN_TENSORS = 128
"""The same for tensors that get longer: a log of a few numbers may."""
SMALL_IN_WORKERS = 64 * 1024
"""The same for each worker process: prefetching makes noise, and a page that this process copies becomes theirs."""
_MOST_NAMED = 8
"""Tensors that are named, those whose graph grows most: to ask for a name takes tenths of a second."""
_MOST_OBJECTS = 100_000
"""How far new entries are followed."""


@dataclass(frozen=True)
class Culprit:
    """One thing that grows. Its bytes are those of the tensors and Python objects that came while it was watched, and
    not of what a graph saves."""

    kind: str
    """graph, tensors, hooks, objects or workers."""
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
    """Containers, and tensors whose graph grows; then the workers; then what has no name."""
    series = series_of(counts)
    longer = _longer_containers(census, counts)
    graphs = _growing_graphs(census, counts, {id(one.container) for one in longer})
    old = set(bytes_by_storage(census.tensors_before()))  # storages of weights, of a dataset
    census.thaw()
    found = [culprit for one in longer if (culprit := _container(one, old)) is not None]
    found += _kept_by_a_name(graphs)
    found += _workers(slowest_third(series["worker_bytes"]))
    # A deque that fills up has an end: so have the tensors in it.
    return found if found or any(_has_an_end(one.container) for one in longer) else _without_a_name(series)


# What is held here is in lists and tuples of running functions, so that no search finds it by a name.
class _LongerContainer(NamedTuple):
    container: Any
    rate: float
    """Entries a step."""
    share: float
    """A step's part of what came while it was watched."""
    held: list[Any]
    """What came with its new entries, and is there through them."""


# ------------------------------------------------------------------------------------- containers that get longer


def _longer_containers(census: Census, counts: list[Count]) -> list[_LongerContainer]:
    new = {id(o) for o in gc.get_objects()}  # as the census has put aside what is older
    found = []
    for container, lengths in census.growing(counts):
        entries, rate = lengths[-1] - lengths[0], growth(lengths)
        found.append(_LongerContainer(container, rate, rate / entries, _reached(_last(container, entries), new)))
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
    size = stored + sum(sys.getsizeof(o, 0) for o in one.held)
    holder = holder_of(one.container) or f"{kind_of(one.container)} without a name"
    if re.search(r"`_\w*hooks`", holder):
        kind = "hooks"
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
    return Culprit(kind, holder, one.rate, size * one.share, what, _ADVICE[kind])


def _has_an_end(container: Any) -> bool:
    return isinstance(container, deque) and container.maxlen is not None


# -------------------------------------------------------------------------- graphs behind a variable or an attribute


def _growing_graphs(census: Census, counts: list[Count], named: set[int]) -> list[tuple[float, Tensor]]:
    """In each holder where graphs grow, the tensor that has most of them, and the nodes a step."""
    found: dict[int, tuple[float, Tensor]] = {}  # once, though two hold it
    for place, holder in enumerate(census.holders):
        rate = growth([count.nodes_held[place] for count in counts])
        if rate >= 0.5 and id(holder) not in named:
            tensor = max(graph_roots(tensors_in(holder)), key=lambda root: len(root[1]))[0]
            found[id(tensor)] = rate, tensor
    return list(found.values())


def _kept_by_a_name(graphs: list[tuple[float, Tensor]]) -> list[Culprit]:
    found: dict[str, Culprit] = {}  # one for each name, which the states of many layers share
    for rate, tensor in sorted(graphs, key=lambda graph: graph[0], reverse=True)[:_MOST_NAMED]:
        name = holder_of(tensor) or "a tensor without a name"
        what = f"has {_number(rate)} more graph nodes a step"
        found.setdefault(name, Culprit("graph", name, rate, 0, what, _ADVICE["variable"]))
    return list(found.values())


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
    """Where nothing was found: in tuples, in a list that is made anew, in C++, or a tensor that gets longer."""
    nodes, tensors, size = (growth(series[name]) for name in ("graph_nodes", "tensors", "tensor_bytes"))
    if nodes >= 0.5:
        what = f"is behind {_number(nodes)} more graph nodes a step"
        return [Culprit("graph", _NO_NAME, nodes, size, what, _ADVICE["nameless"])]
    if tensors >= 0.5 or size >= SMALL_IN_TENSORS:
        what = f"is one of {_number(tensors)} more a step" if tensors else "gets longer"
        return [Culprit("tensors", _NO_NAME, tensors, size, what, _ADVICE["nameless"])]
    return []


_NO_NAME = "a tensor in no list, dict, set or deque"


# ----------------------------------------------------------------------------------------------------- in words

_ADVICE = {
    "variable": "it keeps every step's graph: add `loss.item()` or `loss.detach()`; detach a state that goes from step "
    "to step",
    "graph": "a tensor with a grad_fn keeps the graph of its step: keep `loss.item()` or `loss.detach()`",
    "tensors": "keep numbers (`.item()`), a bounded deque or a dict of keys that come back, or empty it at the end of "
    "each epoch; of an exception, which holds its frames' tensors, keep `str(error)`",
    "hooks": "register once before the loop, or call `handle.remove()` at the end of the step",
    "objects": "empty it at the end of each window or epoch, or write it to disk",
    "nameless": "look for `torch.cat`, for a list that each step makes anew, for tuples in tuples, and for "
    "`create_graph=True`: zero the gradients that it makes",
    "workers": "reading a Python object writes its reference count, and so copies its page to each worker: keep the "
    "records in one array or tensor. What `__getitem__` caches, each worker caches for itself",
}


def _description(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}, {tensor.device}"


def _number(n: float) -> str:
    return f"{n:.1f}".removesuffix(".0")
