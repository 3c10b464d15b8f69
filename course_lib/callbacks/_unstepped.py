"""What no optimizer steps: a module's buffers and extra state, the parameters that its own code moves, and its rates.

They change within a window (BatchNorm's statistics, a momentum encoder), so a checkpoint that is set back to a window's
start needs them as they were there. A buffer with ``persistent=False``, and a plain attribute, is in no checkpoint of
Lightning's at all.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from course_lib._tensors import parameters_of, version_of
from course_lib.callbacks._attributes import PlainAttributes, put_plain_attributes
from course_lib.callbacks._values import is_a_note

EXTRA = "_extra_state"
"""As ``nn.Module.state_dict`` names what ``get_extra_state`` returns."""


class Unstepped:
    """What the module's own code moves, as it was when the window began.

    Parameters that no optimizer has are mostly frozen, and may be most of the model. So they are copied only where
    they have been seen to move from one window to the next; three numbers of each are looked at.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, loaded: Mapping[str, Any]) -> None:
        held = {id(parameter) for optimizer in trainer.optimizers for parameter in parameters_of(optimizer)}
        self._module, self._optimizers = pl_module, trainer.optimizers
        named = pl_module.named_parameters(remove_duplicate=False)
        self._parameters = {name: one for name, one in named if id(one) not in held and _has_numbers(one)}
        modules = ((name, one) for name, one in pl_module.named_modules() if _has_extra_state(one))
        self._with_extra_state = {f"{name}.{EXTRA}".lstrip("."): one for name, one in modules}
        self._seen = self._looks()
        self._moved: set[str] = set()
        self._kept: dict[str, Any] = {}
        self._settings: list[list[dict[str, Any]]] = []
        self._restored = set(loaded.get("not_persistent", ()))
        self._attributes = PlainAttributes(trainer, pl_module, loaded.get("attributes", {}))
        begun = BEGUN.get(pl_module)
        # What was put back is no change by the reader.
        put_back = {*loaded.get("attributes", ()), *loaded.get("not_persistent", ())}
        looks = (
            _looks_of(self._attributes, pl_module)
            if begun is None or loaded
            else begun.take_over(self._attributes, pl_module)
        )
        # What an earlier fit has moved is moved in this one, too.
        at_first = begun.at_first if begun else {name: look for name, look in looks.items() if name not in put_back}
        self._at_first = at_first
        self._attributes.compare_with(at_first)
        if loaded:
            BEGUN.setdefault(pl_module, _Begun(weakref.ref(trainer), {}, {}, {}, at_first))
        elif begun is None or begun.trainer() is not trainer:
            attributes, buffers = self._attributes.copies(), _copies_of_buffers(pl_module)
            BEGUN[pl_module] = _Begun(weakref.ref(trainer), attributes, buffers, looks, at_first)

    def leave(self) -> None:
        """Remember how a fit leaves it: what is another between this one and the next was changed by the reader."""
        if begun := BEGUN.get(self._module):
            begun.left = _looks_of(self._attributes, self._module)

    def keep(self) -> None:
        """Remember it all, ahead of a window's first micro-batch."""
        self._attributes.keep()
        seen = self._looks()
        self._moved |= self._moved_to(seen)
        self._seen = seen
        moved = ((name, self._parameters[name]) for name in self._moved)
        self._kept = {name: tensor.detach().clone() for name, tensor in (*self._buffers(), *moved)}
        self._kept |= {name: copy.deepcopy(one.get_extra_state()) for name, one in self._with_extra_state.items()}
        groups = (optimizer.param_groups for optimizer in self._optimizers)
        self._settings = [[copy.deepcopy(_settings(group)) for group in of_one] for of_one in groups]

    def set_back(self, state: dict[str, Any], optimizer_states: list[dict[str, Any]]) -> list[str]:
        """Put it into a module's state, and the rates into those of its optimizers.

        Returns the names of parameters that have moved since, and were not known to do so.
        """
        for optimizer_state, settings in zip(optimizer_states, self._settings, strict=False):
            groups = optimizer_state["param_groups"]  # some may have come since
            optimizer_state["param_groups"] = [
                *(group | own for group, own in zip(groups, settings, strict=False)),
                *groups[len(settings) :],
            ]
        for name in self._kept.keys() & state.keys():
            state[name] = self._kept[name]
        return sorted(self._moved_to(self._looks()) - self._kept.keys())

    def in_no_state(self, state: Mapping[str, Any], *, set_back: bool) -> dict[str, dict[str, Any]]:
        """The buffers that are not in a module's state, and the plain attributes, that have changed since the run
        began."""
        if not state:
            return {"not_persistent": {}, "attributes": {}}  # what saves no weights, saves none of these
        changed = {
            name: self._kept.get(name, buffer) if set_back else buffer
            for name, buffer in self._buffers()
            if name not in state
            and buffer.layout is torch.strided
            and (name in self._restored or version_of(buffer) != self._at_first.get(name))
        }
        attributes = self._attributes.moved_before_the_window() if set_back else self._attributes.moved()
        buffers = {name: buffer.detach().clone() for name, buffer in changed.items()}
        return {"not_persistent": buffers, "attributes": attributes}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self._module.named_buffers(remove_duplicate=False)

    def _moved_to(self, looks: dict[str, tuple[object, ...]]) -> set[str]:
        return {name for name, look in looks.items() if look != self._seen.get(name)}

    def _looks(self) -> dict[str, tuple[object, ...]]:
        kinds: dict[tuple[object, ...], dict[str, Tensor]] = {}
        for name, one in self._parameters.items():
            if one.numel():
                kinds.setdefault((one.device, one.dtype), {})[name] = one.detach()
        looks: dict[str, tuple[object, ...]] = {}
        for named in kinds.values():
            # One tensor for all of them, as a GPU answers in its own time. A number that is none equals itself as text.
            some = torch.stack([one[place] for one in named.values() for place in _places(one)]).view(-1, 3)
            numbers = (map(str, three) for three in some.tolist())
            # Through .data a parameter moves without a new version.
            looks |= {name: (*version_of(self._parameters[name]), *next(numbers)) for name in named}
        return looks


