"""What chapter 05 shows and asks: the drawing of a plan, its widget, and the exercises."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ipywidgets
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.steps import EqualEpochs, StepPlan, Tail, plan_steps
from workbook.display import GREY, ORANGE, SKY, VERMILION, YELLOW, add_legend_below, draw_curves, new_figure, numbered
from workbook.exercises import Exercise
from workbook.widgets import Explorer, int_slider

LOOKS = {
    "full window": (SKY, ""),
    "short window": (ORANGE, "//"),
    "leaks into the next epoch": (YELLOW, "\\\\"),
    "never applied": ("#DDDDDD", "oo"),
    "gradient thrown away": ("#DDDDDD", ".."),
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
    """The numbers behind :func:`draw_steps`: for each of the first epochs, boxes that cover one rank's samples."""
    boxes = []
    for epoch in range(epochs):
        span = [span for span in plan.spans if span.first_epoch <= epoch][-1]

        def box(
            start: int, stop: int, fate: str, label: str = "", *, epoch: int = epoch, span: EqualEpochs = span
        ) -> Box:
            edges = tuple(span.samples_up_to(batch) for batch in range(start, stop + 1))
            return Box(epoch, (edges[0], edges[-1]), edges, fate, label)

        done = 0
        first = span.steps_before + (epoch - span.first_epoch) * span.steps
        for window in plan.windows[first : first + span.steps]:
            short = window.stop - window.start < span.accumulate_grad_batches
            label = str(window.optimizer_step + 1) + (f" (+{window.carried})" if window.carried else "")
            boxes.append(box(window.start, window.stop, "short window" if short else "full window", label))
            done = window.stop
        ran = plan.batches_in_epoch(epoch)
        if ran > done:
            steps_later = plan.total_steps > 0 and plan.windows[-1].epoch > epoch
            leaks = "leaks into the next epoch" if steps_later else "never applied"
            boxes.append(box(done, ran, leaks if plan.tail == "carry" else "gradient thrown away"))
        if span.batches > ran:
            boxes.append(box(ran, span.batches, "not run"))
        trained = span.samples_up_to(span.batches)
        if trained < span.per_rank_samples:
            rest = (trained, span.per_rank_samples)
            boxes.append(Box(epoch, rest, rest, "dropped"))
    return boxes


def draw_steps(axes: Axes, plan: StepPlan, *, epochs: int = 3, title: str) -> list[Patch]:
    """Draw one row an epoch: a rank's samples from left to right, cut into micro-batches, coloured by window.

    The number in a window is its optimizer step (with the micro-batches that leaked into it), and the bar at its
    right end the moment of that step. Returns the legend's handles.
    """
    boxes = step_boxes(plan, epochs)
    width = max((box.samples[1] for box in boxes), default=1)
    for box in boxes:
        (start, stop), (colour, hatch) = box.samples, LOOKS[box.fate]
        line = ":" if box.fate == "not run" else "-"
        axes.barh(box.epoch, stop - start, 0.72, left=start, color=colour, hatch=hatch, edgecolor=GREY, linestyle=line)
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
    axes.set(xlabel="samples of one rank, in the order drawn", ylabel="epoch", yticks=range(epochs))
    axes.set(xlim=(0, 1.01 * width), ylim=(epochs - 0.4, -0.6))
    fates = dict.fromkeys(box.fate for box in boxes)
    handles = [Patch(facecolor=LOOKS[fate][0], hatch=LOOKS[fate][1], edgecolor=GREY, label=fate) for fate in fates]
    return [*handles, Patch(facecolor=VERMILION, label="moment of the optimizer step")]


def figure_of_steps(plan: StepPlan, *, epochs: int = 3, title: str) -> Figure:
    """:func:`draw_steps` as a figure of its own, the legend below."""
    figure, axes = new_figure(9.0, 1.6 + 0.5 * epochs)
    handles = draw_steps(axes, plan, epochs=epochs, title=title)
    add_legend_below(figure, handles)
    return figure


