"""The global generators: seeded alike for all ranks while the kit plays, put back for the caller afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_globals(salt: int, epoch: int) -> None:
    """Put the global generators where they would be on every rank of a seeded run; ``salt``: in another run."""
    seed = 100_003 * salt + epoch + 1
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])
