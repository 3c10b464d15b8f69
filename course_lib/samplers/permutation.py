"""A shuffled order of 2**62 indices that takes no memory: any position of it is computed when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from course_lib._words import int_of_at_least

Ints = NDArray[np.int64]

BLOCK = 1 << 15
"""Indices computed at a time: enough for NumPy to be quick, and few enough to stay in the processor's cache."""


class IndexPermutation:
    """A random order of ``range(n)`` that is computed, not stored: O(1) memory, any position in O(1).

    Call it with an array of positions (int64, any shape) and get the array of their indices, each of ``range(n)``
    exactly once; index it with a position and get an int.

    Up to 65,536 it is a uniformly random permutation, held as a table. Beyond, the smallest power of two that holds n
    is permuted by rounds of odd multiplication and shift, both of which can be undone, so that no two positions
    meet; a result beyond n is sent through again until it is below ("cycle walking": Black and Rogaway, *Ciphers
    with Arbitrary Finite Domains*, 2002). Such an order is for shuffling, not for cryptography.

    Args:
        n: Number of indices, from 1 to 2**62.
        seed: An int of at least 0, or several, mixed by ``SeedSequence``.
    """

    ROUNDS = 6
    TABLE = 1 << 16

    def __init__(self, n: int, seed: int | Sequence[int] = 0) -> None:
        self.n = int_of_at_least(1, "n", n)
        if self.n > 2**62:
            raise ValueError(f"n must be at most 2**62, got {n}")
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self._table: Ints | None = rng.permutation(self.n) if self.n <= self.TABLE else None
        bits = max(2, (self.n - 1).bit_length())
        self._dtype: Any = np.uint32 if bits <= 32 else np.uint64
        self._mask = self._dtype(2**bits - 1)
        self._shift = self._dtype(bits // 2)
        keys = rng.integers(0, 2**bits, size=(self.ROUNDS, 2), dtype=np.uint64).astype(self._dtype)
        self._keys = [(multiplier | self._dtype(1), addend) for multiplier, addend in keys]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        return int(self(np.array([range(self.n)[position]], dtype=np.int64))[0])

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, self.n, BLOCK):
            yield from self(np.arange(begin, min(begin + BLOCK, self.n), dtype=np.int64)).tolist()

    def __call__(self, positions: Ints) -> Ints:
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < self.n):
            raise IndexError(f"positions must be from 0 to {self.n - 1}")
        if self._table is not None:
            return self._table[positions]
        # A bijection of 0 … 2**bits - 1. What lands at n or beyond is sent on until it lands below: at the latest where
        # its cycle began, which is below n. So no two positions end at one index.
        indices = self._mixed(positions.astype(self._dtype).ravel())
        beyond = np.flatnonzero(indices >= self.n)
        while beyond.size:
            again = indices[beyond] = self._mixed(indices[beyond])
            beyond = beyond[again >= self.n]
        return indices.astype(np.int64).reshape(positions.shape)

    def _mixed(self, x: Any) -> Any:
        # Modulo 2**bits: an odd multiplier has an inverse, and x ^ (x >> s) is undone from the high bits down.
        for multiplier, addend in self._keys:
            x = (x * multiplier + addend) & self._mask
            x ^= x >> self._shift
        return x
