"""From numbers that grow to the names of what grows.

A container shows by its length that it grows. A graph or a tensor in a variable is found by elimination: what the
containers' new entries hold is subtracted, and the rest must be behind one of the tensors that Python still holds.
"""

from __future__ import annotations

import gc
import re
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from course_lib._tensors import bytes_by_storage
from course_lib._words import counted, readable_bytes
from course_lib.leaks.census import Census, Count, LruCache, arrays_in
from course_lib.leaks.graphs import graph_roots, saved_storages
from course_lib.leaks.holders import arrays_over, attributes_of, held_by_python, holder_of, is_ours, kind_of
from course_lib.leaks.trend import growth, slowest_third

SMALL = 1024
"""Bytes a step below which a log of numbers or strings may grow: a float in a list takes 32."""
SMALL_IN_TENSORS = 128
"""The same for tensors and arrays that get longer: a log of a few numbers may."""
SMALL_IN_WORKERS = 64 * 1024
"""The same for each worker process: prefetching makes noise, and a page that this process copies becomes theirs."""
SMALL_IN_PROCESS = 1024 * 1024
"""The same for this process, where nothing else explains its growth."""


@dataclass(frozen=True)
class Culprit:
    """One thing that grows. Its bytes are those of the storages and Python objects that nothing else holds."""

    kind: str
    """graph, tensors, cache, hooks, exceptions, objects, arrays, workers or process."""
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
    """Containers first; then graphs and tensors that no container explains; then what only a process shows."""
    alive = _look_around(census, counts)
    by_container = [_held_by_new_entries(grown, alive) for grown in alive.grown]
    found = [culprit for one in by_container if (culprit := _container(one)) is not None]
    explained = {id(o) for one in by_container for o in one.tensors}
    rest = [tensor for tensor in alive.tensors if id(tensor) not in explained]
    seen = {id(node): node for one in by_container for node in one.nodes}

    nodes = growth(series["graph_nodes"]) - sum(one.nodes_per_step for one in by_container)
    if nodes >= 0.5:
        found += _graphs(rest, seen, nodes, alive, len(series["graph_nodes"]))
    tensors = growth(series["tensors"]) - sum(one.tensors_per_step for one in by_container)
    longer = growth(series["tensor_bytes"]) - sum(one.bytes_per_step for one in by_container)
    if tensors >= 0.5:
        found += _nested(rest, tensors, alive, len(series["tensors"]), alone=not found)
    elif longer >= SMALL_IN_TENSORS and not any(culprit.kind == "graph" for culprit in found):
        found += _longer(rest, longer, alive, len(series["tensor_bytes"]))
    found += _arrays(alive)
    found += _workers(growth(series["worker_bytes"], slowest=0), slowest_third(series["worker_bytes"]))
    return found or _processes(series)


# ------------------------------------------------------------------------------------ what containers account for


# All that is held here is in lists and named tuples of running functions, so that no search finds it by a name.
class _LongerContainer(NamedTuple):
    container: Any
    rate: float
    entries: int
    """How many it got while it was watched."""


class _ObjectsAlive(NamedTuple):
    """What the census leaves behind for the search: what is there after the last step."""

    grown: list[_LongerContainer]
    grown_arrays: list[_LongerContainer]
    """Holders of arrays, with bytes in place of entries."""
    new: set[int]
    tensors: list[Tensor]
    old_storages: set[int]
    array_sizes: set[int]
    graph_sizes: Counter[int]
    storage_sizes: Counter[int]


def _look_around(census: Census, counts: list[Count]) -> _ObjectsAlive:
    containers, holders = census.containers(), census.array_holders()
    grown, grown_arrays = [], []
    for i in counts[-1].lengths:
        before = census.lengths.item(i)
        lengths = [count.lengths.get(i, before) for count in counts]
        if rate := growth(lengths):
            if i < len(containers):
                grown.append(_LongerContainer(containers[i], rate, lengths[-1] - before))
            else:
                grown_arrays.append(_LongerContainer(holders[i - len(containers)], rate, lengths[-1] - before))
    new = {id(o) for o in gc.get_objects()} - set(map(id, containers))
    old = bytes_by_storage(tensor for ref in census.tensors_before if (tensor := ref()) is not None)
    named = {id(one.container) for one in grown}
    grown_arrays = [one for one in grown_arrays if id(one.container) not in named]
    sizes = census.array_sizes, census.graph_sizes, census.storage_sizes
    alive = _ObjectsAlive(grown, grown_arrays, new, census.tensors(), set(old), *sizes)
    census.thaw()
    return alive