def figure_of_tails(num_samples: int, batch_size: int, accumulate_grad_batches: int) -> Figure:
    """The same three epochs under the three fates of a short window, side by side."""
    figure, panels = new_figure(12.0, 3.1, columns=3)
    titles: dict[Tail, str] = {
        "step": "A Trainer steps on the short window",
        "carry": "The modulo loop leaks it",
        "drop": "Zeroing at each epoch loses it",
    }
    handles: dict[str, Patch] = {}
    for axes, (tail, title) in zip(panels, titles.items(), strict=True):
        plan = plan_steps(
            num_samples, batch_size, accumulate_grad_batches=accumulate_grad_batches, max_epochs=3, tail=tail
        )
        drawn = draw_steps(axes, plan, title=f"{title}:\n{plan.total_steps} optimizer steps")
        handles |= {str(handle.get_label()): handle for handle in drawn}
    add_legend_below(figure, list(handles.values()))
    return figure


def figure_of_schedules(rates: dict[str, list[float]], accuracies: dict[str, list[float]]) -> Figure:
    """Learning rates after each optimizer step, and accuracies after each epoch, of the same named runs."""
    figure, (left, right) = new_figure(11.0, 3.2, columns=2)
    by_step = {name: numbered(curve) for name, curve in rates.items()}
    draw_curves(
        left, by_step, title="A horizon that is too short turns back up", x="optimizer steps", y="learning rate"
    )
    by_epoch = {name: numbered(curve) for name, curve in accuracies.items()}
    draw_curves(right, by_epoch, title="The accuracy hardly tells", x="epochs", y="accuracy on the test digits")
    return figure


def steps_explorer() -> Explorer:
    """Samples, batch size, accumulation, ranks, drop_last → the drawing and the plan of three epochs."""

    def render(**arguments: int) -> tuple[Figure, str]:
        plan = plan_steps(**arguments, max_epochs=3)  # type: ignore[arg-type]
        steps = f"{plan.steps_per_epoch} optimizer step{'s' if plan.steps_per_epoch != 1 else ''} per epoch"
        figure = figure_of_steps(plan, title=f"{steps}, {plan.total_steps} in three")
        return figure, f"{plan.explain()}\n\n{plan.table()}"

    controls = {
        "num_samples": int_slider(100, 240, "samples"),
        "batch_size": int_slider(8, 32, "per-rank batch size"),
        "accumulate_grad_batches": int_slider(4, 16, "micro-batches per window"),
        "world_size": int_slider(1, 8, "ranks"),
        "drop_last": ipywidgets.Checkbox(value=False, description="drop_last"),
    }
    title = "samples, batch size, accumulation, ranks, drop_last → the steps of 3 epochs"
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


count_by_hand = Exercise(
    "count by hand",
    solution=plan_steps(100, 8, accumulate_grad_batches=4, max_epochs=3).total_steps,
    misconceptions={
        "{got} is what floor division gives: the short last window of each epoch steps too.": 9,
        "{got} lets a window reach across epochs: a Trainer starts each epoch with a new one.": 10,
        "{got} counts micro-batches: four of them make one optimizer step.": 39,
        "{got} is one epoch; the run has three.": 4,
        "{got} counts the micro-batches of one epoch: four of them make one optimizer step.": 13,
        "{got} counts micro-batches, and leaves out the short one: it trains, and four make one step.": 36,
    },
)


def _steps_per_epoch(**asked: Any) -> int:
    steps = plan_steps(**asked, max_epochs=1).steps_per_epoch
    assert isinstance(steps, int)
    return steps


