"""What it costs that samples draw as a function of the sample: the same loader with and without `seed_samples`."""

import statistics
import time
from itertools import islice

import pytest

from course_lib.resume import ResumableDataLoader
from tests.bench.bench_loader import BATCH_SIZE, Heavy, Light, Medium

SERIES, ROUNDS = 5, 40
BATCHES = {Light: 100, Medium: 50, Heavy: 3}


def cpu_seconds_of_a_batch(loader, batches):
    iterator = iter(loader)
    next(iterator)
    begin = time.process_time()
    count = sum(1 for _ in islice(iterator, batches))
    return (time.process_time() - begin) / count


@pytest.mark.parametrize("kind", [Light, Medium, Heavy])
def test_samples_that_draw_nothing_come_as_fast(kind):
    # Without workers, where all that is added stands in the way of the training step.
    seeded, plain = (ResumableDataLoader(kind(), batch_size=BATCH_SIZE, seed_samples=seeds) for seeds in (True, False))
    ratios = []
    while len(ratios) < SERIES and not any(ratio <= 1.05 for ratio in ratios):
        pairs = []
        for i in range(ROUNDS if kind is not Heavy else ROUNDS // 4):  # each is the first in turn
            loaders = [seeded, plain] if i % 2 else [plain, seeded]
            seconds = {loader.seed_samples: cpu_seconds_of_a_batch(loader, BATCHES[kind]) for loader in loaders}
            pairs.append(seconds[True] / seconds[False])
        ratios.append(statistics.median(pairs))
    print(f"\n{kind.__name__.lower()}: {min(ratios):.3f} of the time without")
    assert min(ratios) <= (1.05 if kind is not Light else 1.5)