class _HeldByNewEntries(NamedTuple):
    """What hangs on the new entries of a container, and on nothing that was there before."""

    grown: _LongerContainer
    tensors: list[Tensor]
    nodes: list[Any]
    errors: bool
    bytes_per_step: float
    tensors_per_step: float
    nodes_per_step: float


def _held_by_new_entries(grown: _LongerContainer, alive: _ObjectsAlive) -> _HeldByNewEntries:
    entries = [_walk(entry, alive.new) for entry in _newest(grown.container, grown.entries, alive.new)]
    objects = {key: o for entry in entries for key, o in entry.items()}
    # What two entries share is not what one of them brings.
    times = Counter(key for entry in entries for key in entry)
    own = [o for key, o in objects.items() if times[key] == 1]
    tensors = _tensors(objects)
    storages = [bytes_by_storage(_tensors(entry)) for entry in entries]
    times_stored = Counter(storage for entry in storages for storage in entry)
    stored = {s: n for entry in storages for s, n in entry.items() if times_stored[s] == 1}
    graphs = [nodes for _, nodes in graph_roots(tensors, {})]
    nodes = [node for graph in graphs for node in graph]
    stored |= saved_storages(nodes)
    size = sum(map(_size, own)) + sum(n for s, n in stored.items() if s not in alive.old_storages)
    per_step = grown.rate / grown.entries
    return _HeldByNewEntries(
        grown,
        tensors,
        nodes,
        any(isinstance(o, BaseException) and o.__traceback__ is not None for o in own),
        size * per_step,
        len(tensors) * per_step,
        # The first graph reaches the leaves, which all share.
        (median(map(len, graphs)) * len(graphs) if graphs else 0) * per_step,
    )


def _tensors(objects: dict[int, Any]) -> list[Tensor]:
    return [o for o in objects.values() if issubclass(type(o), Tensor)]


def _container(one: _HeldByNewEntries) -> Culprit | None:
    container, rate = one.grown.container, one.grown.rate
    if isinstance(container, deque) and container.maxlen is not None:
        return None  # it ends by itself
    holder = holder_of(container) or f"{kind_of(container)} without a name"
    kind = _kind_of_growth(one, holder)
    if kind == "objects" and one.bytes_per_step < SMALL:
        return None
    what = f"gets {_number(rate)} more {'entry' if rate == 1 else 'entries'} a step"
    if one.tensors:
        what += f", with {_number(one.tensors_per_step)} of {_description(_most_alike(one.tensors)[0])}"
    if one.nodes:
        what += f" and a graph of {_number(one.nodes_per_step)} nodes"
    advice = _ADVICE[kind]
    if kind in ("graph", "tensors") and isinstance(container, dict):
        advice = _ADVICE["dict"]
    elif kind == "cache" and (end := container.cache_info().maxsize) is not None:
        advice += f". It ends at maxsize={end} entries"
    return Culprit(kind, holder, rate, one.bytes_per_step, what, advice)


def _kind_of_growth(one: _HeldByNewEntries, holder: str) -> str:
    if re.search(r"`_\w*hooks`", holder):
        return "hooks"
    if one.errors:
        return "exceptions"
    if type(one.grown.container) is LruCache:
        return "cache"
    if one.nodes:
        return "graph"
    return "tensors" if one.tensors else "objects"


def _newest(container: Any, count: int, new: set[int]) -> list[tuple[Any, ...]]:
    """The entries that came while it was watched. gc doesn't know numbers, strings and arrays: of these, the last."""
    if type(container) is LruCache:
        held = gc.get_referents(container)
        held += [o for inner in held if type(inner) is dict for o in gc.get_referents(inner)]
        return [(o,) for o in {id(o): o for o in held if id(o) in new}.values()]
    entries = list(dict.items(container)) if isinstance(container, dict) else [(o,) for o in container]
    known = [entry for entry in entries if any(id(o) in new for o in entry)]
    plain = [entry for entry in entries if not any(map(gc.is_tracked, entry))]
    return known + plain[len(plain) - max(0, count - len(known)) :]


