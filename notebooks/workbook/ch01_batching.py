"""What chapter 01 shows: what a batch size buys and what it costs. The exercises are in ch01_exercises."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import ipywidgets
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from workbook.ch01_exercises import EXERCISES as EXERCISES
from workbook.ch01_exercises import by_hand as by_hand
from workbook.ch01_exercises import mean_accuracy as mean_accuracy
from workbook.ch01_exercises import padded as padded
from workbook.display import BLUE, GREY, draw_curves, new_figure
from workbook.widgets import Explorer, int_slider

# What this thread computes, so that a busy machine gives the same answer; Windows counts it in steps of 16 ms.
clock = time.perf_counter if sys.platform == "win32" else time.thread_time

RECORDED_SECONDS = {
    size: microseconds * 1e-6
    for size, microseconds in {
        1: 139, 2: 141, 4: 146, 8: 147, 16: 151, 32: 161, 64: 172, 128: 198, 256: 278, 512: 431, 1024: 728,
        1437: 950, 2048: 1261, 4096: 2376,
    }.items()
}  # fmt: skip
"""One update of the chapter's net by batch size: fastest of 30, Intel Xeon, one thread, torch 2.13.0, 2026-11-21."""

SENTENCES = {
    "symptom": (
        "Accuracy after three epochs, by batch size, at a learning rate of 0.5. With batches of 1 the net guesses; "
        "with batches of 16 nearly all test digits are right; and with ever larger batches the net falls behind."
    ),
    "two rates": (
        "The same figure with a second curve, at a learning rate of 0.03. It falls from left to right: there one "
        "sample at a time is best, and from batches of 256 on the net guesses. The first curve rises from 1 to 16, "
        "then falls."
    ),
    "throughput": (
        "Samples per second, as recorded. They rise with the batch: nearly in proportion at first, to half of the "
        "highest at 256, and by little behind 1,024."
    ),
    "winners": (
        "Two charts over the batch size, a dot for each of eight runs. On the left, the samples needed rise from "
        "about a thousand with small batches to more than forty thousand with all at once. On the right, the time "
        "falls from 1 to 128 samples, and rises again to all at once."
    ),
    "trade": (
        "The widget as it opens. Over the batch size, the samples needed rise from about 20 on, the time for each "
        "sample falls ever more slowly, and their product has its lowest point between the two, at 71 (grey line)."
    ),
    "fitted": (
        "The symptom's figure with a third curve, for a rate that follows the size. It starts at the top with one "
        "sample at a time, and follows the symptom's curve from 16 on."
    ),
}
"""What the figures show, for those who cannot see them."""


def seconds_of_update(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The fastest of 15 updates: CPU seconds of this thread; on a GPU, the seconds until it is done."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    on_gpu = x.device.type == "cuda"
    now = time.perf_counter if on_gpu else clock
    times = []
    for _ in range(15):
        start = now()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(now() - start)
    return min(times)


def figure_of_throughput(measured: dict[str, dict[int, float]]) -> Figure:
    """Samples per second over batch size, from the seconds of one update, by the names of who measured them."""
    figure, axes = new_figure(8.6, 3.4)
    curves = {}
    for name, seconds in measured.items():
        curves[name] = (list(seconds), [size / taken for size, taken in seconds.items()])
    first = next(iter(measured.values()))
    curves["if each update took as long"] = (list(first), [size / first[1] for size in first])
    title = "Throughput rises with the batch size, up to a plateau"
    draw_curves(axes, curves, title=title, x="batch size (samples)", y="samples per second", legend="beside")
    axes.set(xscale="log", yscale="log")
    return figure


def throughput_explorer(measured: dict[str, dict[int, float]]) -> Explorer:
    """What the reader's machine measured, beside what was recorded."""

    def render(shown: str) -> tuple[Figure, str]:
        seconds, lines = measured[shown], []
        for size in (1, 64, 4096):
            each = seconds[size]
            lines.append(f"B = {size:,}: {each * 1e6:,.0f} µs for an update, {size / each:,.0f} samples per second")
        return figure_of_throughput({shown: seconds, "recorded": RECORDED_SECONDS}), "\n".join(lines)

    controls = {"shown": ipywidgets.Dropdown(options=list(measured), description="measured on")}
    return Explorer(controls, render, title="the times of your own machine, beside the recorded ones")


def figure_of_sizes(accuracies: dict[str, dict[int, float]], chance: float, title: str) -> Figure:
    """Accuracy over batch size after the same number of samples, one curve for each way to train."""
    figure, axes = new_figure(8.0, 3.4)
    curves = {name: (list(by_size), list(by_size.values())) for name, by_size in accuracies.items()}
    x, y = "batch size (samples)", "accuracy (share of the test digits)"
    draw_curves(axes, curves, title=title, x=x, y=y, legend="beside")
    axes.axhline(chance, color=GREY, linestyle="--")
    largest = max(size for by_size in accuracies.values() for size in by_size)
    axes.annotate("guessing", (largest, chance), (0, -12), textcoords="offset points", ha="right", color="#555555")
    sizes = list(next(iter(accuracies.values())))
    axes.set_ylim(0, 1.02)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    return figure


def figure_of_winners(needed: dict[int, list[int]], seconds_of_update: dict[int, float]) -> Figure:
    """The samples that runs needed, and the time of their updates, by batch size: dots for runs, a line for means."""
    figure, (left, right) = new_figure(9.6, 3.4, columns=2)
    for size, runs in needed.items():
        milliseconds = [1000 * samples / size * seconds_of_update[size] for samples in runs]
        left.plot([size] * len(runs), runs, "o", color=BLUE, alpha=0.5)
        right.plot([size] * len(runs), milliseconds, "o", color=BLUE, alpha=0.5)
    means = {size: sum(runs) / len(runs) for size, runs in needed.items()}
    left.plot(list(means), list(means.values()), color=BLUE)
    times = [1000 * mean / size * seconds_of_update[size] for size, mean in means.items()]
    right.plot(list(means), times, color=BLUE)
    left.set(title="Counted in samples, small batches are first …", ylabel="samples until the target")
    right.set(title="… counted in time, B = 128 is first", ylabel="computing time of the updates (ms)")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="batch size (samples)")
        axes.set_xticks(list(needed), [f"{size:,}" for size in needed])
        axes.minorticks_off()
    return figure


