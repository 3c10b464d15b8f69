"""Random generators that an object holds as attributes: torch's, NumPy's and Python's."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pickle
import random
import sys
import zlib
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
DEEPEST = 3
"""Objects, lists, dicts and functions between an attribute and a generator."""
DEEPEST_IN_DATA = 10
MOST = 10_000
"""Things that are looked at on one level."""
LONGEST = 1_000
"""Of a list or dict that is looked through."""
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
HOLD_NOTHING = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Tensor, np.ndarray})
"""Nor are they counted."""
HOLDERS = (*CONTAINERS, FunctionType, MethodType, BuiltinMethodType, functools.partial, SimpleNamespace, Namespace)
"""Of the standard library."""
GLOBAL = {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}  # type: ignore[attr-defined]
LIBRARIES = {"torch", "lightning", "pytorch_lightning", "numpy", "course_lib", "torchmetrics"} | sys.stdlib_module_names


def held_by(*holders: Any) -> list[Any]:
    """The generators that are attributes of these objects, each once; none that the system draws for."""
    attributes = (value for holder in holders for value in _attributes_of(holder))
    held = {id(one): one for one in attributes if _is_a_generator(one)}
    return list(held.values())


def held_within(*holders: Any, in_data: bool = False) -> list[Any]:
    """The same, and those in their lists, dicts and plain objects, in their classes, and those that their code names.

    Not those in another module, dataset, sampler or library's object, unless ``in_data``: then in modules and datasets
    as well, as transforms are held by these.
    """
    held: dict[int, Any] = {}
    seen = {id(holder) for holder in holders}
    level = [value for holder in holders for value in _inside(holder)]
    for _ in range(DEEPEST_IN_DATA if in_data else DEEPEST + 1):
        held |= {id(one): one for one in level if _is_a_generator(one) and id(one) not in GLOBAL}
        unseen = {id(one): one for one in level if id(one) not in seen}
        seen |= unseen.keys()
        within = (value for one in unseen.values() if _is_looked_into(one, in_data) for value in _inside(one))
        level = list(itertools.islice((value for value in within if type(value) not in HOLD_NOTHING), MOST))
    return [one for one in held.values() if _has_a_state(one)]


def _is_looked_into(thing: Any, in_data: bool) -> bool:
    kind = type(thing)  # and not isinstance(), which asks the thing itself: a proxy of what is gone raises
    if issubclass(kind, HOLDERS) or (issubclass(kind, type) and is_by_the_author(thing)):
        return True
    return (in_data and issubclass(kind, nn.Module | Dataset)) or not is_looked_after(thing)


def _inside(thing: Any) -> Iterable[Any]:
    """What a container holds, a function names, and an object has as attributes or in its class."""
    own = type(thing)
    if kind := next((kind for kind in CONTAINERS if issubclass(own, kind)), None):
        # As the builtin class does: what an author's own makes when it is asked, such as an image, is not made here.
        values = dict.values(thing) if kind is dict else kind.__iter__(thing)
        return list(values) if kind.__len__(thing) <= LONGEST else ()
    if own is functools.partial:
        return (thing.func, *thing.args, *thing.keywords.values())
    if own is FunctionType:
        return _named_by(thing)
    if own in (MethodType, BuiltinMethodType):  # as a generator's own random()
        return (thing.__self__, getattr(thing, "__func__", None))
    kinds = [kind for kind in (thing if issubclass(own, type) else own).__mro__ if is_by_the_author(kind)]
    of_classes = [value for kind in kinds for value in vars(kind).values()]
    return (*_attributes_of(thing), *_in_slots(thing, of_classes), *map(_function_of, of_classes))


def _in_slots(thing: Any, of_classes: Iterable[Any]) -> Iterable[Any]:
    for slot in of_classes:
        if type(slot) is MemberDescriptorType:
            with contextlib.suppress(AttributeError, TypeError):  # it is empty, or the thing is the class
                yield slot.__get__(thing)


def _attributes_of(thing: Any) -> Iterable[Any]:
    """Without its author's ``__getattr__``, which may raise whatever it likes."""
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return ()
    return list(attributes.values()) if type(attributes) is dict else ()