def _walk(entry: tuple[Any, ...], new: set[int]) -> dict[int, Any]:
    """By id, what an entry reaches through new objects; not what the watch itself holds."""
    reached: dict[int, Any] = {}
    ahead = list(entry)
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
    return reached


_MOST_OBJECTS = 10_000


def _size(o: Any) -> int:
    try:
        return sys.getsizeof(o)
    except Exception:  # a type's own __sizeof__
        return 0


# ------------------------------------------------------------------------------------ what no container accounts for


def _graphs(rest: list[Tensor], seen: dict[int, Any], rate: float, alive: _ObjectsAlive, steps: int) -> list[Culprit]:
    with_graph = [tensor for tensor, _ in graph_roots(rest, {})]
    # Python objects of what a graph saved live on without a holder; they would each take a step's nodes.
    held = held_by_python(with_graph, besides=(rest, alive.tensors))
    gradients = {id(tensor.grad) for tensor in alive.tensors if tensor.is_leaf}
    held += [tensor for tensor in with_graph if id(tensor) in gradients - set(map(id, held))]
    sizes, roots = alive.graph_sizes.copy(), []
    for tensor, nodes in graph_roots(held, seen):
        whole = len(graph_roots([tensor], {})[0][1])
        before = next((size for size in (whole, len(nodes)) if sizes[size]), None)
        if before is not None:
            sizes[before] -= 1  # this one, or one like it, was there after the first step
        elif len(nodes) > rate * steps / 4:
            roots.append((tensor, nodes))
    total = sum(len(nodes) for _, nodes in roots)
    found = []
    for tensor, nodes in roots:
        saved = saved_storages(nodes)
        shared = [t for t in alive.tensors if id(t) not in alive.new and bytes_by_storage([t]).keys() & saved.keys()]
        for storage in bytes_by_storage(held_by_python(shared, besides=(rest, alive.tensors, with_graph, held))):
            saved.pop(storage, None)  # weights, a dataset
        kept, inner = sum(saved.values()), sum(bool(node.next_functions) for node in nodes)
        own_rate = rate * len(nodes) / total
        holder = _holder(tensor, alive.tensors) or "a tensor that no Python object holds"
        what = f"has {_number(own_rate)} more graph nodes a step"
        found.append(Culprit("graph", holder, own_rate, kept * own_rate / max(1, inner), what, _ADVICE["variable"]))
    return found


