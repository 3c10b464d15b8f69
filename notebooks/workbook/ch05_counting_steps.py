"""What chapter 05 shows: drawings of runs and of plans, and the widget. Its exercises: `ch05_exercises`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import ipywidgets
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.steps import StepPlan, plan_steps
from course_lib.steps.counting import Epochs
from workbook.ch05_exercises import (
    EXERCISES,
    count_by_hand,
    max_steps_on_four_ranks,
    max_steps_on_two_ranks,
    schedule_horizon,
    steps_per_epoch,
)
from workbook.display import GREY, ORANGE, SKY, VERMILION, YELLOW, add_legend_below, draw_curves, new_figure, numbered
from workbook.widgets import Explorer, int_slider

__all__ = [
    "EXERCISES",
    "Box",
    "cosine_rates",
    "count_by_hand",
    "figure_of_losses",
    "figure_of_rates",
    "figure_of_steps",
    "figure_of_tails",
    "max_steps_on_four_ranks",
    "max_steps_on_two_ranks",
    "run_boxes",
    "schedule_horizon",
    "step_boxes",
    "steps_explorer",
    "steps_per_epoch",
]

LOOKS = {
    "full window": (SKY, ""),
    "short window": (ORANGE, "//"),
    "leaks into the next epoch": (YELLOW, "\\\\"),
    "in no step": (GREY, ".."),
    "dropped": ("white", "xxx"),
    "not run": ("white", ""),
}
"""Colour and hatch of each fate that a sample can have."""


class Box(NamedTuple):
    """Neighbouring samples of one rank and epoch that share a fate."""

    epoch: int
    samples: tuple[int, int]
    """First, and one past the last, in the order in which the rank draws them."""
    batch_edges: tuple[int, ...]
    """Where its micro-batches begin and end, in samples."""
    fate: str
    label: str = ""
    """The number of the optimizer step, from 1, and the micro-batches that leak into it from earlier epochs."""


def step_boxes(plan: StepPlan, epochs: int) -> list[Box]:
    """The numbers behind :func:`figure_of_steps`: for each of the first epochs, boxes that cover one rank's samples."""
    boxes = []
    for epoch in range(epochs):
        span = [span for span in plan.spans if span.first_epoch <= epoch][-1]

        def box(start: int, stop: int, fate: str, label: str = "", *, epoch: int = epoch, span: Epochs = span) -> Box:
            edges = tuple(span.samples_up_to(batch) for batch in range(start, stop + 1))
            return Box(epoch, (edges[0], edges[-1]), edges, fate, label)

        done = 0
        first = span.steps_before + (epoch - span.first_epoch) * span.steps
        for window in plan.windows[first : first + span.steps]:
            short = window.stop - window.start < span.dealt[0].window_size
            label = str(window.optimizer_step + 1) + (f" (+{window.carried})" if window.carried else "")
            boxes.append(box(window.start, window.stop, "short window" if short else "full window", label))
            done = window.stop
        ran = plan.batches_in_epoch(epoch)
        if ran > done:
            steps_later = plan.total_steps > 0 and plan.windows[-1].epoch > epoch
            leaks = plan.short_window == "carry" and steps_later
            boxes.append(box(done, ran, "leaks into the next epoch" if leaks else "in no step"))
        if span.batches > ran:
            boxes.append(box(ran, span.batches, "not run"))
        trained, of_rank = span.samples_up_to(span.batches), -(-span.num_samples // plan.world_size)
        if trained < of_rank:
            rest = (trained, of_rank)
            boxes.append(Box(epoch, rest, rest, "dropped"))
    return boxes


def run_boxes(
    batches: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], *, epochs: int, accumulate_grad_batches: int
) -> list[Box]:
    """The boxes of a run that was recorded: of every epoch, with no sample twice in it.

    Args:
        batches: The samples of each micro-batch, in the order in which they ran.
        weights: Sample i moves weight i alone; all weights before each micro-batch, and after the last.
        epochs: Epochs that ran, equally long.
        accumulate_grad_batches: Micro-batches in a full window.
    """
    moved = []
    for before, after in itertools.pairwise(weights):
        moved.append({sample for sample, weight in enumerate(before) if weight != after[sample]})
    step_ends = [number for number, samples in enumerate(moved) if samples]
    step_of: list[int | None] = []
    for number, batch in enumerate(batches):
        later = [step for step, end in enumerate(step_ends) if end >= number]
        in_it = bool(later) and set(batch) <= moved[step_ends[later[0]]]
        step_of.append(later[0] if in_it else None)

    per_epoch = len(batches) // epochs
    boxes = []
    for epoch in range(epochs):
        start, stop = epoch * per_epoch, (epoch + 1) * per_epoch
        edges = [0]
        for batch in batches[start:stop]:
            edges.append(edges[-1] + len(batch))
        for step in dict.fromkeys(step_of[start:stop]):
            its = [number for number in range(start, stop) if step_of[number] == step]
            first, last = its[0] - start, its[-1] + 1 - start
            label = ""
            if step is None:
                fate = "in no step"
            elif step_ends[step] >= stop:
                fate = "leaks into the next epoch"
            else:
                fate = "full window" if len(its) == accumulate_grad_batches else "short window"
                carried = step_of[:start].count(step)
                label = str(step + 1) + (f" (+{carried})" if carried else "")
            boxes.append(Box(epoch, (edges[first], edges[last]), tuple(edges[first : last + 1]), fate, label))
    return boxes