def _function_of(value: Any) -> Any:
    """What a class has as a method of another kind."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _named_by(function: FunctionType) -> list[Any]:
    """What a function's global names and its closure hold, but for the functions of packages."""
    code = [function.__code__]
    for one in code:  # and of the functions in it
        code += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    names = dict.fromkeys(name for one in code for name in one.co_names)
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    for one in found:  # a module, and one in a package of them
        if type(one) is ModuleType and is_by_the_author(one) and len(found) < LONGEST:
            found += [vars(one)[name] for name in names if name in vars(one)]
    found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    own = [one for one in found if type(one) is not FunctionType or is_by_the_author(one)]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            own.append(cell.cell_contents)
    return own


def is_by_the_author(of: Any) -> bool:
    """Whether a class, a function or a module comes from no package that was installed."""
    module = of if isinstance(of, ModuleType) else sys.modules.get(of.__module__)
    name = str(getattr(module, "__name__", ""))
    return name.partition(".")[0] not in LIBRARIES and "-packages" not in str(getattr(module, "__file__", ""))


def is_looked_after(thing: Any) -> bool:
    """A module, dataset or sampler, which has its own place where it is seeded and saved; or a library's object."""
    root = str(type(thing).__module__).partition(".")[0]
    return issubclass(type(thing), nn.Module | Dataset | Sampler | type) or root in LIBRARIES


def _is_a_generator(one: Any) -> bool:
    return issubclass(type(one), KINDS) and not issubclass(type(one), random.SystemRandom)


def _has_a_state(generator: Any) -> bool:
    """None does that is written anew over one of the classes and draws from elsewhere."""
    try:
        fingerprint_of(generator)
    except Exception:
        return False
    return True


def seed_generator(generator: Any, seed: int) -> None:
    """Seed it by an integer of up to 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed % 2**63)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        bits: Any = generator._bit_generator  # type: ignore[attr-defined]
        if isinstance(bits, np.random.MT19937):
            generator.seed(seed % 2**32)
        else:
            bits.state = type(bits)(seed).state
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def keep_state(generator: Any) -> Callable[[], None]:
    """Remember where it stands; what is returned puts it there again."""
    state = _state(generator)

    def put_back() -> None:
        if isinstance(generator, torch.Generator | np.random.RandomState):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.bit_generator.state = state

    return put_back


class ModulesGenerators:
    """The generators that a module, its parts and others hold, each with how it was seeded when it was first seen.

    Those that were seeded alike draw alike after :meth:`seed` as well, on other ranks and in other processes too.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Any, int]] = []
        self._seen: dict[int, tuple[Any, int]] = {}  # with the generators, so that no other one gets their ids

    def look_at(
        self, module: nn.Module, others: Iterable[Any], data: Sequence[Any] = (), orders: Sequence[Any] = ()
    ) -> None:
        """Take those of this module, and of ``others`` and datasets, in the place of another one's; none that the
        ``orders`` go by, which are loaders and samplers."""
        held = [*held_within(*module.modules(), *others), *held_within(data, in_data=True)]
        known_orders = {id(one) for one in held_by(*orders)}
        held = [one for one in {id(one): one for one in held}.values() if id(one) not in known_orders]
        for one in held:
            if id(one) not in self._seen:
                self._seen[id(one)] = one, _number_of(one)
        self._held = [self._seen[id(one)] for one in held]

    def seed(self, *entropy: int) -> None:
        """Seed each by these non-negative integers, and by how it was seeded at first."""
        for generator, first in self._held:
            [seed] = np.random.SeedSequence((*entropy, first)).generate_state(1, np.uint64).tolist()
            seed_generator(generator, seed)


class HeldGenerator:
    """One that a dataset holds, in the form of the global ones of ``course_lib._generators``."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def seed(self, seed: int) -> None:
        seed_generator(self.generator, seed)

    def state(self) -> Any:
        return keep_state(self.generator)

    def restore(self, state: Any) -> None:
        state()

    def mark(self) -> object:
        return fingerprint_of(self.generator)


def fingerprint_of(generator: Any) -> int:
    """A number of its state: generators of one kind that have the same draw the same."""
    state = _state(generator)
    if isinstance(state, torch.Tensor):
        return zlib.crc32(state.numpy().tobytes())
    return zlib.crc32(pickle.dumps(state))


def _number_of(generator: Any) -> int:
    """Of how it was seeded; NumPy's and Python's tell where they stand alone."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return zlib.crc32(json.dumps(_state(generator), default=np.ndarray.tolist).encode())


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state
