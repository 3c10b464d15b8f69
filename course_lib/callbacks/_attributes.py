"""Numbers, words, tensors and lists that a module keeps as attributes: in no state, and training may move them.

A loss's weight that is warmed up, the name of a phase, a hidden state that is carried on, a schedule that is stepped by
hand, a queue of samples, an annealer of one's own. Settings are attributes as well, and may be others in the run that
resumes: so only what training has moved is kept; a list or a dict as a whole, and only while it is as long as it was:
one that grows is mostly a note of what a process has seen.

So are those of helpers, of the data module and of the training dataset: a flag of the module's may say that something
was done to them. What was done to a function or to a part is in no checkpoint; there, flags are not put back. So are
those of optimizers that are no library's; and tensors there that are as their parameters even where they were not
moved, as the run that resumes makes them of weights that have been loaded.
"""

from __future__ import annotations

import copy
import enum
import sys
import zlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from course_lib._lightning import COMBINED_LOADER
from course_lib._tensors import parameters_of
from course_lib._words import counted
from course_lib.callbacks._values import (
    Look,
    can_be_looked_at,
    copy_of,
    fits,
    head_of,
    holds_results,
    is_a_note,
    is_plain,
    look_of,
    put_value,
    shapes_of,
    tensors_only,
    why_not_kept,
)

OF_EVERY_MODULE = vars(LightningModule()).keys()
OF_OTHERS = vars(LightningDataModule()).keys() | vars(SGD([torch.zeros(1)])).keys() | {"_opt_called"}
LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "course_lib.", "transformers.", "timm.", "torchvision.")
ROOTS = {"torch", "lightning", "pytorch_lightning", "numpy", "course_lib", "torchmetrics"} | sys.stdlib_module_names
WITH_A_STATE = (Optimizer, LRScheduler, Callback, LightningDataModule, enum.Enum)
DEEPEST = 2
"""Helpers in helpers that are looked into."""
NONE = object()
NO_ATTRIBUTES: Mapping[str, dict[str, Any]] = MappingProxyType({})


