"""accumulate against the bare loop over the same micro-batches: its time, and the memory of its graphs."""

import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from workbook.ch04_gradient_accumulation import peak_saved_bytes

from course_lib.accumulation import accumulate

K, SIZE, SERIES, ROUNDS = 4, 256, 5, 30


def make_model() -> nn.Module:
    """Two million parameters: a micro-batch's forward and backward take some 20 ms on one thread."""
    torch.manual_seed(0)
    hidden = (nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU())
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), *hidden, nn.Linear(1024, 10))


def make_window() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(SIZE, 256, generator=generator), torch.randint(0, 10, (SIZE,), generator=generator))
        for _ in range(K)
    ]


def bare(model, window):
    for features, classes in window:
        (F.cross_entropy(model(features), classes) / K).backward()


def ours(model, window):
    accumulate(
        model,
        window,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
        lambda batch: len(batch[1]),
    )


def seconds(way, model, window) -> float:
    model.zero_grad()
    begin = time.perf_counter()
    way(model, window)
    return time.perf_counter() - begin


def test_a_window_takes_at_most_a_fiftieth_longer():
    model, window = make_model(), make_window()
    series = []
    while len(series) < SERIES and not any(ratio <= 1.02 for ratio, *_ in series):
        taken = {bare: [], ours: []}
        for i in range(ROUNDS):  # each is the first in turn, so that neither always finds the other's caches
            for way in (bare, ours) if i % 2 else (ours, bare):
                taken[way].append(seconds(way, model, window))
        ratio = statistics.median(mine / its for mine, its in zip(taken[ours], taken[bare], strict=True))
        series.append((ratio, *(statistics.median(taken[way]) * 1e3 for way in (bare, ours))))
    ratio, its, mine = min(series)  # what else the machine does disturbs one series more than another
    print(f"\na window of {K} × {SIZE} samples: bare loop {its:.1f} ms, accumulate {mine:.1f} ms, ratio {ratio:.3f}")
    assert its >= 20, "too small a window to tell"
    assert ratio <= 1.02


def all_at_once(model, window):
    (sum(F.cross_entropy(model(features), classes) for features, classes in window) / K).backward()


def test_no_more_is_saved_for_backward_than_by_the_bare_loop():
    def peak(way):
        model, window = make_model(), make_window()
        return peak_saved_bytes(lambda: way(model, window), model)

    mine, its, of_one_graph = peak(ours), peak(bare), peak(all_at_once)
    print(f"\nsaved for backward: bare loop {its:,} bytes, accumulate {mine:,}; one graph for all {of_one_graph:,}")
    assert mine == its < of_one_graph / (K - 1)
