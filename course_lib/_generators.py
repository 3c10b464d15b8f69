"""Random generators: the global ones of Python, NumPy and torch, and those that objects hold as attributes."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

KINDS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
GLOBAL: tuple[Any, ...] = (
    random._inst,  # type: ignore[attr-defined]
    np.random.mtrand._rand,  # type: ignore[attr-defined]
    torch.default_generator,
)
"""Python's ``random``, NumPy's behind ``np.random.rand`` and its like, and torch's of the CPU."""


def held_by(*holders: Any) -> list[Any]:
    """The generators that are attributes of these objects, each once; none that the system draws for."""
    attributes = (value for holder in holders for value in getattr(holder, "__dict__", {}).values())
    kinds = ((value, type(value)) for value in attributes)
    held = {
        id(value): value
        for value, kind in kinds
        if issubclass(kind, KINDS) and not issubclass(kind, random.SystemRandom)
    }
    return list(held.values())


def seed_generator(generator: Any, seed: int) -> None:
    """Seed it by an integer of up to 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed % 2**63)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)


def keep_state(generator: Any) -> Callable[[], object]:
    """Remember where it stands; what is returned puts it there again."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state(legacy=False))
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return functools.partial(generator.set_state, generator.get_state())


@contextlib.contextmanager
def cpu_generators_put_back() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the global generators of the CPU stand afterwards where they stood before."""
    put_back = [keep_state(generator) for generator in GLOBAL]
    try:
        yield
    finally:
        for put in put_back:
            put()


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    """The same, with those of the GPUs."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    with cpu_generators_put_back():
        try:
            yield
        finally:
            if gpus is not None:
                torch.cuda.set_rng_state_all(gpus)


def seed_generators(*entropy: int) -> None:
    """Seed them all by some non-negative integers: other integers, other numbers."""
    seeds = _seeds_of(entropy)
    for generator, seed in zip(GLOBAL, seeds, strict=True):
        seed_generator(generator, seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seeds[2])
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seeds[2])


@functools.lru_cache(maxsize=1)  # a clean point and the micro-batch behind it ask for the same
def _seeds_of(entropy: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.random.SeedSequence(entropy).generate_state(3, np.uint64).tolist())
