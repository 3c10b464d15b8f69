"""What chapter 03 shows: a step's memory as a picture, what fits by a line, what trades memory for what.

Its exercises are in `ch03_exercises`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Literal

import ipywidgets
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import Dataset

from course_lib.memory import predict_peak
from course_lib.memory.allocator import MIB
from course_lib.memory.ledger import CATEGORIES, Moment
from course_lib.memory.predicting import PeakPrediction
from workbook.ch03_exercises import SavedTensor, graph_nodes, kept, peak_bytes
from workbook.ch03_three_trials import three_trials
from workbook.display import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, add_legend, draw_curves, new_figure
from workbook.widgets import Explorer, int_slider

__all__ = [
    "EXERCISES",
    "SENTENCES",
    "Records",
    "SavedTensor",
    "figure_of_line",
    "figure_of_lines",
    "figure_of_step",
    "figure_of_trades",
    "figure_of_widget",
    "graph_nodes",
    "graphs_held",
    "image_net",
    "kept",
    "memory_explorer",
    "peak_bytes",
    "predicted",
    "three_trials",
    "told",
]

SENTENCES = {
    "step": (
        "What the step holds after each allocation and free. Activations pile up during the forward pass, the peak "
        "of 21 MiB comes early in the backward pass, and they are freed one after the other; inputs and the "
        "optimizer's state are a thin line at the bottom, parameters and gradients too thin to be drawn."
    ),
    "lines": (
        "The most that each phase holds, against the batch size. The optimizer's step hardly depends on it, 68 to "
        "70 MiB, and is the peak of small batches. The backward pass starts at 64 MiB, bends at about 230 samples, "
        "and is the peak from there on. On the right the same, enlarged, up to 512 samples."
    ),
    "trades": (
        "What the step holds at its peak, by category, for five ways to train, with batches of 256 and of 1,024. "
        "The bars have the categories as colours, and at their end the peak relative to the plain step."
    ),
    "widget": (
        "64 images of 224 pixels a side, 64 channels, fp32, AdamW: tensors hold 2 GB at the peak, nearly all of "
        "them activations, and 2.6 GB are reserved. That fits in a card of 8 GB."
    ),
    "line": (
        "Measured peaks lie on a straight line that meets the limit at 6,000 samples. The line through 64 and 128 "
        "samples is the same one. The line through 1 and 2 samples is flatter, and meets the limit at 13,815."
    ),
}
"""What the figures show, for those who cannot see them."""

EXERCISES = (peak_bytes, kept, three_trials)

COLOURS = dict(zip(CATEGORIES, (BLUE, GREY, ORANGE, PURPLE, SKY, GREEN, VERMILION), strict=True))
PHASES = ("forward", "backward", "step")


def graphs_held(value: Any) -> int:
    """How many losses of `F.cross_entropy` autograd's graphs reach from a tensor or a list of tensors."""
    tensors = value if isinstance(value, list) else [value]
    nodes = graph_nodes([tensor for tensor in tensors if isinstance(tensor, Tensor)])
    return sum("NllLoss" in node.name() for node in nodes)


def figure_of_step(timeline: Sequence[Moment]) -> Figure:
    """What a step holds after each allocation and free, stacked by category; the phases are named above."""
    figure, axes = new_figure(10.0, 3.8)
    moments = timeline[1:]
    held = [name for name in CATEGORIES if max(moment.by_category[name] for moment in moments) * 200 > _peak(timeline)]
    axes.stackplot(
        range(len(moments)),
        [[moment.by_category[name] / MIB for moment in moments] for name in held],
        labels=held,
        colors=[COLOURS[name] for name in held],
        step="post",
    )
    top, start, stepped = 1.16 * _peak(timeline) / MIB, 0, False
    for phase, group in groupby(moments, key=lambda moment: moment.phase):
        number = len(list(group))
        if number > len(moments) / 40:
            axes.axvline(start, color="black", linewidth=0.6)
            axes.text(start + len(moments) / 150, top * 0.93, "after" if stepped else phase, fontsize=9)
        start, stepped = start + number, phase == "step"
    worst = max(range(len(moments)), key=lambda i: moments[i].total)
    axes.plot(worst, moments[worst].total / MIB, "v", color="black", label=f"peak: {_peak(timeline) / MIB:.1f} MiB")
    axes.set_title("Most of a step's memory is there for a moment, late in the forward and early in the backward pass")
    axes.set(xlabel="allocations and frees of one step", ylabel="MiB held", xlim=(0, len(moments)), ylim=(0, top))
    add_legend(axes, "beside")
    return figure


