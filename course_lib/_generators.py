"""The global random generators: Python's, NumPy's, torch's on the CPU and on every GPU."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the global generators stand afterwards where they stood before."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)


def seed_generators(*entropy: int) -> None:
    """Seed them all by some non-negative integers: other integers, other numbers."""
    seeds = np.random.SeedSequence(entropy).generate_state(3, np.uint64)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]) % 2**32)  # noqa: NPY002
    # torch.manual_seed writes down a stack for every device that has not been used yet: half a millisecond.
    torch.default_generator.manual_seed(int(seeds[2]))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(int(seeds[2]))
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(int(seeds[2]))
