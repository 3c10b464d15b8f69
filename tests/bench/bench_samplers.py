"""ShuffledBatchSampler against torch's, and at sizes that torch cannot hold; the state of a ShardedBatchSampler."""

import statistics
import time
import tracemalloc

import pytest
from torch.utils.data import BatchSampler, RandomSampler

from course_lib.samplers import ShardedBatchSampler, ShuffledBatchSampler
from tests.bench.pairs import ratio_of

MILLION, TRILLION = 10**6, 10**12


def indices_per_second(sampler) -> float:
    begin = time.perf_counter()
    count = sum(len(batch) for batch in sampler)
    assert count == MILLION
    return count / (time.perf_counter() - begin)


@pytest.mark.parametrize("batch_size", [64, 256])
def test_a_million_indices_come_three_times_as_fast_as_torchs(batch_size):
    ours, theirs = [], []
    for _ in range(9):
        ours.append(indices_per_second(ShuffledBatchSampler(MILLION, batch_size)))
        theirs.append(indices_per_second(BatchSampler(RandomSampler(range(MILLION)), batch_size, drop_last=False)))
    ratio = ratio_of(ours, theirs)
    rate, torchs_rate = (statistics.median(rates) / 1e6 for rates in (ours, theirs))
    print(f"\nbatches of {batch_size}: {rate:.0f} M indices/s, torch {torchs_rate:.1f} M, ratio {ratio}")
    assert ratio.median >= 3


def seconds_to_first_batch(state=None) -> float:
    begin = time.perf_counter()
    sampler = ShuffledBatchSampler(TRILLION, 64)
    if state is not None:
        sampler.load_state_dict(state)
    next(iter(sampler))
    return time.perf_counter() - begin


def test_a_trillion_indices_start_and_resume_at_once_in_little_memory():
    sampler = ShuffledBatchSampler(TRILLION, 64)
    at_end = sampler.state_dict(batches=len(sampler) - 1)
    start = statistics.median(seconds_to_first_batch() for _ in range(9))
    resume = statistics.median(seconds_to_first_batch(at_end) for _ in range(9))
    tracemalloc.start()
    iterator = iter(ShuffledBatchSampler(TRILLION, 64))
    for _ in range(10_000):
        next(iterator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start_ms, resume_ms, peak_mb = start * 1e3, resume * 1e3, peak / 1e6
    print(f"\n10**12: starts in {start_ms:.1f} ms, resumes at the end in {resume_ms:.1f} ms, peak {peak_mb:.1f} MB")
    assert start < 0.010 and resume < 0.010 and peak < 10e6


def seconds_for_a_state(batches: int) -> float:
    """With a state after each of the first thousand batches of an epoch."""
    sampler = ShardedBatchSampler([[number] for number in range(batches)])
    iterator = iter(sampler)
    seconds = []
    for _ in range(1_000):
        next(iterator)
        begin = time.perf_counter()
        sampler.state_dict()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def test_a_state_costs_as_much_in_a_long_epoch_as_in_a_short_one():
    short, long = seconds_for_a_state(2_000), seconds_for_a_state(200_000)
    print(f"\na state: in 2,000 batches {short * 1e6:.0f} µs, in 200,000 batches {long * 1e6:.0f} µs")
    assert long < 3 * short
