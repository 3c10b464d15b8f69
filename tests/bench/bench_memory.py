"""What a prediction and a search cost, beside the real steps and beside Lightning's finder."""

import gc
import statistics
import time

import torch
import torch.nn.functional as F
from workbook import ch03_finder_comparison as finders
from workbook.ch03_memory import OPTIMIZERS, image_net

from course_lib.memory import predict_peak


def seconds(fn, times):
    fn()
    found = []
    for _ in range(times):
        gc.collect()
        begin = time.perf_counter()
        fn()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def test_a_prediction_takes_less_than_a_step():
    x, y = torch.ones(32, 3, 128, 128), torch.zeros(32, dtype=torch.long)
    model = image_net(32)
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))

    def step():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    real = seconds(step, times=5)
    predicted = seconds(lambda: predict_peak(lambda: image_net(32), lambda: (x, y), OPTIMIZERS["AdamW"]), times=5)
    print(f"\na step of 32 images {real:.2f} s, its prediction {predicted:.2f} s: {predicted / real:.2f} times")
    assert predicted < real


def test_a_search_takes_less_than_lightnings():
    peaks = finders.TruePeaks()
    limits = finders.spread_limits(peaks(100), peaks(4000), 5)
    ours, theirs = (
        seconds(lambda find=find: [find(finders.SimulatedDevice(limit)) for limit in limits], times=5)
        for find in (finders.ours, lambda device: finders.lightning(device, mode="binsearch"))
    )
    print(f"\nfive searches: {ours:.2f} s, by Lightning's bisection {theirs:.2f} s: {ours / theirs:.2f} times")
    assert ours < theirs


def test_fifty_devices():
    peaks = finders.TruePeaks()
    limits = finders.spread_limits(peaks(2), peaks(3000), 50)
    outcomes = finders.compare(limits, peaks=peaks)
    print(f"\n{finders.table(outcomes)}")
    ours = outcomes["find_batch_size"]
    assert all(o.share > 0.95 and o.answer_ran and o.errors == 0 and len(o.trials) <= 3 for o in ours)
