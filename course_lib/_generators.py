"""The global random generators: Python's, NumPy's, torch's on the CPU and on every GPU."""

from __future__ import annotations

import _random
import contextlib
import ctypes
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# These generators count which of their 624 numbers is next, and make them all anew when they are used up. So the count
# and the numbers beside it in memory change with each draw: 64 bytes there are read at once, and tell of any draw.
BESIDE_THE_COUNT = ctypes.c_char * 64


def memory_of(instance: object, kind: type) -> tuple[int, int]:
    """Address and size of what a C type keeps in its instance, behind the header that counts references."""
    header = object.__basicsize__
    return id(instance) + header, kind.__basicsize__ - header


class PythonGenerator:
    """Python's ``random``."""

    _global: Any = random._inst  # type: ignore[attr-defined]
    _count: Any = BESIDE_THE_COUNT.from_address(memory_of(_global, _random.Random)[0])  # it comes first

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def state(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def mark(self) -> object:
        """Changes whenever something is drawn or seeded. ``state()`` takes 9 µs, and NumPy's 40: too much a batch."""
        return self._count.raw, self._global.gauss_next


class NumpyGenerator:
    """NumPy's global one, behind ``np.random.rand`` and its like."""

    _global: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    # It keeps the second of two normal numbers, somewhere in its 224 bytes.
    _address, _size = memory_of(_global, type(_global))
    _of_normals: Any = (ctypes.c_char * _size).from_address(_address)
    _bits: Any = None
    _count: Any

    def seed(self, seed: int) -> None:
        bits = self._global._bit_generator
        if isinstance(bits, np.random.MT19937):
            np.random.seed(seed % 2**32)  # noqa: NPY002
        else:  # somebody has called np.random.set_bit_generator
            bits.state = type(bits)(seed).state

    def state(self) -> Any:
        return np.random.get_state(legacy=False)  # noqa: NPY002

    def restore(self, state: Any) -> None:
        np.random.set_state(state)  # noqa: NPY002

    def mark(self) -> object:
        bits = self._global._bit_generator
        if not isinstance(bits, np.random.MT19937):
            return str(bits.state)
        if bits is not NumpyGenerator._bits:
            end = bits.ctypes.state_address + 4 * (624 + 1)  # words of 32 bits: the last is the count
            NumpyGenerator._bits, NumpyGenerator._count = bits, BESIDE_THE_COUNT.from_address(end - 64)
        return self._count.raw, self._of_normals.raw


class TorchGenerator:
    """torch's default generator of the CPU."""

    _size = torch.default_generator.get_state().nbytes

    def seed(self, seed: int) -> None:
        # torch.manual_seed writes down a stack for every device that has not been used yet: half a millisecond.
        torch.default_generator.manual_seed(seed)

    def state(self) -> Any:
        return torch.default_generator.get_state()

    def restore(self, state: Any) -> None:
        torch.default_generator.set_state(state)

    def mark(self) -> object:
        state = torch.default_generator.get_state()
        address = state.data_ptr()  # the count comes first; a second normal number that is left over, last
        end = address + self._size
        return BESIDE_THE_COUNT.from_address(address).raw, BESIDE_THE_COUNT.from_address(end - 64).raw


CpuGenerator = PythonGenerator | NumpyGenerator | TorchGenerator
CPU_GENERATORS: tuple[CpuGenerator, ...] = (PythonGenerator(), NumpyGenerator(), TorchGenerator())


def marks() -> tuple[object, ...]:
    """Of each of them: what has drawn or seeded anything in between leaves others."""
    return tuple(generator.mark() for generator in CPU_GENERATORS)


SETTERS = (
    (0, random, "setstate"),
    (1, np.random, "set_state"),
    (2, torch, "set_rng_state"),
    (2, torch.random, "set_rng_state"),
)
"""What sets the state of a generator, by its number in ``CPU_GENERATORS``: where it is found, and its name."""


@contextlib.contextmanager
def generators_that_are_set() -> Iterator[set[int]]:
    """The numbers of those whose state is set inside by these functions; by others, nobody sees it."""
    were_set: set[int] = set()
    own = [getattr(place, name) for _, place, name in SETTERS]

    def noting(which: int, setter: Any) -> Any:
        def note_and_set(*state: Any, **named: Any) -> Any:
            were_set.add(which)
            return setter(*state, **named)

        return note_and_set

    for (which, place, name), setter in zip(SETTERS, own, strict=True):
        setattr(place, name, noting(which, setter))
    try:
        yield were_set
    finally:
        for (_, place, name), setter in zip(SETTERS, own, strict=True):
            setattr(place, name, setter)


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the global generators stand afterwards where they stood before."""
    states = [generator.state() for generator in CPU_GENERATORS]
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for generator, state in zip(CPU_GENERATORS, states, strict=True):
            generator.restore(state)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)


def seed_generators(*entropy: int) -> None:
    """Seed them all by some non-negative integers: other integers, other numbers."""
    seeds = np.random.SeedSequence(entropy).generate_state(3, np.uint64).tolist()
    for generator, seed in zip(CPU_GENERATORS, seeds, strict=True):
        generator.seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seeds[2])
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seeds[2])
