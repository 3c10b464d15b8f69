"""What chapter 04 draws: who weighs how much in a window's gradient, and what averages out; its widget."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter
from numpy.typing import NDArray
from torch import Tensor

from course_lib.datasets import data_path
from workbook.ch04_exercises import EXERCISES, applied_gradients, logged_loss, rank_factor
from workbook.display import (
    BLUE,
    GREY,
    ORANGE,
    add_legend,
    add_legend_below,
    draw_curves,
    new_figure,
    print_wrapped,
    show_figure,
)
from workbook.prices.faults import FAULTS
from workbook.prices.jobs import JOBS
from workbook.prices.table import COLOURS, Row, losses, percent, read_csv, verdict
from workbook.widgets import Explorer, int_slider

__all__ = ["EXERCISES", "applied_gradients", "logged_loss", "rank_factor"]  # the notebook reads them here


PANELS = {"gpt": "The GPT", "cnn": "The convolutional net"}
ROWS = (
    "zero_grad_in_micro_batches",
    "zero_grad_forgotten",
    "not_divided",
    "clip_in_micro_batches",
    "loss_over_k",
    "mean_of_means",
    "padding_counted",
    "tail_dropped",
    "tail_leaked",
)
"""The faults of the price list that this chapter explains."""
BOTH = (
    "Two panels, each with the 64 samples of a window. The recipe's bars have different heights: on the left for "
    "micro-batches of 40, 16, 4 and 4, on the right for rank 0's two of 24 and rank 1's two of 8, each 25% of the "
    "gradient. The big batch is one level line at 1 in both panels."
)


DRAWS = (
    "Distance from the big batch against the number of draws averaged, on logarithmic axes. Dropout's falls along a "
    "straight line, as does that of the big batch under other masks. BatchNorm's falls at first, and then stays."
)
PRICES = (
    "Two panels, one for each job, with a line for each fault: its price as a point, its interval as a bar. zero_grad "
    "in each micro-batch and zero_grad forgotten stand far to the right. The rest lie in the grey band of one percent, "
    "or near it."
)


def prices() -> list[Row]:
    """This chapter's rows of the price list, the dearest first."""
    return [row for row in losses(read_csv(data_path("prices.csv"))) if row.fault in ROWS]


def show_prices() -> None:
    """Draw this chapter's rows, and print them."""
    rows = prices()
    show_figure(figure_of_chapter_prices(rows), PRICES)
    for row in rows:
        print_wrapped(price_line(row))


def price_of(job: str, fault: str) -> float:
    """In percent of the loss without the fault."""
    [found] = [row for row in prices() if (row.job, row.fault) == (job, fault)]
    return round(percent(found, found.difference), 1) + 0.0  # no -0.0


def price_line(row: Row) -> str:
    """A price in words: by how many percent of the loss, and its interval."""
    if row.diverged == row.pairs:
        return f"{row.job}: {FAULTS[row.fault].title}: {verdict(row)}"
    price, low, high = (percent(row, value) for value in (row.difference, row.low, row.high))
    return f"{row.job}: {FAULTS[row.fault].title}: {price:+.1f} % ({low:+.1f} … {high:+.1f}), {verdict(row)}"


def figure_of_chapter_prices(rows: Sequence[Row]) -> Figure:
    """Each price with its interval; a column for each job, and one line for each fault."""
    names = [name for name in ROWS if any(row.fault == name for row in rows)]
    figure, columns = new_figure(10.0, 1.3 + 0.32 * len(names), columns=2)
    for job, axes in zip(JOBS, columns, strict=True):
        axes.axvspan(-1, 1, color="#EEEEEE")
        for row in rows:
            if row.job != job or row.diverged == row.pairs:
                continue
            y, colour = -names.index(row.fault), COLOURS[verdict(row)]
            axes.plot([percent(row, row.low), percent(row, row.high)], [y, y], color=colour, linewidth=3)
            axes.plot(percent(row, row.difference), y, "o", color=colour, markersize=6)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set(title=PANELS[job], xlabel="validation loss, % above the right run's", ylim=(0.6 - len(names), 0.6))
        titles = [FAULTS[name].title for name in names] if axes is columns[0] else []
        axes.set_yticks([-at for at in range(len(names))] if titles else [], titles)
        axes.tick_params(axis="y", length=0, labelsize=9)
    dear = sum(percent(row, row.low) > 1 for row in rows)
    figure.suptitle(f"Of these {len(rows)} prices, {dear} are above 1 % of the loss", fontsize=11)
    handles = [
        Line2D([], [], color=colour, marker="o", label=name)
        for name, colour in COLOURS.items()
        if any(verdict(row) == name for row in rows)
    ]
    add_legend_below(figure, handles)
    return figure


def shares(sizes: Sequence[int], weights: Sequence[float]) -> list[float]:
    """The weight of each micro-batch in the window: that of its samples, over all."""
    ends = list(itertools.accumulate(sizes))
    return [sum(weights[end - size : end]) / sum(weights) for size, end in zip(sizes, ends, strict=True)]


