"""What chapter 04 draws: who weighs how much in a window's gradient, and what averages out; its widget."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from workbook.ch03_memory import SavedTensor
from workbook.ch04_exercises import EXERCISES, applied_gradients, logged_loss, rank_factor
from workbook.display import BLUE, GREY, ORANGE, add_legend, draw_curves, new_figure, numbered
from workbook.widgets import Explorer, int_slider

__all__ = ["EXERCISES", "applied_gradients", "logged_loss", "rank_factor"]  # the notebook reads them here


ARROWS = (
    "Five arrows from 0. The grey ones, the mean gradients of micro-batches of 24, 8 and 2 samples, point in different "
    "directions. The blue one, the big batch's gradient, is close to the mean of 24; the orange one, their equal mean, "
    "is pulled away from it by the mean of 2."
)
BOTH = (
    "Two panels, each with the 64 samples of a window. The recipe's bars have different heights: on the left for "
    "micro-batches of 40, 16, 4 and 4, on the right for rank 0's two of 24 and rank 1's two of 8, each 25% of the "
    "gradient. By hand there is one level line at 1/64 in both panels."
)


def shares(sizes: Sequence[int], weights: Sequence[float]) -> list[float]:
    """The weight of each micro-batch: the sum of those of its samples."""
    ends = list(itertools.accumulate(sizes))
    return [sum(weights[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def figure_of_both(panels: Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]]) -> Figure:
    """By title: the sizes of a window's micro-batches, and their samples' weights by the recipe and by hand."""
    figure, all_axes = new_figure(11.0, 3.2, columns=len(panels))
    for axes, (title, (sizes, by_recipe, by_hand)) in zip(all_axes, panels.items(), strict=True):
        _draw_weights(axes, sizes, by_recipe, "loss / k")
        edges = range(sum(sizes) + 1)
        axes.stairs(by_hand, edges, baseline=None, color=BLUE, linewidth=2.5, label="loss_sum * W / N")
        axes.set(title=title, xlabel="samples of the window", ylabel="weight of one sample")
        axes.set(xlim=(0, sum(sizes)), ylim=(0, max(by_recipe) * 1.25))
        add_legend(axes, "upper left")
    return figure


def _draw_weights(axes: Any, sizes: Sequence[int], weights: Sequence[float], name: str) -> None:
    starts = [end - size for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    heights = [weights[start] for start in starts]
    bars = axes.bar(starts, heights, sizes, align="edge", color=ORANGE, edgecolor="white", label=name)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares(sizes, weights)], padding=3, fontsize=8)


def distances_of_means(some: Tensor, others: Tensor, draws: Sequence[int]) -> list[float]:
    """How far the means of the first rows are from each other, relative to the second."""
    means = [(some[:n].mean(0), others[:n].mean(0)) for n in draws]
    return [((mean - other).norm() / other.norm()).item() for mean, other in means]


def figure_of_draws(distances: Mapping[str, Sequence[float]], draws: Sequence[int]) -> Figure:
    """How far the mean of accumulated gradients is from the mean of big batches', against how many were averaged."""
    figure, axes = new_figure(8.0, 3.4)
    curves = {name: (draws, values) for name, values in distances.items()}
    title = "Dropout's distance averages out, BatchNorm's does not"
    y = "distance from the big batch"
    draw_curves(axes, curves, title=title, x="draws averaged", y=y, legend="lower left")
    axes.set(xscale="log", yscale="log", xticks=draws, yticks=[0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    return figure


def figure_of_training(curves: dict[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Accuracy of named runs against optimizer steps, and against epochs."""
    figure, (left, right) = new_figure(11.0, 3.2, columns=2)
    unit = "accuracy on the test digits"
    draw_curves(left, curves, title="After as many steps, larger batches are ahead …", x="optimizer steps", y=unit)
    by_epoch = {name: numbered(accuracies) for name, (_, accuracies) in curves.items()}
    draw_curves(right, by_epoch, title="… after as many samples, they catch up late", x="epochs", y=unit)
    left.set(xscale="log", xticks=[12, 24, 48, 90, 180, 360, 540])
    left.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    left.xaxis.set_minor_locator(NullLocator())
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


def peak_saved_bytes(run: Callable[[], Any], model: nn.Module) -> int:
    """The largest sum of bytes that autograd holds for the backward pass at one time, the parameters left out."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    alive: WeakSet[SavedTensor] = WeakSet()
    peak = 0

    def pack(tensor: Tensor) -> SavedTensor:
        nonlocal peak
        saved = SavedTensor(tensor)
        alive.add(saved)
        storages = {(each.tensor.data_ptr(), each.tensor.nbytes) for each in alive}  # two operations may save one
        peak = max(peak, sum(nbytes for pointer, nbytes in storages if pointer not in parameters))
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        run()
    return peak