def _peak(timeline: Sequence[Moment]) -> int:
    return max(moment.total for moment in timeline)


def figure_of_lines(peaks: Mapping[int, Mapping[str, int]], limit_bytes: int, near: int = 512) -> Figure:
    """Peak bytes of each phase against the batch size, ``{batch size: {phase: bytes}}``, and a limit.

    A second panel shows the sizes up to ``near``, where the curves cross.
    """
    figure, panels = new_figure(11.0, 3.6, columns=2)
    sizes = sorted(peaks)
    curves = {phase: (sizes, [peaks[size][phase] / MIB for size in sizes]) for phase in PHASES}
    x, y = "samples in a batch", "MiB held at most"
    draw_curves(panels[0], curves, title="Small batches: the optimizer's step. Large ones: backward", x=x, y=y)
    panels[0].axhline(limit_bytes / MIB, color="black", linewidth=1, linestyle=":")
    panels[0].annotate("limit", (0, limit_bytes / MIB), (4, 3), textcoords="offset points", fontsize=9)
    panels[0].set(xlim=(0, max(sizes)), ylim=(0, None))
    draw_curves(panels[1], curves, title=f"The same, up to {near} samples", x=x, y=y)
    shown = [peaks[size][phase] / MIB for size in sizes if size <= near for phase in PHASES]
    panels[1].set(xlim=(0, near), ylim=(min(shown) - 2, max(shown) + 2))
    return figure


def figure_of_line(run: Mapping[int, int], pairs: Sequence[tuple[int, int]], limit_bytes: int) -> Figure:
    """What was measured, ``{batch size: bytes}``, and the line through each pair of sizes up to the limit."""
    figure, axes = new_figure(9.0, 3.8)
    for (low, high), colour, line, marker in zip(pairs, (VERMILION, BLUE), ("--", "-"), ("s", "o"), strict=False):
        slope = (run[high] - run[low]) / (high - low)
        answer = high + (limit_bytes - run[high]) / slope
        ends = (0, answer), ((run[high] - slope * high) / 1e6, limit_bytes / 1e6)
        axes.plot(*ends, color=colour, linestyle=line, label=f"line through {low} and {high}")
        axes.plot([low, high], [run[low] / 1e6, run[high] / 1e6], marker, color=colour)
        axes.annotate(f"{int(answer):,}", (answer, limit_bytes / 1e6), (0, 5), textcoords="offset points", ha="center")
    sizes = sorted(run)
    axes.plot(sizes, [run[size] / 1e6 for size in sizes], "k.", label="measured")
    axes.axhline(limit_bytes / 1e6, color="black", linewidth=1, linestyle=":", label="limit")
    axes.set(title="A line through two small batches promises more than twice what fits")
    axes.set(xlabel="samples in a batch", ylabel="MB held at most", xlim=(0, None), ylim=(0, 1.18 * limit_bytes / 1e6))
    add_legend(axes, "beside")
    return figure


def figure_of_trades(trades: Mapping[int, Mapping[str, PeakPrediction]]) -> Figure:
    """Bytes by category at the peak, ``{batch size: {what was changed: prediction}}``; a panel for each batch size."""
    figure, panels = new_figure(11.0, 3.6, columns=len(trades))
    for axes, (batch_size, ways) in zip(panels, trades.items(), strict=True):
        peaks = {name: way.by_category for name, way in ways.items()}
        first = _draw_stacks(axes, peaks, MIB)
        axes.axvline(first, color="black", linewidth=0.8, linestyle="--")
        for row, by_category in enumerate(peaks.values()):
            end = sum(by_category.values()) / MIB
            axes.annotate(
                f"× {end / first:.2f}", (end, row), (4, 0), textcoords="offset points", va="center", fontsize=9
            )
        axes.invert_yaxis()
        widest = max(sum(by_category.values()) for by_category in peaks.values()) / MIB
        axes.set(
            title=f"batches of {batch_size}", xlabel="MiB at the peak", ylabel="way to train", xlim=(0, 1.15 * widest)
        )
    add_legend(panels[-1], "beside")
    figure.suptitle("The same five ways save much or nothing: it depends on what the peak holds")
    return figure


def _draw_stacks(axes: Axes, peaks: Mapping[str, Mapping[str, int]], unit: float) -> float:
    """One bar for each name, of bytes by category; returns where the first ends."""
    ends = [0.0] * len(peaks)
    for category in CATEGORIES:
        widths = [by_category.get(category, 0) / unit for by_category in peaks.values()]
        if sum(widths) * 200 > sum(ends):
            axes.barh(list(peaks), widths, left=ends, color=COLOURS[category], label=category)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    return ends[0]


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.short = nn.Conv2d(channels, out, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.body(x))