def figure_of_weights(on_one: Sequence[float], on_two: Sequence[float]) -> Figure:
    """Samples' weights in two windows, where the big batch's is 1: of one process, and of two ranks."""
    figure, all_axes = new_figure(11.0, 3.2, columns=2)
    panels = {
        "one process: {:.0f} times from first to last": ([40, 16, 4, 4], on_one),
        "two ranks: {:.0f} times from rank 0 to rank 1": ([24, 24, 8, 8], on_two),
    }
    for axes, (title, (sizes, weights)) in zip(all_axes, panels.items(), strict=True):
        starts = [end - size for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        heights = [weights[start] for start in starts]
        bars = axes.bar(starts, heights, sizes, align="edge", color=ORANGE, edgecolor="white", label="loss / k")
        axes.bar_label(bars, [f"{share:.0%}" for share in shares(sizes, weights)], padding=3, fontsize=8)
        axes.plot([0, sum(sizes)], [1, 1], color=BLUE, linewidth=2.5, label="one big batch")
        axes.set(title=title.format(weights[-1] / weights[0]), xlabel="samples of the window")
        axes.set(ylabel="weight of one sample", xlim=(0, sum(sizes)), ylim=(0, max(weights) * 1.25))
        add_legend(axes, "upper left")
    return figure


def distances_of_means(some: Tensor, others: Tensor, draws: Sequence[int]) -> list[float]:
    """How far the means of the first rows are from each other, relative to the second."""
    means = [(some[:n].mean(0), others[:n].mean(0)) for n in draws]
    return [((mean - other).norm() / other.norm()).item() for mean, other in means]


def show_draws(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Print and draw how far the means of 1, 2, 4 … 32 rows of each pair are from each other."""
    draws = [1, 2, 4, 8, 16, 32]
    distances = {name: distances_of_means(some, others, draws) for name, (some, others) in pairs.items()}
    print("draws averaged:        ", draws)
    for name, values in distances.items():
        print(f"{name:23}", [round(value, 2) for value in values])
    show_figure(figure_of_draws(distances, draws), DRAWS)


def figure_of_draws(distances: Mapping[str, Sequence[float]], draws: Sequence[int]) -> Figure:
    """How far the mean of accumulated gradients is from the mean of big batches', against how many were averaged."""
    figure, axes = new_figure(8.0, 3.4)
    curves = {name: (draws, values) for name, values in distances.items()}
    title = "Dropout is noise and averages out; BatchNorm is a bias and stays"
    y = "distance from the big batch"
    draw_curves(axes, curves, title=title, x="draws averaged", y=y, legend="lower left")
    axes.set(xscale="log", yscale="log", xticks=draws, yticks=[0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    return figure


def arrows(sizes: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Mean gradients of three micro-batches in a model of two parameters; their equal mean; the big batch's.

    A straight line is fitted to points on a curve, the micro-batches lie at the left, in the middle and at the right,
    so that each pulls in a direction of its own.
    """
    means = []
    for position, size in enumerate(sizes):
        x = np.linspace(position, position + 1, size + 2)[1:-1]
        error = 0.3 * x - (np.sin(1.4 * x) + 0.2)  # the line 0.3·x against the curve
        means.append([np.mean(2 * error), np.mean(2 * error * (x - 1.5))])
    each = np.array(means)
    return each, each.mean(0), np.average(each, axis=0, weights=sizes)


def arrows_error(sizes: Sequence[int]) -> float:
    """How far the equal mean is from the big batch's gradient, relative to it."""
    _, equal, big = arrows(sizes)
    return float(np.linalg.norm(equal - big) / np.linalg.norm(big))


def figure_of_arrows(sizes: Sequence[int]) -> Figure:
    """The mean gradient of each micro-batch, their equal mean and the big batch's, as arrows from 0."""
    each, equal, big = arrows(sizes)
    figure, axes = new_figure(7.6, 4.2)
    named = [(f"mean of {size}", gradient, GREY, 1.5) for size, gradient in zip(sizes, each, strict=True)]
    named += [("loss / k", equal, ORANGE, 3.0), ("one big batch", big, BLUE, 3.0)]
    for (name, (x, y), colour, width), marker in zip(named, "osDX^", strict=True):
        head = {"arrowstyle": "-|>", "mutation_scale": 8 * width, "color": colour, "lw": width, "shrinkA": 0}
        axes.annotate("", (x, y), (0, 0), arrowprops=head)
        axes.plot(x, y, marker, color=colour, markersize=8, label=name)
    axes.axhline(0, color=GREY, linewidth=0.5)
    axes.axvline(0, color=GREY, linewidth=0.5)
    title = f"Equal weights miss the big batch's gradient by {arrows_error(sizes):.0%}"
    axes.set(title=title, xlabel="gradient of the offset", ylabel="gradient of the slope")
    axes.margins(0.15)
    add_legend(axes, "beside")
    return figure


def arrows_explorer() -> Explorer:
    """Sizes of three micro-batches → each one's mean gradient, their equal mean, and the big batch's."""

    def render(first: int, second: int, third: int) -> tuple[Figure, str]:
        sizes = (first, second, third)
        return figure_of_arrows(sizes), f"sizes {sizes}: relative error of loss / k {arrows_error(sizes):.3f}"

    controls = {
        "first": int_slider(24, 32, "samples of the first"),
        "second": int_slider(8, 32, "samples of the second"),
        "third": int_slider(2, 32, "samples of the third"),
    }
    return Explorer(controls, render, title="sizes of three micro-batches → their gradients as arrows")