def _wrong_steps(
    num_samples: int, batch_size: int, accumulate_grad_batches: int, world_size: int, drop_last: bool
) -> dict[str, int]:
    k, per_step = accumulate_grad_batches, batch_size * accumulate_grad_batches * world_size
    options = dict(batch_size=batch_size, accumulate_grad_batches=k, drop_last=drop_last)
    right = _steps_per_epoch(num_samples=num_samples, world_size=world_size, **options)
    on_one_rank = _steps_per_epoch(num_samples=num_samples, **options)
    batches = num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)
    share = math.ceil(num_samples / world_size)
    return {
        "{got} is what floor division gives: the short last window steps too.": num_samples // per_step,
        "{got} ignores drop_last: the 6 samples left of 70 make no batch, so they start no window. "
        "(The line ceil(N / (b·k·G)) does that too.)": math.ceil(num_samples / per_step),
        "{got} counts micro-batches: divide by accumulate_grad_batches.": math.ceil(share / batch_size),
        "{got} forgets the ranks: each has its share of the samples.": on_one_rank,
        "{got} rounds a rank's share down: the sampler pads the shares to equal length, so it is rounded up.": (
            _steps_per_epoch(num_samples=num_samples // world_size, **options)
        ),
        "{got} shares out batches: the ranks share samples, and each cuts its own batches from its share.": (
            math.ceil(batches / k / world_size)
        ),
        "{got} adds the ranks' steps up: they step together, and it counts once.": world_size * right,
    }


steps_per_epoch = Exercise(
    "optimizer_steps_per_epoch",
    solution=_steps_per_epoch,
    cases=[
        dict(num_samples=64, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=False),
        dict(num_samples=72, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=False),
        dict(num_samples=70, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=False),
        dict(num_samples=70, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=True),
        dict(num_samples=33, batch_size=8, accumulate_grad_batches=2, world_size=1, drop_last=True),
        dict(num_samples=70, batch_size=8, accumulate_grad_batches=2, world_size=2, drop_last=False),
        dict(num_samples=65, batch_size=8, accumulate_grad_batches=2, world_size=2, drop_last=False),
        dict(num_samples=15, batch_size=8, accumulate_grad_batches=2, world_size=2, drop_last=True),
        dict(num_samples=24, batch_size=8, accumulate_grad_batches=1, world_size=2, drop_last=True),
        dict(num_samples=7, batch_size=8, accumulate_grad_batches=2, world_size=1, drop_last=True),
    ],
    misconceptions=_wrong_steps,
)


def _wrong_horizons(num_batches: int, accumulate_grad_batches: int, epochs: int) -> dict[str, float]:
    k, steps = accumulate_grad_batches, math.ceil(num_batches / accumulate_grad_batches)
    micro_batches = num_batches * epochs
    return {
        "{got} counts micro-batches, but the schedule is stepped once per update: the learning rate stays high.": (
            micro_batches
        ),
        "{got} turns updates back into micro-batches: the schedule would get only a part of its way.": steps
        * epochs
        * k,
        "{got} forgets the short window of each epoch: the schedule ends early, and a cosine turns back up.": (
            num_batches // k * epochs
        ),
        "{got} lets windows reach across epochs: round up in each epoch, then multiply.": math.ceil(micro_batches / k),
        "{got} is one epoch: multiply by the epochs.": steps,
        "{got} holds a part of a step: the short window is a whole one.": num_batches / k * epochs,
    }


schedule_horizon = Exercise(
    "horizon",
    solution=lambda num_batches, accumulate_grad_batches, epochs: (
        math.ceil(num_batches / accumulate_grad_batches) * epochs
    ),
    cases=[
        dict(num_batches=8, accumulate_grad_batches=1, epochs=3),
        dict(num_batches=10, accumulate_grad_batches=4, epochs=1),
        dict(num_batches=10, accumulate_grad_batches=4, epochs=2),
        dict(num_batches=3, accumulate_grad_batches=4, epochs=5),
    ],
    misconceptions=_wrong_horizons,
)

max_steps_on_two_ranks = Exercise(
    "max_steps on two ranks",
    solution=plan_steps(2500, 64, accumulate_grad_batches=8, world_size=2, max_epochs=10).total_steps,
    misconceptions={
        "{got} is right for one rank: each of two draws half of the samples.": 50,
        "{got} halves the steps: halve the samples, then count batches and windows anew.": 25,
        "{got} is what floor division gives: the short last window steps too.": 20,
        "{got} adds the ranks' steps up: they step together, and it counts once.": 60,
        "{got} counts micro-batches: a window of eight makes one step.": 190,
        "{got} counts micro-batches, the dropped one included: a window of eight makes one step.": 200,
        "{got} is one epoch; the run has ten.": 3,
    },
)

EXERCISES = (count_by_hand, steps_per_epoch, schedule_horizon, max_steps_on_two_ranks)
