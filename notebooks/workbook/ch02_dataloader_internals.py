"""What chapter 02 shows: a loader's epoch as a chart, recorded and simulated, and a sweep over numbers of workers.

What it gives to workers is in `ch02_workers`; its exercises are in `ch02_exercises`, `ch02_prefetch_exercise` and
`ch02_stream_exercises`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.utils.data import DataLoader

from course_lib.datasets import Integers
from course_lib.pipeline import BatchTrace, predict_throughput, simulate_pipeline
from workbook.ch02_exercises import bucket_batches
from workbook.ch02_prefetch_exercise import prefetched
from workbook.ch02_stream_exercises import share
from workbook.ch02_workers import (
    Busy,
    Draws,
    InArray,
    InList,
    Killed,
    ReaderIds,
    Resizable,
    SizedByIndex,
    Sleepy,
    answer_tasks,
    begin_together,
    blank_image,
    can_fork,
    can_keep_on_one_core,
    growth_of_workers,
    keep_on_one_core,
    private_bytes,
    reseed,
    start_worker,
)
from workbook.display import BLUE, GREY, ORANGE, VERMILION, add_legend, add_legend_below, draw_curves, new_figure
from workbook.widgets import Explorer, int_slider

__all__ = [
    "Draws",
    "InArray",
    "InList",
    "Killed",
    "ReaderIds",
    "Resizable",
    "SizedByIndex",
    "answer_tasks",
    "begin_together",
    "blank_image",
    "bucket_batches",
    "can_fork",
    "can_keep_on_one_core",
    "growth_of_workers",
    "keep_on_one_core",
    "prefetched",
    "private_bytes",
    "reseed",
    "share",
    "start_worker",
]

SENTENCES = {
    "epochs": (
        "Six batches of torch's loader, time from left to right. Without workers fetching and computing take turns. "
        "One worker fetches while the step computes, and the step still waits for each batch. Two workers fetch two "
        "batches at a time, and after the first batch the step hardly waits."
    ),
    "widget": (
        "Twenty batches, two workers, time from left to right. After the first batch the step computes without a "
        "pause until it needs batch 14, whose fetch takes 300 ms. It then waits. Meanwhile the other worker fetches "
        "the two batches that it may fetch ahead, and stops."
    ),
    "sizes": (
        "Image size against batch, over three epochs of two batches. The attribute's images stay at 8 pixels. The "
        "size in the task is 8, 16 and 32 pixels, as set."
    ),
    "sweep": (
        "Samples per second against the number of workers, relative to no workers, on a logarithmic scale; recorded "
        "on 2 cores. In memory: any worker makes it more than ten times slower. 2 ms of CPU time: little is gained, "
        "as returning a batch costs what the worker saves. 20 ms of CPU time: a gain up to the number of cores, not "
        "beyond. 20 ms of waiting: each further worker helps, and eight make it more than six times as fast."
    ),
}
"""What the figures show, for those who cannot see them."""


class Bar(NamedTuple):
    """A stretch of time of one process, in seconds since the first fetch."""

    row: str
    """"main", or "worker 0", "worker 1", …"""
    kind: str
    """"fetch", "wait" or "compute"."""
    batch: int
    start: float
    end: float


def bars(traces: Sequence[BatchTrace]) -> list[Bar]:
    """What each process does when, from a trace.

    The main process computes between a delivery and the next wait, so the last step's end is not known and left out.
    """
    begin = min(trace.fetch_start_s for trace in traces)
    found = []
    for trace in traces:
        row = "main" if trace.worker is None else f"worker {trace.worker}"
        found.append(Bar(row, "fetch", trace.batch, trace.fetch_start_s - begin, trace.fetch_end_s - begin))
        if trace.worker is not None:
            wait_start = max(0.0, trace.wait_start_s - begin)
            found.append(Bar("main", "wait", trace.batch, wait_start, trace.delivered_s - begin))
    for trace, following in itertools.pairwise(traces):
        found.append(Bar("main", "compute", trace.batch, trace.delivered_s - begin, following.wait_start_s - begin))
    return found


def fetches_at_once(traces: Sequence[BatchTrace]) -> int:
    """The most batches that were being fetched at one time."""
    return max(sum(a.fetch_start_s <= b.fetch_start_s < a.fetch_end_s for a in traces) for b in traces)


def fetches_behind_a_step(traces: Sequence[BatchTrace]) -> int:
    """How many batches were fetched, at least in part, while the main process computed."""
    found = bars(traces)
    steps = [bar for bar in found if bar.kind == "compute"]
    fetches = [bar for bar in found if bar.kind == "fetch"]
    return sum(any(step.start < fetch.end and fetch.start < step.end for step in steps) for fetch in fetches)


LOOKS = {"fetch": (ORANGE, ""), "wait": ("white", "////"), "compute": (BLUE, "")}


def draw_epoch(axes: Axes, traces: Sequence[BatchTrace], *, title: str) -> None:
    """Draw who does what when: a row for each process, a bar for each batch, with its number."""
    found = [bar for bar in bars(traces) if bar.end > bar.start]
    rows = sorted({bar.row for bar in found}, key=lambda row: (row != "main", row))
    for bar in found:
        colour, hatch = LOOKS[bar.kind]
        left, width = 1000 * bar.start, 1000 * (bar.end - bar.start)
        edge = GREY if bar.kind == "wait" else "white"
        axes.barh(rows.index(bar.row), width, left=left, height=0.8, color=colour, hatch=hatch, edgecolor=edge)
        if bar.kind != "wait":
            middle, white = left + width / 2, "white" if bar.kind == "compute" else "black"
            axes.text(middle, rows.index(bar.row), str(bar.batch), ha="center", va="center", fontsize=7, color=white)
    axes.set(title=title, xlabel="milliseconds", ylabel="process", ylim=(-0.6, len(rows) - 0.4))
    axes.set_yticks(range(len(rows)), rows)


def label_looks(figure: Figure) -> None:
    """One legend for all charts of a figure, under them."""
    patches = []
    for kind, (colour, hatch) in LOOKS.items():
        patches.append(Patch(facecolor=colour, hatch=hatch, edgecolor=GREY, label=kind))
    add_legend_below(figure, patches)


def figure_of_epochs(panels: dict[str, Sequence[BatchTrace]], title: str = "") -> Figure:
    """One chart for each panel, side by side, over one time axis."""
    figure, axes = new_figure(11.0, 2.8, columns=len(panels))
    end = 1000 * max(bar.end for traces in panels.values() for bar in bars(traces))
    for ax, (panel, traces) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        draw_epoch(ax, traces, title=panel)
        ax.set_xlim(0, end * 1.02)
    if title:
        figure.suptitle(title, fontsize=12)
    label_looks(figure)
    return figure


def recorded_epochs() -> dict[str, list[BatchTrace]]:
    """What `trace` said of torch's loader without workers, with one and with two: 60 ms to load, 40 ms to compute.

    Recorded on 2 virtual cores, torch 2.13.0, Linux, 22 November 2026; so the figure is the same on every machine.
    Milliseconds: fetched from, to; waited for from, to.
    """
    times: dict[str, list[tuple[Any, ...]]] = {
        "no worker": [
            (None, 0, 60, 0, 60), (None, 101, 161, 101, 161), (None, 201, 261, 201, 261), (None, 302, 362, 302, 362),
            (None, 402, 462, 402, 462), (None, 503, 563, 503, 563),
        ],
        "1 worker": [
            (0, 61, 125, 12, 140), (0, 127, 187, 181, 192), (0, 187, 250, 232, 251), (0, 250, 310, 291, 312),
            (0, 311, 371, 352, 372), (0, 371, 431, 413, 433),
        ],
        "2 workers": [
            (0, 65, 132, 48, 147), (1, 84, 144, 188, 189), (0, 133, 193, 229, 230), (1, 145, 205, 270, 271),
            (0, 193, 254, 311, 312), (1, 205, 265, 352, 353),
        ],
    }  # fmt: skip
    return {
        title: [BatchTrace(i, worker, *(ms / 1000 for ms in row)) for i, (worker, *row) in enumerate(rows)]
        for title, rows in times.items()
    }


BATCHES, SLOW_BATCH = 20, 14
"""Of the widget's epoch: how many batches it has, and the number of the one that takes longer than the others."""