def image_net(width: int) -> nn.Module:
    """Five residual stages, each with half the side and twice the channels of the one before."""
    channels = [width * 2**stage for stage in range(5)]
    stages = [_Residual(a, b) for a, b in zip([3, *channels], channels, strict=False)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 1000))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
CARDS = (8, 16, 24, 80)
"""GB of usual cards; as their makers count, in 10**9 bytes."""


FORK = "fork" if "fork" in torch.multiprocessing.get_all_start_methods() else None
"""How workers are started that share the pages of this process; None: here they are spawned, and cannot."""


class Records(Dataset[int]):
    """A Python object for each sample."""

    def __init__(self, records: Sequence[Mapping[str, int]]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> int:
        return self.records[i]["label"]


@cache
def predicted(
    batch: int = 64,
    side: int = 224,
    width: int = 64,
    precision: Literal["fp32", "bf16"] = "fp32",
    optimizer: str = "AdamW",
) -> PeakPrediction:
    """The step of `image_net` on CUDA, predicted; the defaults are those of the widget."""

    def images(samples: int) -> tuple[Tensor, Tensor]:
        return torch.ones(samples, 3, side, side), torch.zeros(samples, dtype=torch.long)

    return predict_peak(lambda: image_net(width), images, OPTIMIZERS[optimizer], batch_size=batch, precision=precision)


def told(prediction: PeakPrediction) -> str:
    """Peak and reserve in words, and for each card the number that decides."""
    phase = max(prediction.timeline[1:], key=lambda moment: moment.total).phase
    lines = [f"tensors at the peak: {prediction.peak_bytes / 1e9:.2f} GB, in the {phase}"]
    lines += [f"reserved for them:   {prediction.reserved_bytes / 1e9:.2f} GB"]
    for card in CARDS:
        verdict = "fits" if prediction.fits(card * 10**9) else "does not fit"
        lines.append(f"{card} GB card, of which 90% are {0.9 * card:.1f} GB: {verdict}")
    return "\n".join(lines)


def figure_of_widget(prediction: PeakPrediction) -> Figure:
    """The widget's picture: tensors by category, what is reserved, and 90% of the usual cards."""
    return _bar(prediction.by_category, prediction.reserved_bytes)


def memory_explorer() -> Explorer:
    """Batch, side, width, precision and optimizer → the predicted peak on CUDA as a bar, and which cards it fits."""

    def render(
        batch: int, side: int, width: int, precision: Literal["fp32", "bf16"], optimizer: str
    ) -> tuple[Figure, str]:
        prediction = predicted(batch, side, width, precision, optimizer)
        return figure_of_widget(prediction), told(prediction)

    sides = ipywidgets.SelectionSlider(
        options=(64, 128, 224, 256, 384, 448, 512), value=224, description="pixels a side"
    )
    controls = {
        "batch": int_slider(64, 512, "samples in a batch"),
        "side": sides,
        "width": int_slider(64, 256, "channels of the first stage"),
        "precision": ipywidgets.Dropdown(options=("fp32", "bf16"), description="precision"),
        "optimizer": ipywidgets.Dropdown(options=tuple(OPTIMIZERS), description="optimizer"),
    }
    return Explorer(controls, render, title="batch, pixels, width, precision, optimizer → the bytes of a step")


def _bar(by_category: Mapping[str, int], reserved_bytes: int) -> Figure:
    figure, axes = new_figure(9.6, 2.3)
    end = _draw_stacks(axes, {"tensors at the peak": by_category}, 1e9)
    axes.barh(["reserved for them"], [reserved_bytes / 1e9], color="white", edgecolor="black", hatch="//")
    for card in CARDS:
        axes.axvline(card * 0.9, color="black", linestyle=":", linewidth=1)
        axes.annotate(f"{card} GB", (card * 0.9, 1.4), rotation=90, fontsize=8, ha="right", va="top")
    title = "What the step holds at its peak, and what is reserved for it"
    axes.set(title=title, xlabel="GB (dotted: 90% of a card)", ylabel="predicted", ylim=(-0.6, 1.5))
    axes.set_xlim(0, max(1.05 * end, 1.05 * reserved_bytes / 1e9, CARDS[0]))
    add_legend(axes, "beside")
    return figure
