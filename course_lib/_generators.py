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


class PythonGenerator:
    """Python's ``random``."""

    # getstate() makes 625 ints. What the interpreter keeps behind the object's header changes with each draw as well.
    _memory: Any = (ctypes.c_char * (_random.Random.__basicsize__ - object.__basicsize__)).from_address(
        id(random._inst) + object.__basicsize__  # type: ignore[attr-defined]
    )

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def state(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def mark(self) -> object:
        """Changes whenever something is drawn or seeded; cheaper than ``state``, and nothing to restore from."""
        return self._memory.raw, random._inst.gauss_next  # type: ignore[attr-defined]


class NumpyGenerator:
    """NumPy's global one, behind ``np.random.rand`` and its like."""

    _global: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    # A normal number that the last draw left over is kept in the object itself; its header counts references.
    _memory: Any = (ctypes.c_char * (type(_global).__basicsize__ - object.__basicsize__)).from_address(
        id(_global) + object.__basicsize__
    )

    def __init__(self) -> None:
        self._address, self._words = 0, ctypes.create_string_buffer(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # an address means nothing in another process

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
        """See :class:`PythonGenerator`: here ``state`` takes 40 µs."""
        bits = self._global._bit_generator
        if not isinstance(bits, np.random.MT19937):
            return str(bits.state)
        address = bits.ctypes.state_address
        if address != self._address:
            # 624 words of 32 bits, and the number of those that were used.
            self._address, self._words = address, (ctypes.c_char * (4 * 625)).from_address(address)
        return self._words.raw, self._memory.raw


class TorchGenerator:
    """torch's default generator of the CPU."""

    def seed(self, seed: int) -> None:
        # torch.manual_seed writes down a stack for every device that has not been used yet: half a millisecond.
        torch.default_generator.manual_seed(seed)

    def state(self) -> Any:
        return torch.default_generator.get_state()

    def restore(self, state: Any) -> None:
        torch.default_generator.set_state(state)

    def mark(self) -> object:
        return torch.default_generator.get_state().numpy().tobytes()


CpuGenerator = PythonGenerator | NumpyGenerator | TorchGenerator
CPU_GENERATORS: tuple[CpuGenerator, ...] = (PythonGenerator(), NumpyGenerator(), TorchGenerator())


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
