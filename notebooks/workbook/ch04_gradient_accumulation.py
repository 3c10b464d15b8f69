"""What chapter 04 shows and asks: who weighs how much in a window's gradient; and the exercises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from course_lib.accumulation import windows
from workbook.ch03_memory import SavedTensor
from workbook.display import BLUE, GREY, ORANGE, VERMILION, add_legend, draw_curves, new_figure, numbered
from workbook.exercises import Exercise
from workbook.widgets import Explorer, int_slider


def sample_weights(sizes: Sequence[int], k: int) -> dict[str, list[float]]:
    """The weight of one sample of each micro-batch in a window's gradient: mean loss over k, and the big batch."""
    return {"loss / k": [1 / (k * size) for size in sizes], "one big batch": [1 / sum(sizes) for _ in sizes]}


def figure_of_weights(sizes: Sequence[int], k: int) -> Figure:
    """The samples of a window from left to right; the height is the weight of each in the gradient."""
    figure, axes = new_figure(9.0, 3.2)
    weights = sample_weights(sizes, k)
    starts = [0, *itertools.accumulate(sizes)][:-1]
    bars = axes.bar(starts, weights["loss / k"], sizes, align="edge", color=ORANGE, edgecolor="white", label="loss / k")
    shares = [f"{weight * size:.0%}" for weight, size in zip(weights["loss / k"], sizes, strict=True)]
    axes.bar_label(bars, shares, padding=3, fontsize=9)
    level = weights["one big batch"][0]
    axes.plot([0, sum(sizes)], [level, level], color=BLUE, linestyle="--", linewidth=2, label="one big batch")
    axes.set_title("A mean loss over k gives each micro-batch the same share, whatever it holds")
    samples = f"samples of the window, in micro-batches of {', '.join(str(size) for size in sizes)}"
    axes.set(xlabel=samples, ylabel="weight of one sample")
    axes.set(xlim=(0, sum(sizes)), ylim=(0, max(weights["loss / k"]) * 1.25))
    add_legend(axes, "upper left")
    return figure


