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
    held = {id(value): value for value in attributes if isinstance(value, KINDS)}
    return [value for value in held.values() if not isinstance(value, random.SystemRandom)]


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
def generators_put_back(*, gpus: bool = True) -> Iterator[None]:
    """Whatever is drawn or seeded inside, the global generators stand afterwards where they stood before."""
    put_back = [keep_state(generator) for generator in GLOBAL]
    if gpus and torch.cuda.is_initialized():
        states = torch.cuda.get_rng_state_all()  # type: ignore[no-untyped-call]
        put_back.append(functools.partial(torch.cuda.set_rng_state_all, states))
    try:
        yield
    finally:
        for put in put_back:
            put()


def seed_generators(*entropy: int) -> None:
    """Seed the global ones, the GPUs' too, by some non-negative integers: other integers, other numbers."""
    seeds = np.random.SeedSequence(entropy).generate_state(3, np.uint64).tolist()
    for generator, seed in zip(GLOBAL, seeds, strict=True):
        seed_generator(generator, seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seeds[2])
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seeds[2])
