"""Every byte that tensors hold, written down with what it is for.

An allocator knows how many bytes are taken, and not for what. The rule: *a storage is counted once, from the operator
that made it until its last tensor is gone; what it was for is what became of it.* A new gradient looks like any other
product of the backward, so categories are decided afterwards.

    with StorageLedger() as ledger:
        ledger.name_model(model)
        model(x).sum().backward()
    Peak(ledger.history()).by_category          # {"parameters": 1200, …, "activations": 640, …}

It works where no kernel runs, too: under fake tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib._tensors import parameters_of, storages_of
from course_lib._words import readable_bytes

CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations", "temporary")
"""What a byte can be for; where two of them are true, the first one counts.

- ``parameters``, ``buffers``: the module's.
- ``gradients``: what ``.grad`` of a parameter holds, from the operator that made it.
- ``optimizer``: its state.
- ``inputs``: the batch, and whatever else was there before and was read.
- ``activations``: made in a forward and still there in the backward after it, or made again in that backward
  (checkpointing).
- ``temporary``: the rest, such as what a backward makes and drops.
"""


class StorageLedger(TorchDispatchMode):
    """Counts the storages of all tensors that an operator takes or returns while the ledger is entered.

    A tensor that was there before counts from the beginning if it is named (by ``name``, ``name_model``,
    ``name_optimizer`` or an optimizer's step), otherwise from the first operator that reads it.

    Not seen: what a kernel allocates and frees inside (workspaces, packed weights), sparse layouts other than COO, and
    the inside of compiled functions.

    Args:
        device_type: Where the tensors are that count: ``"cpu"`` or ``"cuda"``.

    Attributes:
        watching: If False, operators run unseen.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self.device_type = device_type
        self.watching = True
        self._phase: str | None = None
        self._before: list[Entry] = []
        self._entries: list[Entry] = []
        self._live: dict[int, Storage] = {}
        self._clock = self._last_backward = 0
        self._stepping = 0
        self._handles: list[Any] = []

    def __enter__(self) -> StorageLedger:
        self._handles.append(register_optimizer_step_pre_hook(self._step_begins))
        self._handles.append(register_optimizer_step_post_hook(self._step_ends))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        while self._handles:
            self._handles.pop().remove()
        for storage in self._live.values():  # what is freed from now on is not this ledger's
            storage.watch = None
            storage.last_backward = self._last_backward
        self._live.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.watching or func.namespace == "prim":  # prim: asks a fake tensor for its device
            return func(*args, **kwargs)
        self._clock += 1
        if in_backward():
            self._last_backward = self._clock
        for tensor in tensors_in((args, kwargs)):
            self._meet(tensor, made_here=False)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._meet(tensor, made_here=True)
        return result

    def begin(self, phase: str) -> None:
        """Name the phase that follows, instead of the ``"forward"``, ``"backward"`` and ``"step"`` that are found."""
        self._phase = phase
        self._entries.append(Entry(phase, _NOTHING, 0))

    # ------------------------------------------------------------------------------------------------- categories

    def name(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Say what tensors are for. Those that no operator made here count from the beginning."""
        for tensor in tensors:
            for storage in self._meet(tensor, made_here=False):
                storage.category = min(category, storage.category or category, key=CATEGORIES.index)
                if not storage.made_here:
                    first = self._entries[storage.first_entry]
                    self._before.append(first)
                    self._entries[storage.first_entry] = first._replace(delta=0)
                    storage.made_here = True  # counted as if by an operator before all others

    def arrive(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors from now on: they come from where nobody watched, as a batch does from its loader."""
        for tensor in tensors:
            self._meet(tensor, made_here=True)
            self.name(category, [tensor])

    def name_model(self, model: nn.Module) -> None:
        """Name a module's parameters, its buffers, and the gradients that are there now."""
        self.name("parameters", model.parameters())
        self.name("buffers", model.buffers())
        self.name("gradients", (p.grad for p in model.parameters() if p.grad is not None))

    def name_optimizer(self, optimizer: Optimizer) -> None:
        """Name an optimizer's parameters, its state, and the gradients that are there now."""
        parameters = parameters_of(optimizer)
        self.name("parameters", parameters)
        self.name("gradients", (p.grad for p in parameters if p.grad is not None))
        self.name("optimizer", tensors_in(list(optimizer.state.values())))

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.name_optimizer(optimizer)
        self._stepping += 1

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping -= 1
        self.name_optimizer(optimizer)

    # ---------------------------------------------------------------------------------------------------- reading

    def mark(self) -> int:
        """This place in the ledger, for ``history(since=…)``."""
        return len(self._entries)

    def history(self, since: int = 0, sizes: Callable[[Sequence[Entry]], list[int]] | None = None) -> list[Moment]:
        """What was held at a mark, and after each allocation, free and beginning of a phase since.

        ``sizes`` turns all entries, from the beginning, into the bytes that each adds; default: exact bytes.
        """
        entries = self._before + self._entries
        skipped = len(self._before) + since
        added = sizes(entries) if sizes else [entry.delta for entry in entries]
        held = dict.fromkeys(CATEGORIES, 0)
        for entry, delta in zip(entries[:skipped], added, strict=False):
            held[self._category(entry.storage)] += delta
        moments = [Moment("before", dict(held))]
        for entry, delta in zip(entries[skipped:], added[skipped:], strict=True):
            held[self._category(entry.storage)] += delta
            if delta or entry.storage is _NOTHING:
                moments.append(Moment(entry.phase, dict(held)))
        return moments

    def _category(self, storage: Storage) -> str:
        if storage.category is not None:
            return storage.category
        if not storage.made_here:
            return "inputs"
        backward = self._last_backward if storage.last_backward is None else storage.last_backward
        held = storage.born_in == "forward" and backward > storage.born
        return "activations" if held or storage.recomputed else "temporary"

    # ---------------------------------------------------------------------------------------------------- writing

    def _meet(self, tensor: Tensor, made_here: bool) -> list[Storage]:
        met: list[Storage] = []
        if tensor.device.type != self.device_type:
            return met
        for untyped in storages_of(tensor):
            storage = self._live.get(id(untyped))
            nbytes = untyped.nbytes()
            if storage is None:
                phase = self._found_phase()
                # A backward runs without gradients, except what is recomputed in it (or differentiated once more).
                recomputed = phase == "backward" and torch.is_grad_enabled()
                storage = Storage(made_here, self._clock, phase, recomputed, first_entry=self.mark())
                # Python keeps a storage's object for as long as the storage lives, so its end is the storage's.
                storage.watch = weakref.ref(untyped, self._end_of(id(untyped)))
                self._live[id(untyped)] = storage
                self._entries.append(Entry(self._phase or storage.born_in, storage, nbytes))
            elif nbytes != storage.nbytes:  # resized in place
                self._entries.append(Entry(self._phase or self._found_phase(), storage, nbytes - storage.nbytes))
            storage.nbytes = nbytes
            met.append(storage)
        return met

    def _end_of(self, key: int) -> Callable[[Any], None]:
        ledger = weakref.ref(self)

        def end(_: Any) -> None:
            self = ledger()
            if self is None or key not in self._live:
                return
            storage = self._live.pop(key)
            storage.last_backward = self._last_backward
            self._entries.append(Entry(self._phase or self._found_phase(), storage, -storage.nbytes))

        return end

    def _found_phase(self) -> str:
        if in_backward():
            return "backward"
        # An optimizer's closure runs the forward inside the step, with gradients enabled.
        return "step" if self._stepping and not torch.is_grad_enabled() else "forward"


@dataclass(slots=True, eq=False)
class Storage:
    """What the ledger knows of one storage."""

    made_here: bool
    born: int
    born_in: str
    recomputed: bool
    first_entry: int
    nbytes: int = 0
    category: str | None = None
    last_backward: int | None = None
    """When the last backward before its end ran; None while it lives."""
    watch: weakref.ref[Any] | None = None


_NOTHING = Storage(True, 0, "forward", False, 0)
"""Where a phase begins."""


class Entry(NamedTuple):
    phase: str
    storage: Storage
    delta: int
    """Bytes added; negative where they were freed."""


class Moment(NamedTuple):
    """What was held after an allocation or a free."""

    phase: str
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


@dataclass(frozen=True)
class Peak:
    """The worst moment of a step, and those around it."""

    timeline: list[Moment]
    """What was held after each allocation and free: ``(phase, bytes by category)``."""

    @property
    def by_category(self) -> dict[str, int]:
        """At the peak; the sum is ``peak_bytes``. ``CATEGORIES`` says what they mean."""
        return max(self.timeline, key=lambda moment: moment.total).by_category

    @property
    def peak_bytes(self) -> int:
        return sum(self.by_category.values())

    def peak_by_phase(self) -> dict[str, int]:
        """The most bytes that each phase holds at a time; the moment before the first phase is left out."""
        most: dict[str, int] = {}
        for moment in self.timeline[1:]:
            most[moment.phase] = max(most.get(moment.phase, 0), moment.total)
        return most

    def in_categories(self) -> list[str]:
        """A line for each category that has bytes at the peak: its name, its bytes, its share."""
        held = {name: count for name, count in self.by_category.items() if count}
        total = sum(held.values())
        return [f"  {name:<12} {readable_bytes(count):>11} {count / total:7.1%}" for name, count in held.items()]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def in_backward() -> bool:
    # No public function tells.
    return torch._C._current_graph_task_id() != -1
