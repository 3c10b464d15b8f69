"""Whether an order goes by its seed and its epoch, and by nothing else: what three exercises ask of an answer.

The order has to be the same in each process and to leave the global generators alone. And no two pairs (seed, epoch)
may have one order: answers that make one number of the two are tried with pairs for which that number is the same.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import math
import numbers
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

HASH = "hash() of a text has another value in each process. Make the generator of the numbers themselves."


@contextlib.contextmanager
def another_hash() -> Iterator[None]:
    """As in another process: hash() of what holds a text has another value."""

    def salted(value: Any) -> int:
        return original((original(value), "of another process")) if _holds_text(value) else original(value)

    original, builtins.hash = builtins.hash, salted
    try:
        yield
    finally:
        builtins.hash = original


def _holds_text(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(_holds_text, value))
    return isinstance(value, (str, bytes))


def global_states() -> tuple[Any, Any, Any]:
    """Those of torch's, Python's and NumPy's global generators."""
    numpys = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpys


def pairs_of_one_number(
    order: Callable[[int, int], Any], answer: Any = None
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs that may be of one number, if the answer makes a generator of a whole number; all of them below 2**32."""
    numbers: list[int] = []
    for pair in ((0, 0), (1, 0), (0, 1), (1, 1)):
        with numbers_of_generators(getattr(inspect.unwrap(answer), "__globals__", {})) as given:
            order(*pair)
        numbers += given[-1:]  # of a generator that is made of what another one has drawn
    if len(numbers) != 4:
        return []
    start, of_seed, of_epoch = numbers[0], numbers[1] - numbers[0], numbers[2] - numbers[0]
    found = [((1, 1), (0, numbers[3])), ((1, 1), (numbers[3], 0))]  # bits of the two: seed * 1000 ^ epoch
    if of_epoch >= 1 and numbers[3] - start == of_seed + of_epoch:  # a sum
        if of_seed >= 1:  # of multiples of the two
            common = math.gcd(of_seed, of_epoch)
            found.insert(0, ((of_epoch // common, 0), (0, of_seed // common)))
        elif of_seed % of_epoch == 0:  # of a number that is drawn by the seed, and the epoch
            found.insert(0, ((1, -of_seed // of_epoch), (0, 0)))
    return [pairs for pairs in found if all(0 <= number < 2**32 for pair in pairs for number in pair)]


@contextlib.contextmanager
def numbers_of_generators(names: dict[str, Any]) -> Iterator[list[int]]:
    """The whole numbers that generators are made of meanwhile, also by what is imported as one of ``names``."""
    seeds: list[int] = []

    def note(seed: Any) -> None:
        if np.size(seed) == 1 and isinstance(number := np.ravel(seed)[0], numbers.Integral):
            seeds.append(int(number))

    def default_rng(seed: Any = None) -> Any:
        note(seed)
        return make_rng(seed)

    def noted(kind: Any) -> Any:  # still a class, which NumPy asks for its instances
        class Noted(kind):
            def __init__(self, *seed: Any, **options: Any) -> None:
                note([*seed, *options.values(), None][0])
                super().__init__(*seed, **options)

        return Noted

    class NotedGenerator(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            note(seed)
            return super().manual_seed(seed)

    make_rng = np.random.default_rng
    instead = {id(kind): noted(kind) for kind in (*NUMPYS_KINDS, random.Random)}
    instead |= {id(make_rng): default_rng, id(torch.Generator): NotedGenerator}
    with contextlib.ExitStack() as stack:
        for place in (vars(np.random), vars(random), vars(torch), names):
            changed = {name: instead[id(value)] for name, value in place.items() if id(value) in instead}
            stack.enter_context(mock.patch.dict(place, changed))
        yield seeds


NUMPYS_KINDS = (
    *(np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64, np.random.MT19937),
    *(np.random.RandomState, np.random.SeedSequence),
)
KNOWN_NUMBERS = (7_919, 10_007, 12_345, 65_537, 1_000_003, 10**9)
FACTORS = sorted({*range(2, 1100), *(10**k for k in range(4, 7)), *(2**k for k in range(11, 32)), *KNOWN_NUMBERS})
"""By which people multiply the seed or the epoch before they add the other."""
WRITTEN_ALIKE = [*((1, 10**k) for k in range(1, 6)), (1, 16**4), (17, 0)]
"""Seed and epoch that make one text with (11, 0), up to the width 5; or, in hexadecimal digits, with (17, 0)."""
EPOCHS = {*range(2, 257), *range(300, 1100, 50), 365, 512, 997, 1009, 1024, 10**4, *(2**k for k in range(11, 17))}
EPOCHS |= {factor for factor in KNOWN_NUMBERS if factor < 2**16}
"""Those of `FACTORS` that are tried as an epoch: fewer and none beyond 65,536, because a right answer may take longer
for a later epoch, as `SeedSequence(seed).spawn(epoch + 1)[epoch]` does."""