@dataclass
class _Begun:
    """What is in no state of a module, as it was when its run began.

    A checkpoint holds what had moved by then. Where an exception has ended a fit, the same module may go on from one
    that is older than the first move.
    """

    trainer: weakref.ref[Trainer]
    attributes: dict[str, Any]
    buffers: dict[str, Tensor]
    looks: dict[str, Any]
    at_first: dict[str, Any]
    """The looks of when the module's first run began."""
    left: dict[str, Any] = field(default_factory=dict)

    def take_over(self, attributes: PlainAttributes, pl_module: LightningModule) -> dict[str, Any]:
        """What was changed since the last fit left it: by the reader, whose runs begin with it from now on.

        Returns how it all looks now.
        """
        now = _looks_of(attributes, pl_module)
        changed = {name for name, look in now.items() if name not in self.left or look != self.left[name]}
        if self.left and changed:
            self.attributes |= {name: one for name, one in attributes.copies().items() if name in changed}
            self.buffers |= {name: one for name, one in _copies_of_buffers(pl_module).items() if name in changed}
            self.looks |= {name: now[name] for name in changed}
            self.at_first |= {name: now[name] for name in changed}
        return now


BEGUN: weakref.WeakKeyDictionary[LightningModule, _Begun] = weakref.WeakKeyDictionary()


def _looks_of(attributes: PlainAttributes, pl_module: LightningModule) -> dict[str, Any]:
    buffers = pl_module.named_buffers(remove_duplicate=False)
    return attributes.looks() | {name: version_of(buffer) for name, buffer in buffers}


def _copies_of_buffers(pl_module: LightningModule) -> dict[str, Tensor]:
    """Of those with ``persistent=False``, on the CPU."""
    parts = pl_module.named_modules()
    names = (f"{path}.{name}".lstrip(".") for path, part in parts for name in sorted(part._non_persistent_buffers_set))
    buffers = dict(pl_module.named_buffers(remove_duplicate=False))
    held = {name: buffers[name].detach() for name in names if name in buffers}
    return {name: one.to("cpu", copy=True) for name, one in held.items() if one.layout is torch.strided}


def _as_it_began(trainer: Trainer, pl_module: LightningModule) -> dict[str, dict[str, Any]]:
    """What a fit with this module has left moved, as it was when the run began; empty for a module that is new."""
    if (begun := BEGUN.get(pl_module)) is None:
        return {"attributes": {}, "not_persistent": {}}
    now = begun.take_over(PlainAttributes(trainer, pl_module), pl_module)
    left = ((name, begun.looks.get(name), look) for name, look in begun.left.items() if now.get(name) == look)
    moved = {name for name, before, look in left if look != before and not is_a_note(before, look)}
    return {
        "attributes": {name: one for name, one in begun.attributes.items() if name in moved},
        "not_persistent": {name: one for name, one in begun.buffers.items() if name in moved},
    }


def put_what_is_in_no_state(pl_module: LightningModule, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back what :meth:`Unstepped.in_no_state` gave, and the rest as it was when the run began."""
    first = _as_it_began(pl_module.trainer, pl_module)
    put_plain_attributes(pl_module, first["attributes"] | dict(saved.get("attributes", {})))
    for name, value in (first["not_persistent"] | dict(saved.get("not_persistent", {}))).items():
        owner, _, own_name = name.rpartition(".")
        part = pl_module.get_submodule(owner)
        buffer = getattr(part, own_name, None)
        if isinstance(buffer, Tensor) and buffer.shape == value.shape:
            with torch.no_grad():
                buffer.copy_(value)
        else:
            setattr(part, own_name, value.to(pl_module.device))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The rate of a group of parameters, its weight decay, and so on."""
    return {name: value for name, value in group.items() if name != "params"}


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _has_numbers(parameter: Tensor) -> bool:
    """Whether it is on a device by itself: not sharded, not sparse, and not still to be made."""
    if is_lazy(parameter) or parameter.is_meta:
        return False
    return type(parameter.data) is Tensor and parameter.layout is torch.strided


def _places(tensor: Tensor) -> list[tuple[int, ...]]:
    """The first, the middle and the last number of a tensor."""
    return [tuple(int((size - 1) * share) for size in tensor.shape) for share in (0, 0.5, 1)]
