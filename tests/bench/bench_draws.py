"""What it costs that samples draw as a function of the sample: the same loader with and without `seed_samples`."""

import time
from itertools import islice

import pytest

from course_lib.resume import ResumableDataLoader
from tests.bench.bench_loader import BATCH_SIZE, Heavy, Light, Medium
from tests.bench.pairs import ratio_of

ROUNDS = {Light: 40, Medium: 40, Heavy: 10}
BATCHES = {Light: 100, Medium: 50, Heavy: 3}
BOUNDS = {Light: 10, Medium: 2.5, Heavy: 1.05}


def cpu_seconds_of_a_batch(loader, batches):
    iterator = iter(loader)
    next(iterator)
    begin = time.process_time()
    count = sum(1 for _ in islice(iterator, batches))
    return (time.process_time() - begin) / count


@pytest.mark.parametrize("kind", [Light, Medium, Heavy])
def test_what_seeding_costs_a_sample(kind):
    # Without workers, where all that is added stands in the way of the training step.
    seeded, plain = (ResumableDataLoader(kind(), batch_size=BATCH_SIZE, seed_samples=seeds) for seeds in (True, False))
    seconds = {True: [], False: []}
    for i in range(ROUNDS[kind]):  # each is the first in turn
        for loader in [seeded, plain] if i % 2 else [plain, seeded]:
            seconds[loader.seed_samples].append(cpu_seconds_of_a_batch(loader, BATCHES[kind]))
    ratio = ratio_of(seconds[True], seconds[False])
    more = sorted(a - b for a, b in zip(seconds[True], seconds[False], strict=True))[ROUNDS[kind] // 2] / BATCH_SIZE
    print(f"\n{kind.__name__.lower()}: {ratio} of the time without, {more * 1e6:.1f} µs a sample more")
    assert ratio.median <= BOUNDS[kind]