def draw_boxes(axes: Axes, boxes: list[Box], *, title: str) -> list[Patch]:
    """Draw one row for each epoch: a rank's samples from left to right, cut into micro-batches, coloured by window.

    The number in a window is its optimizer step (with the micro-batches that leaked into it), and the bar at its
    right end the moment of that step. Returns the legend's handles.
    """
    epochs = 1 + max(box.epoch for box in boxes)
    width = max(box.samples[1] for box in boxes)
    for box in boxes:
        (start, stop), (colour, hatch) = box.samples, LOOKS[box.fate]
        line = ":" if box.fate == "not run" else "-"
        axes.barh(
            box.epoch, stop - start, 0.72, left=start, color=colour, hatch=hatch, edgecolor="#666666", linestyle=line
        )
        if width <= 60 * (stop - start) / max(1, len(box.batch_edges) - 1):  # else the edges hide the boxes
            axes.vlines(box.batch_edges, box.epoch - 0.36, box.epoch + 0.36, color="white", linewidth=0.8)
        if box.label:
            thin = min(2.5, 300 * (stop - start) / width)
            axes.vlines(stop, box.epoch - 0.45, box.epoch + 0.45, color=VERMILION, linewidth=thin)
        if box.label and stop - start > width / 40 * len(box.label):
            axes.text(
                (start + stop) / 2, box.epoch, box.label, ha="center", va="center", fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.15"},
            )  # fmt: skip
    axes.set_title(title, fontsize=11)
    axes.set(xlabel="samples, in the order drawn", ylabel="epoch", yticks=range(epochs))
    axes.set(xlim=(0, 1.01 * width), ylim=(epochs - 0.4, -0.6))
    fates = dict.fromkeys(box.fate for box in boxes)
    handles = [Patch(facecolor=LOOKS[fate][0], hatch=LOOKS[fate][1], edgecolor="#666666", label=fate) for fate in fates]
    return [*handles, Patch(facecolor=VERMILION, label="moment of the optimizer step")]


def figure_of_steps(plan: StepPlan, *, epochs: int = 3) -> Figure:
    """The first epochs of a plan, the legend below."""
    figure, axes = new_figure(9.0, 1.6 + 0.5 * epochs)
    steps = f"{plan.steps_per_epoch} optimizer step{'s' if plan.steps_per_epoch != 1 else ''} per epoch"
    handles = draw_boxes(axes, step_boxes(plan, epochs), title=f"{steps}, {plan.total_steps} in the run")
    axes.set_xlabel("samples of one rank, in the order drawn")
    add_legend_below(figure, handles)
    return figure


def figure_of_tails(runs: dict[str, list[Box]]) -> Figure:
    """Recorded runs side by side, by the first line of their titles."""
    figure, panels = new_figure(12.0, 3.1, columns=len(runs))
    handles: dict[str, Patch] = {}
    for axes, (title, boxes) in zip(panels, runs.items(), strict=True):
        steps = sum(1 for box in boxes if box.label)
        drawn = draw_boxes(axes, boxes, title=f"{title}:\n{steps} optimizer steps")
        handles |= {str(handle.get_label()): handle for handle in drawn}
    add_legend_below(figure, list(handles.values()))
    return figure


def figure_of_rates(rates: dict[str, list[float]]) -> Figure:
    """Learning rates of named runs, from before the first optimizer step to after the last."""
    figure, axes = new_figure(9.0, 3.2)
    by_step = {name: (range(len(curve)), curve) for name, curve in rates.items()}
    draw_curves(
        axes,
        by_step,
        title="With a horizon that is too short, the rate rises again",
        x="optimizer steps made",
        y="learning rate (peak = 1)",
        legend="beside",
    )
    return figure


def figure_of_losses(rates: dict[str, list[float]], losses: dict[str, list[float]]) -> Figure:
    """Learning rates after each optimizer step, and training losses of each epoch, of the same named runs."""
    figure, (left, right) = new_figure(11.0, 3.4, columns=2)
    by_step = {name: numbered(curve) for name, curve in rates.items()}
    draw_curves(left, by_step, title="One rate ends at zero, one rises again", x="optimizer steps", y="learning rate")
    by_epoch = {name: numbered(curve) for name, curve in losses.items()}
    draw_curves(right, by_epoch, title="The loss falls in both runs", x="epochs", y="training loss (cross entropy)")
    return figure


def steps_explorer() -> Explorer:
    """Samples, batch size, accumulation, ranks, drop_last → the drawing and the plan of three epochs."""

    def render(**arguments: int) -> tuple[Figure, str]:
        plan = plan_steps(**arguments, max_epochs=3)  # type: ignore[arg-type]
        return figure_of_steps(plan), plan.explain()

    controls = {
        "num_samples": int_slider(72, 240, "samples"),
        "batch_size": int_slider(8, 32, "batch size of each rank"),
        "accumulate_grad_batches": int_slider(4, 16, "micro-batches per window"),
        "world_size": int_slider(1, 8, "ranks"),
        "drop_last": ipywidgets.Checkbox(value=False, description="drop_last"),
    }
    title = "samples, batches, ranks, drop_last → the steps"
    return Explorer(controls, render, title=title)


def cosine_rates(horizon: int, optimizer_steps: int, peak: float = 1.0) -> list[float]:
    """The learning rates of a cosine schedule that is stepped once per optimizer step: before each, and after the last.

    They are torch's own ``CosineAnnealingLR``, which turns back up where it is stepped beyond its horizon.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=horizon)
    rates = [peak]
    for _ in range(optimizer_steps):
        optimizer.step()
        schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates
