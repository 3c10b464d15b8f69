"""Random generators that an object holds as attributes: torch's, NumPy's and Python's."""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
DEEPEST = 3
"""Objects, lists and dicts between an attribute and a generator."""
LONGEST = 1_000
"""Of a list or dict that is looked through."""
LIBRARIES = {"torch", "lightning", "pytorch_lightning", "numpy", "course_lib", "torchmetrics"} | sys.stdlib_module_names


def held_by(*holders: Any) -> list[Any]:
    """The generators that are attributes of these objects, each once; none that the system draws for."""
    attributes = (value for holder in holders for value in getattr(holder, "__dict__", {}).values())
    held = {id(one): one for one in attributes if _is_a_generator(one)}
    return list(held.values())


def held_within(*holders: Any) -> list[Any]:
    """The same, and those in their lists, dicts and plain objects; not in a module, dataset, sampler or a library's."""
    held: dict[int, Any] = {}
    seen = set[int]()
    level: list[Any] = [value for holder in holders for value in vars(holder).values()]
    for _ in range(DEEPEST + 1):
        held |= {id(one): one for one in level if _is_a_generator(one)}
        unseen = {id(one): one for one in level if id(one) not in seen}
        seen |= unseen.keys()
        level = [value for one in unseen.values() for value in _values_in(one)]
    return list(held.values())


def _values_in(holder: Any) -> Iterable[Any]:
    if isinstance(holder, Mapping | list | tuple | set):
        values = holder.values() if isinstance(holder, Mapping) else holder
        return values if len(holder) <= LONGEST else ()
    return () if is_looked_after(holder) else getattr(holder, "__dict__", {}).values()


def is_looked_after(thing: Any) -> bool:
    """A module, dataset or sampler, which has its own place where it is seeded and saved; or a library's object."""
    root = type(thing).__module__.partition(".")[0]
    return isinstance(thing, nn.Module | Dataset | Sampler | type) or root in LIBRARIES


def _is_a_generator(one: Any) -> bool:
    return isinstance(one, KINDS) and not isinstance(one, random.SystemRandom)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed it by an integer of up to 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed % 2**63)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
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

    def look_at(self, module: nn.Module, *others: Any) -> None:
        """Take those of this module, and of ``others``, in the place of another one's."""
        known = {id(one): first for one, first in self._held}
        held = held_within(*module.modules(), *others)
        self._held = [(one, known[id(one)] if id(one) in known else _number_of(one)) for one in held]

    def seed(self, *entropy: int) -> None:
        """Seed each by these non-negative integers, and by how it was seeded at first."""
        for generator, first in self._held:
            [seed] = np.random.SeedSequence((*entropy, first)).generate_state(1, np.uint64).tolist()
            seed_generator(generator, seed)


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