def simulate_epoch(load: int, compute: int, workers: int, prefetch: int, slow: int) -> tuple[Figure, str]:
    """An epoch with one slow batch as a chart, and in numbers. Times are in milliseconds."""
    loads = [load / 1000] * BATCHES
    loads[SLOW_BATCH] = slow / 1000
    traces = simulate_pipeline(loads, compute / 1000, workers, prefetch, batches=BATCHES)
    pace = predict_throughput(load / 1000, compute / 1000, workers)
    waited = 1000 * sum(trace.waited_s for trace in traces)
    waited_for_slow = 1000 * traces[SLOW_BATCH].waited_s
    figure, axes = new_figure(11.0, 1.9 + 0.35 * workers)
    draw_epoch(axes, traces, title=f"{1000 * traces[-1].delivered_s:.0f} ms until the last of {BATCHES} batches comes")
    label_looks(figure)
    told = f"last batch after {1000 * traces[-1].delivered_s:.0f} ms, {waited:.0f} ms of it waiting"
    rule = f"the rule, without the slow batch: {pace:.1f} batches per second"
    return figure, f"{told} ({waited_for_slow:.0f} ms for the slow batch {SLOW_BATCH}); {rule}"


def pipeline_explorer() -> Explorer:
    """Milliseconds to load and to compute, workers, prefetch, one slow batch → the epoch as a chart."""
    controls = {
        "load": int_slider(60, 100, "ms to load a batch"),
        "compute": int_slider(40, 100, "ms to compute"),
        "workers": int_slider(2, 6, "workers", lowest=0),
        "prefetch": int_slider(2, 6, "prefetch_factor"),
        "slow": int_slider(300, 500, f"ms to load batch {SLOW_BATCH}"),
    }
    return Explorer(controls, simulate_epoch, title="load and compute time, workers, prefetch → the epoch as a chart")