def figure_of_training(curves: dict[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Accuracy of named runs against optimizer steps, and against epochs."""
    figure, (left, right) = new_figure(11.0, 3.2, columns=2)
    unit = "accuracy on the test digits"
    draw_curves(left, curves, title="Windows of 128 make fewer optimizer steps …", x="optimizer steps", y=unit)
    by_epoch = {name: numbered(accuracies) for name, (_, accuracies) in curves.items()}
    draw_curves(right, by_epoch, title="… from the same samples", x="epochs", y=unit)
    left.set_xscale("log")
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


def arrows_explorer() -> Explorer:
    """Sizes of three micro-batches → each one's mean gradient, their equal mean, and the big batch's."""

    def render(first: int, second: int, third: int) -> tuple[Figure, str]:
        sizes = (first, second, third)
        each, equal, big = arrows(sizes)
        error = float(np.linalg.norm(equal - big) / np.linalg.norm(big))
        figure, axes = new_figure(7.6, 4.2)
        named = [(f"mean of {size}", gradient, GREY, 1.2) for size, gradient in zip(sizes, each, strict=True)]
        named += [("loss / k", equal, VERMILION, 2.4), ("one big batch", big, BLUE, 2.4)]
        for (name, (x, y), colour, width), marker in zip(named, "osDX^", strict=True):
            axes.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-", "color": colour, "lw": width})
            axes.plot(x, y, marker, color=colour, markersize=9, label=name)
        title = f"Equal weights miss the big batch's gradient by {error:.0%}"
        axes.set(title=title, xlabel="gradient of the offset", ylabel="gradient of the slope")
        axes.margins(0.15)
        axes.axhline(0, color=GREY, linewidth=0.5)
        axes.axvline(0, color=GREY, linewidth=0.5)
        add_legend(axes, "beside")
        return figure, f"sizes {sizes}: relative error of loss / k {error:.3f}"

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


def _applied(micro_batches: list[list[float]], k: int) -> list[float]:
    return [_mean([*itertools.chain(*window)]) for window in windows(micro_batches, k)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _wrong_gradients(micro_batches: list[list[float]], k: int) -> dict[str, list[float]]:
    right = _applied(micro_batches, k)
    in_windows = list(windows(micro_batches, k))
    sums = [sum(sum(batch) for batch in window) for window in in_windows]
    samples = [sum(len(batch) for batch in window) for window in in_windows]
    means = [[_mean(batch) for batch in window] for window in in_windows]
    never_reset = [total / seen for total, seen in zip(sums, itertools.accumulate(samples), strict=True)]
    means_by_samples = [sum(window) / count for window, count in zip(means, samples, strict=True)]
    means_by_k = [sum(window) / k for window in means]
    full_windows = len(micro_batches) // k
    return {
        "{got} has an update too many: where the last window is full, nothing is left to step for.": (
            [*right, 0.0] if len(right) == full_windows else right
        ),
        "{got} goes on counting the samples of the windows before: reset both numbers.": never_reset,
        "{got} is a sum of means, divided by samples: add up the samples' gradients, not the means.": means_by_samples,
        "{got} lacks the short window: after the loop, nobody steps for what is left.": means_by_k[:full_windows],
        "{got} divides the short window by k as well, though it holds fewer micro-batches.": means_by_k,
        "{got} averages averages: a micro-batch of one weighs as much as one of three. Divide by the samples.": (
            [_mean(window) for window in means]
        ),
        "{got} only adds up: without a division the step grows with k.": [sum(window) for window in means],
        "{got} is a sum over samples, divided by micro-batches: the units of numerator and denominator differ.": (
            [total / k for total in sums]
        ),
    }


applied_gradients = Exercise(
    "applied_gradients",
    solution=_applied,
    cases=[
        dict(micro_batches=[[1.0], [3.0], [5.0], [7.0]], k=2),
        dict(micro_batches=[[1.0, 3.0], [5.0, 7.0], [9.0, 11.0], [13.0, 15.0]], k=2),
        dict(micro_batches=[[2.0], [4.0], [6.0], [8.0], [10.0]], k=4),
        dict(micro_batches=[[8.0, 8.0, 8.0], [4.0], [6.0, 6.0], [2.0, 2.0]], k=2),
        dict(micro_batches=[[8.0, 8.0, 8.0], [4.0], [6.0, 6.0, 6.0], [2.0], [3.0, 5.0]], k=2),
        dict(micro_batches=[[5.0, 7.0], [9.0]], k=8),
    ],
    misconceptions=_wrong_gradients,
)


def _wrong_factors(counts: list[int], rank: int) -> dict[str, float]:
    own, total, ranks = counts[rank], sum(counts), len(counts)
    return {
        "{got} is the rank's share of the samples. But its gradient is divided once more, by DDP.": own / total,
        "{got} is the factor of a summed loss. Here the loss is a mean: it was divided by the rank's count.": (
            ranks / total
        ),
        "{got} is what DDP does by itself: ranks weigh equally, samples don't.": 1.0,
        "{got} divides by the ranks, which DDP does already; and ranks would still weigh equally.": 1 / ranks,
        "{got} turns the mean into the rank's sum. Now say what is to divide it, and what DDP divides it by.": own,
        "{got} undoes both divisions that were made. The one that is wanted, by all samples, is missing.": own * ranks,
        "{got} is upside down: the rank with more samples has to weigh more.": total / (ranks * own) if own else 0.0,
    }


rank_factor = Exercise(
    "factor",
    solution=lambda counts, rank: counts[rank] * len(counts) / sum(counts),
    cases=[
        dict(counts=[6, 2], rank=0),
        dict(counts=[6, 2], rank=1),
        dict(counts=[8, 8], rank=0),
        dict(counts=[5, 0, 10, 5], rank=2),
        dict(counts=[5, 0, 10, 5], rank=1),
    ],
    misconceptions=_wrong_factors,
)


def _logged_loss(losses: list[float], tokens: list[int], k: int) -> float:
    return sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)


def _wrong_losses(losses: list[float], tokens: list[int], k: int) -> dict[str, float]:
    total, micro_batches = sum(losses), len(losses)
    by_updates = total / max(1, micro_batches // k)
    of_tokens = _logged_loss(losses, tokens, k) * sum(tokens)
    by_window = _mean([_mean(window) for window in windows(losses, k)])
    return {
        "{got} adds k losses for each update: a sum over micro-batches, divided by updates.": by_updates,
        "{got} takes k losses for each update, also where a short window has fewer: count the micro-batches.": (
            by_updates / k
        ),
        "{got} divides by k once, however many windows the losses come from.": total / k,
        "{got} is a sum over tokens, divided by micro-batches: divide by the tokens.": of_tokens / micro_batches,
        "{got} averages the windows' averages: a short window weighs as much as a full one.": by_window,
        "{got} takes the short window for a full one: k times the windows is not the number of micro-batches.": (
            total / (k * math.ceil(micro_batches / k))
        ),
        "{got} averages averages: a micro-batch of 4 tokens weighs as much as one of 12.": total / micro_batches,
        "{got} divides means by tokens: multiply each mean by its tokens first.": total / sum(tokens),
    }


logged_loss = Exercise(
    "logged_loss",
    solution=_logged_loss,
    cases=[
        dict(losses=[2.0, 4.0], tokens=[8, 8], k=1),
        dict(losses=[2.0, 4.0, 3.0, 3.0], tokens=[8, 8, 8, 8], k=2),
        dict(losses=[2.0, 4.0, 3.0, 3.0, 8.0], tokens=[8, 8, 8, 8, 8], k=2),
        dict(losses=[2.0, 4.0, 6.0, 8.0], tokens=[12, 4, 4, 4], k=2),
    ],
    misconceptions=_wrong_losses,
)

EXERCISES = (applied_gradients, rank_factor, logged_loss)