class Trade(NamedTuple):
    """What it costs to reach a loss at one batch size, each in the smallest value that it can have."""

    samples: float
    """Samples that are needed: 1 where the batch is far smaller than the noise size."""
    time_per_sample: float
    """1 where the batch is far larger than the fixed cost."""
    time: float
    """In all: the product."""


def trade(batch_size: float, noise_size: float, fixed_cost: float) -> Trade:
    """What a batch size costs.

    Args:
        batch_size: Samples in a batch.
        noise_size: The batch size that needs twice the samples that the smallest batches need.
        fixed_cost: Of an update: as many samples as could be computed in that time.
    """
    samples = 1 + batch_size / noise_size
    time_per_sample = 1 + fixed_cost / batch_size
    return Trade(samples, time_per_sample, samples * time_per_sample)


def best_size(noise_size: float, fixed_cost: float) -> float:
    """The batch size at which :func:`trade` has its smallest time."""
    return math.sqrt(noise_size * fixed_cost)


def figure_of_trade(noise_size: float, fixed_cost: float, largest: int) -> Figure:
    """The samples needed, the time for each, and their product, over batch size."""
    sizes = [10 ** (step / 20 * math.log10(largest)) for step in range(21)]
    trades = [trade(size, noise_size, fixed_cost) for size in sizes]
    figure, axes = new_figure(8.6, 3.8)
    curves = {
        "samples needed": (sizes, [at.samples for at in trades]),
        "time per sample": (sizes, [at.time_per_sample for at in trades]),
        "time in all (the product)": (sizes, [at.time for at in trades]),
    }
    best = best_size(noise_size, fixed_cost)
    where = f"batches of {best:.0f} finish first" if best < largest else "all at once finishes first"
    title = f"Noise size {noise_size:.0f}, fixed cost {fixed_cost:.0f}: {where}"
    unit = "multiple of the least possible"
    draw_curves(axes, curves, title=title, x="batch size (samples)", y=unit, legend="beside")
    axes.axvline(min(best, largest), color=GREY)
    axes.set(xscale="log", yscale="log")
    return figure


def trade_explorer(largest: int) -> Explorer:
    """Noise size and fixed cost of an update → the batch size with which training finishes first."""

    def render(noise_size: int, fixed_cost: int) -> tuple[Figure, str]:
        best = best_size(noise_size, fixed_cost)
        at_best = trade(best, noise_size, fixed_cost)
        lines = [f"best size: {best:.0f}, the square root of {noise_size} × {fixed_cost}"]
        for size in (1, largest):
            slower = trade(size, noise_size, fixed_cost).time / at_best.time
            lines.append(f"batches of {size:,} take {slower:.1f} times as long")
        return figure_of_trade(noise_size, fixed_cost, largest), "\n".join(lines)

    controls = {
        "noise_size": int_slider(20, 600, "noise size (samples)"),
        "fixed_cost": int_slider(250, 1000, "fixed cost of an update (samples)"),
    }
    return Explorer(controls, render, title="noise size, fixed cost → the best batch size")


class WhoLoads(Dataset[tuple[int, int]]):
    """Sample i is (i, the number of the worker that read it); -1 stands for the process that trains."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return index, -1 if info is None else info.id


def numbers_of(batches: Sequence[Tensor]) -> list[list[int]]:
    """The batches of integers as lists, to be read."""
    return [batch.tolist() for batch in batches]