def figure_of_sizes(curves: dict[str, list[int]], batches_per_epoch: int, title: str) -> Figure:
    """The size of the images in each batch; epochs are told apart by lines."""
    figure, axes = new_figure(9.0, 3.2)
    looks = zip((GREY, VERMILION, BLUE), ("-", "--", ":"), ("_", "s", "o"), (18, 8, 6), strict=True)
    for (name, sizes), (colour, line, marker, size) in zip(curves.items(), looks, strict=True):
        axes.plot(sizes, color=colour, linestyle=line, marker=marker, markersize=size, markeredgewidth=2, label=name)
        axes.lines[-1].set_drawstyle("steps-mid")
    batches = len(next(iter(curves.values())))
    for first in range(batches_per_epoch, batches, batches_per_epoch):
        axes.axvline(first - 0.5, color=GREY, linewidth=1)
    axes.set(title=title, xlabel="batch (a line where a new epoch begins)", ylabel="height of the images\nin pixels")
    axes.set(xticks=range(batches), yticks=[8, 16, 32], ylim=(0, 36))
    add_legend(axes, "beside")
    return figure


def seconds_of_an_epoch(loader: Any, cpu: bool = False) -> float:
    """By the clock; or of this process's CPU time, for a loader without workers."""
    clock = time.process_time if cpu else time.perf_counter
    start = clock()
    for _ in loader:
        pass
    return clock() - start


KINDS: dict[str, Any] = {
    "light: in memory": Integers(400),
    "medium: 2 ms of CPU time": Busy([0.002] * 96),
    "heavy: 20 ms of CPU time": Busy([0.02] * 24),
    "slow: 20 ms of waiting": Sleepy([0.02] * 24),
}


def sweep(workers: Sequence[int], kinds: dict[str, Any] = KINDS, epochs: int = 3) -> dict[str, list[float]]:
    """Samples per second by kind of sample, for each number of workers; the best of ``epochs``, without the start.

    One sample a batch, and no training step. Means something on a machine that does nothing else.
    """
    rates: dict[str, list[float]] = {}
    for kind, dataset in kinds.items():
        rates[kind] = []
        for number in workers:
            loader = DataLoader(dataset, num_workers=number, persistent_workers=number > 0)
            seconds = [seconds_of_an_epoch(loader) for _ in range(epochs + (number > 0))]
            rates[kind].append(len(dataset) / min(seconds))
    return rates


class Recorded(NamedTuple):
    """A sweep that was run before, for a figure that is the same on every machine."""

    told: str
    workers: tuple[int, ...]
    rates: dict[str, list[float]]
    """Samples per second."""
    cores: int


RECORDED = Recorded(
    "recorded on 2 virtual cores, best of 3 epochs: torch 2.13.0, Linux, 2026-11-21",
    (0, 1, 2, 4, 8),
    {
        "light: in memory": [48994.8, 786.5, 1128.8, 930.0, 688.4],
        "medium: 2 ms of CPU time": [408.0, 218.3, 407.9, 467.5, 524.4],
        "heavy: 20 ms of CPU time": [44.7, 42.5, 77.4, 78.1, 79.0],
        "slow: 20 ms of waiting": [43.8, 41.7, 89.5, 168.2, 313.3],
    },
    cores=2,
)


def figure_of_sweep(workers: Sequence[int], rates: dict[str, list[float]], cores: int) -> Figure:
    """Speed against the number of workers, each kind of sample relative to its own speed without workers."""
    figure, axes = new_figure(9.0, 3.6)
    curves = {kind: (workers, [rate / by[0] for rate in by]) for kind, by in rates.items()}
    title = "How many workers help depends on the sample"
    draw_curves(axes, curves, title=title, x="workers", y="speed relative to\nno workers", legend="beside")
    axes.axvline(cores, color=GREY, linewidth=1)
    axes.text(cores, 1, " cores", transform=axes.get_xaxis_transform(), color="#555555", va="top", fontsize=9)
    axes.set(yscale="log", xticks=workers)
    axes.set_yticks([1 / 64, 1 / 16, 1 / 4, 1, 4], ["1/64", "1/16", "1/4", "1", "4"])
    axes.minorticks_off()
    return figure


EXERCISES = (bucket_batches, prefetched, share)