def _nested(rest: list[Tensor], rate: float, alive: _ObjectsAlive, steps: int, alone: bool) -> list[Culprit]:
    """Tensors in tuples in tuples, in lists that each step makes again, or in a graph that holds itself."""
    new = [tensor for tensor in rest if id(tensor) in alive.new]
    alike = _most_alike(held_by_python(new, besides=(rest, alive.tensors)))
    holder = None
    if len(alike) >= rate * steps / 4:
        # The last step's own tensors are among them, so the holder of most of them is the one to name.
        holder = _usual_name(_holder(tensor, alive.tensors) for tensor in alike[:: max(1, len(alike) // 3)])
    alike = alike if holder else _most_alike(new)
    holder = holder or _usual_name(holder_of(array) for array in arrays_over(alike))
    if holder is None and not (alone and alike):
        return []  # a graph that has been named holds them
    size = rate * sum(bytes_by_storage(alike).values()) / len(alike)
    what = f"is one of {_number(rate)} more tensors a step, most of {_description(alike[0])}"
    if holder is not None:
        return [Culprit("tensors", holder, rate, size, what, _ADVICE["tensors"])]
    holder = "a tensor that no Python object holds"
    if any(tensor.requires_grad for tensor in alike):
        return [Culprit("graph", holder, rate, size, what, _ADVICE["cycle"])]
    return [Culprit("tensors", holder, rate, size, what, _ADVICE["process"])]


def _longer(rest: list[Tensor], rate: float, alive: _ObjectsAlive, steps: int) -> list[Culprit]:
    """One tensor that gets longer, or several that do so side by side, as the keys and values of each layer."""
    before = alive.storage_sizes
    more = Counter(bytes_by_storage(alive.tensors).values()) - before
    sizes = {id(tensor): max(bytes_by_storage([tensor]).values(), default=0) for tensor in rest}
    changed = [tensor for tensor in rest if sizes[id(tensor)] in more]
    # Where others had that size already, those that are new have come to it.
    changed = [t for t in changed if id(t) in alive.new or sizes[id(t)] not in before] or changed
    if _bytes_of(changed) < rate * steps / 2:
        return []
    alike = max(_kinds(changed), key=_bytes_of)
    if len(alike) == 1:
        name = _holder(alike[0], rest)
        what = f"gets longer: it is now of {_description(alike[0])}"
    else:
        name = _usual_name(_holder(tensor, rest) for tensor in alike[:_MOST_NAMED])
        what = f"is one of {len(changed)} tensors that get longer: {len(alike)} are now of {_description(alike[0])}"
    return [Culprit("tensors", name or "a tensor without a name", 0, rate, what, _ADVICE["tensors"])]


def _arrays(alive: _ObjectsAlive) -> list[Culprit]:
    """Arrays that a variable, an attribute or an element replaces by larger ones."""
    found: dict[int, Culprit] = {}
    for holder, rate, _ in alive.grown_arrays:
        arrays = arrays_in(holder)
        longer = [array for array in arrays if array.nbytes not in alive.array_sizes] or arrays
        if longer and rate >= SMALL_IN_TENSORS:
            array = max(longer, key=lambda array: array.nbytes)
            name = holder_of(array) or _name_in_untracked(array, holder) or "an array without a name"
            what = f"gets longer: it is now of shape {array.shape}, {array.dtype}"
            found[id(array)] = Culprit("arrays", name, 0, rate, what, _ADVICE["arrays"])  # once, though two hold it
    return list(found.values())


def _name_in_untracked(array: np.ndarray, holder: Any) -> str | None:
    """gc does not know that a dict of arrays holds them, but what holds the dict."""
    for inner in [holder, *gc.get_referents(holder)]:
        key = next((key for key, value in inner.items() if value is array), None) if type(inner) is dict else None
        if key is not None and (name := holder_of(inner)) is not None:
            return f"ndarray [{key!r}] of {name}"
    return None


_MOST_NAMED = 8  # to ask for a name takes tenths of a second


def _usual_name(names: Iterable[str | None]) -> str | None:
    """The name that comes most often, where tensors that lie in one container count as one."""
    counts = Counter(re.sub(r"(\[\d+\])+", "[…]", name) for name in names if name)
    return max(counts, key=lambda name: counts[name], default=None)


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


def _processes(series: dict[str, list[int]]) -> list[Culprit]:
    device, host = growth(series["device_bytes"]), growth(series["host_bytes"])
    if device >= SMALL:
        holder, size = "the CUDA allocator", device
    elif host >= SMALL_IN_PROCESS:
        holder, size = "this process", host
    else:
        return []
    what = "holds more, and no Python container, tensor or graph accounts for it"
    return [Culprit("process", holder, 0, size, what, _ADVICE["process"])]


def _bytes_of(tensors: list[Tensor]) -> int:
    return sum(bytes_by_storage(tensors).values())


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
    "cache": "a tensor is hashed by identity, so a new one is never found again: cache what is computed from plain "
    "values, or nothing",
    "hooks": "register once before the loop, or call `handle.remove()` at the end of the step",
    "exceptions": "an exception's traceback holds its frames and their tensors: keep `str(error)`, or "
    "`error.with_traceback(None)`",
    "objects": "empty it at the end of each window or epoch, or write it to disk",
    "cycle": "a parameter and its gradient hold each other through the graph of `create_graph=True`: use "
    "`torch.autograd.grad`, or set `.grad = None`",
    "arrays": "`np.append` and `np.concatenate` copy the whole array in each step: make it once, with room for all, or "
    "write out what is finished",
    "workers": "reading a Python object writes its reference count, and so copies its page to each worker: keep the "
    "records in one array or tensor. What `__getitem__` caches, each worker caches for itself",
    "process": "look for what C++ holds: a cache of a library, an array in a variable that gets longer",
}


def _description(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}, {tensor.device}"


def _kinds(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(_description(tensor), []).append(tensor)
    return list(groups.values())


def _most_alike(tensors: list[Tensor]) -> list[Tensor]:
    return max(_kinds(tensors), key=len, default=[])


def _number(n: float) -> str:
    return f"{n:.1f}".removesuffix(".0")