class PlainAttributes:
    """Those of a module and its parts, as they were when the run began, and when the window did.

    Args:
        loaded: What :meth:`moved` gave in an earlier life, which has moved these.
    """

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, loaded: Mapping[str, dict[str, Any]] = NO_ATTRIBUTES
    ) -> None:
        self._known_schedules = {id(config.scheduler) for config in trainer.lr_scheduler_configs}
        parts = [(f"{path}.".lstrip("."), part) for path, part in pl_module.named_modules() if not _is_a_metric(part)]
        own = [(path, part) for path, part in parts if not _is_of_a_library(part)]
        self._own = [(path, vars(part)) for path, part in (*own, *_helpers_of(own))]
        of_others = ((path, vars(part)) for path, part in parts if _is_of_a_library(part))
        self._of_others = [  # a dropout's p; what is private there belongs to the library
            (f"{path}{name}", attributes, name)
            for path, attributes in of_others
            for name, value in attributes.items()
            if is_plain(value) and not name.startswith("_") and name != "training"
        ]
        self._trainer = trainer
        self._module, self._called_at_first = pl_module, _called_by(pl_module)
        self._restored = {name for name, kept in loaded.items() if "gathered" not in kept}
        self._at_first: Mapping[str, Any] = self.looks()
        self._kept: dict[str, dict[str, Any]] = {}

    def compare_with(self, looks: Mapping[str, Any]) -> None:
        """Take these :meth:`looks` for those of when the run began."""
        self._at_first = looks

    def keep(self) -> None:
        """Remember what has moved so far, ahead of a window's first micro-batch."""
        self._kept = self._copies_of_moved()

    def moved(self) -> dict[str, dict[str, Any]]:
        """What training has moved, in this life or an earlier one: copies, by the attribute's name."""
        return self._with_what_was_replaced(self._gathered() | self._copies_of_moved())

    def moved_before_the_window(self) -> dict[str, dict[str, Any]]:
        """The same, as it was when the window began."""
        at_first = ((name, self._at_first[name]) for name, _ in self._moving() if name in self._at_first)
        before = {name: _copy(look) for name, look in at_first if not isinstance(look, Look)} | self._kept
        return self._with_what_was_replaced(self._gathered() | before)

    def _with_what_was_replaced(self, moved: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Where a function or a module was put in place of another, its code may go by a flag, and do it again."""
        now = _called_by(self._module)
        replaced = {name: {"replaced": what} for name, what in now.items() if what != self._called_at_first.get(name)}
        if not replaced:
            return moved
        return {name: one for name, one in moved.items() if type(one.get("value")) is not bool} | replaced

    def copies(self) -> dict[str, dict[str, Any]]:
        """All of them, moved or not, in the form of :meth:`moved`; of schedules, the state as they give it."""
        values = list(self._values())
        schedules = {name: {"schedule": value.state_dict()} for name, value in values if isinstance(value, LRScheduler)}
        return schedules | {name: _copy(value) for name, value in values if name not in schedules}

    def looks(self) -> dict[str, Any]:
        """What tells later whether one of them has been moved."""
        return {name: _look(value) for name, value in self._values()}

    def _copies_of_moved(self) -> dict[str, dict[str, Any]]:
        return {name: _copy(value) for name, value in self._moving()}

    def _moving(self) -> Iterator[tuple[str, Any]]:
        of_weights = _made_of_weights(self._trainer)
        for name, value in self._values():
            if id(value) in of_weights or name in self._restored or self._has_moved(name, value):
                yield name, value

    def _has_moved(self, name: str, value: Any) -> bool:
        before = self._at_first.get(name, NONE)
        return not is_a_note(before, head_of(value)) and _look(value) != before

    def _gathered(self) -> dict[str, dict[str, Any]]:
        """Lists and the like that have grown by results, where the module makes something of them at an epoch's end."""
        if not is_overridden("on_train_epoch_end", self._module):
            return {}
        grown = ((name, one) for name, one in self._values() if is_a_note(self._at_first.get(name, NONE), head_of(one)))
        return {name: {"gathered": len(one)} for name, one in grown if holds_results(one)}

    def _values(self) -> Iterator[tuple[str, Any]]:
        for path, attributes in self._own:
            for name, value in attributes.items():
                if name not in OF_EVERY_MODULE and self._can_be_kept(value):
                    yield path + name, value
        for full_name, attributes, name in self._of_others:
            if is_plain(attributes.get(name, NONE)):
                yield full_name, attributes[name]
        for path, holder in _beside_the_module(self._trainer).items():
            is_data = not isinstance(holder, Optimizer)  # whose lists and arrays are the samples
            for name, value in vars(holder).items():
                if name not in OF_OTHERS and (_is_a_setting(value) if is_data else can_be_looked_at(value)):
                    yield path + name, value

    def _can_be_kept(self, value: Any) -> bool:
        if isinstance(value, LRScheduler):
            return id(value) not in self._known_schedules
        return isinstance(value, enum.Enum) or can_be_looked_at(value)


def _made_of_weights(trainer: Trainer) -> set[int]:
    """The ids of what optimizers that are no library's keep beside their state in the shapes of their parameters."""
    made = set[int]()
    for optimizer in trainer.optimizers:
        if not _is_of_a_library(optimizer):
            shapes = {one.shape for one in parameters_of(optimizer)}
            made |= {id(one) for one in vars(optimizer).values() if tensors_only(one) and shapes >= shapes_of(one)}
    return made


def _is_a_setting(value: Any) -> bool:
    return (
        is_plain(value) or isinstance(value, enum.Enum) or (isinstance(value, np.generic) and can_be_looked_at(value))
    )


def _called_by(pl_module: LightningModule) -> dict[str, str]:
    """What a module calls: its parts, and functions that it keeps, but those in place of a method of its class."""
    called: dict[str, str] = {}
    for path, part in pl_module.named_modules():
        called[path] = type(part).__qualname__
        own = {} if _is_of_a_library(part) else vars(part)
        functions = ((name, one) for name, one in own.items() if callable(one) and not hasattr(type(part), name))
        called |= {f"{path}.{name}".lstrip("."): _told_apart(one) for name, one in functions}
    return called


def _told_apart(function: Any) -> str:
    """Its name and, of one that is written in Python, what it does: two lambdas may have one name."""
    function = getattr(function, "func", function)  # of a partial
    code = getattr(function, "__code__", None)
    does = "" if code is None else zlib.crc32(repr((code.co_code, code.co_names, code.co_varnames)).encode())
    return f"{getattr(function, '__qualname__', type(function).__qualname__)} {does}"


def _helpers_of(holders: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The objects of the author's own classes that these hold, and those in them."""
    seen = set[int]()
    for _ in range(DEEPEST):
        held = ((f"{path}{name}.", value) for path, holder in holders for name, value in vars(holder).items())
        holders = [(path, value) for path, value in held if _is_a_helper(value) and id(value) not in seen]
        seen |= {id(value) for _, value in holders}
        yield from holders


def _beside_the_module(trainer: Trainer) -> dict[str, Any]:
    """The data module, the training datasets and optimizers that are no library's, by what names begin with there; of
    the data, none with an own state."""
    combined = COMBINED_LOADER.of(trainer.fit_loop)
    held: dict[str, Any] = {"data module:": trainer.datamodule}  # type: ignore[attr-defined]
    for number, loader in enumerate(combined.flattened if combined is not None else ()):
        dataset: Any = getattr(loader, "dataset", None)
        for depth in range(DEEPEST + 1):  # of a Subset, and of what is written like one, that within it as well
            held[f"dataset {number}{'.dataset' * depth}:"] = dataset
            dataset = getattr(dataset, "dataset", None)
    data = {name: one for name, one in held.items() if hasattr(one, "__dict__") and not _looks_after_itself(one)}
    optimizers = ((f"optimizer {number}:", one) for number, one in enumerate(trainer.optimizers))
    return data | {name: one for name, one in optimizers if not _is_of_a_library(one)}


def _looks_after_itself(one: Any) -> bool:
    kind = type(one)
    state_dict = getattr(kind, "state_dict", None)
    own_state = state_dict not in (None, LightningDataModule.state_dict)
    return own_state or _is_of_a_library(one) or not _is_by_the_author(kind)


def _is_by_the_author(kind: type) -> bool:
    """Whether a class comes from no package that was installed."""
    module = sys.modules.get(kind.__module__)
    name = str(getattr(module, "__name__", ""))
    return name.partition(".")[0] not in ROOTS and "-packages" not in str(getattr(module, "__file__", ""))


def _is_a_helper(value: Any) -> bool:
    if isinstance(value, SimpleNamespace):
        return True
    looked_after = (nn.Module, Dataset, Sampler, type, *WITH_A_STATE)  # they have their own place where they are saved
    kind = type(value)  # and not isinstance(), which asks the value itself: a proxy of what is gone raises
    return _is_by_the_author(kind) and not issubclass(kind, looked_after) and hasattr(value, "__dict__")


def put_plain_attributes(pl_module: LightningModule, saved: Mapping[str, dict[str, Any]]) -> None:
    """Put back what :meth:`PlainAttributes.moved` gave."""
    called = _called_by(pl_module)
    replaced = [name for name, kept in saved.items() if kept.get("replaced", called.get(name)) != called.get(name)]
    if replaced:
        rank_zero_warn(
            f"training had put something else in place of {', '.join(sorted(replaced))}, which no checkpoint holds. "
            "The module's flags are not put back then, so that code that goes by one does it again; where yours does "
            "not, do it in on_load_checkpoint"
        )
    for full_name, kept in saved.items():
        holder, name = _place_of(full_name, pl_module)
        if holder is None or "replaced" in kept:
            continue
        own = getattr(holder, name, None)
        if "gathered" in kept:
            progress = pl_module.trainer.fit_loop.epoch_loop.batch_progress
            if progress.current.ready and not progress.is_last_batch:
                rank_zero_warn(
                    f"this checkpoint was saved within an epoch, and {full_name} had "
                    f"{counted(kept['gathered'], 'entry', 'entries')}, which no checkpoint holds: what is made of it "
                    "at the epoch's end leaves them out. Keep a sum and a count in place of a list: numbers and "
                    "tensors that a module keeps come back"
                )
        elif "not kept" in kept:
            rank_zero_warn(
                f"training had moved {full_name}, {kept['not kept']}, that is kept as a plain attribute, and no "
                "checkpoint holds it. If training goes by it, keep it in buffers, or give your module an "
                "on_save_checkpoint and an on_load_checkpoint for it"
            )
        elif "schedule" in kept:
            if isinstance(own, LRScheduler):
                own.load_state_dict(kept["schedule"])
        elif not fits(own, kept.get("value")):
            rank_zero_warn(
                f"training had moved {full_name}, and this run begins with one of another length, which stays as it is"
            )
        elif "member" in kept:
            _put_member(holder, name, kept["member"], full_name)
        else:
            put = put_value(own, kept["value"], pl_module.device)
            if put is not own:
                vars(holder)[name] = put


def _place_of(full_name: str, pl_module: LightningModule) -> tuple[Any, str]:
    """What holds an attribute, or None, and its own name."""
    of_data, found, name = full_name.partition(":")
    if found:
        return _beside_the_module(pl_module.trainer).get(of_data + found), name
    path, _, name = full_name.rpartition(".")
    holder: Any = pl_module
    for part in path.split(".") if path else ():
        holder = getattr(holder, part, None)
    return holder, name


def _put_member(holder: Any, name: str, member: Any, full_name: str) -> None:
    """Of an enumeration, whose class is known by the member that the new run begins with."""
    own = getattr(holder, name, None)
    if isinstance(own, enum.Flag):  # which may be several members in one
        vars(holder)[name] = type(own)(member)
    elif isinstance(own, enum.Enum) and member in type(own).__members__:
        vars(holder)[name] = type(own)[member]
    else:
        rank_zero_warn(
            f"training had moved {full_name} to {member}, a member of an enumeration, and this run begins with {own}: "
            "it cannot be put back. Let it begin with a member of the same enumeration"
        )


def _copy(value: Any) -> dict[str, Any]:
    if isinstance(value, LRScheduler):
        return {"schedule": copy.deepcopy(value.state_dict())}
    if isinstance(value, enum.Enum):
        return {"member": value.value if isinstance(value, enum.Flag) else value.name}
    if why := why_not_kept(value):
        return {"not kept": why}
    return {"value": copy_of(value)}


def _look(value: Any) -> Any:
    return Look((value.last_epoch,)) if isinstance(value, LRScheduler) else look_of(value)


def _is_of_a_library(part: Any) -> bool:
    return type(part).__module__.startswith(LIBRARIES)


def _is_a_metric(part: nn.Module) -> bool:
    """A torchmetrics Metric, which looks after its own state."""
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(part).__mro__)
