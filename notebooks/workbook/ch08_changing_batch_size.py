"""What chapter 08 shows and asks: epochs as rows of batches, a schedule as curves, runs side by side; the exercises."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import ipywidgets
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from course_lib.memory import predict_peak
from course_lib.schedules import SchedulePlan, SizeSchedule, SizeStage
from course_lib.schedules.rates import LrRule
from workbook.display import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, add_legend, draw_curves, new_figure
from workbook.exercises import Exercise
from workbook.widgets import Explorer, int_slider

NUM_SAMPLES = 48
BLOCKS = {16: BLUE, 8: SKY, 4: ORANGE}


def figure_of_epochs(epochs: Mapping[str, Sequence[int]], num_samples: int = NUM_SAMPLES) -> Figure:
    """One epoch a row: ``{how: batch sizes in order}``; what is missing to ``num_samples`` is hatched."""
    figure, axes = new_figure(9.0, 0.55 * len(epochs) + 1.2)
    for row, batches in enumerate(epochs.values()):
        start = 0
        for batch in batches:
            axes.barh(row, batch, left=start, color=BLOCKS[batch], edgecolor="white", linewidth=1.5, height=0.7)
            start += batch
        if start < num_samples:
            axes.barh(row, num_samples - start, left=start, color="white", edgecolor=GREY, hatch="///", height=0.7)
            middle, told = (start + num_samples) / 2, f"{num_samples - start} never trained"
            axes.text(middle, row, told, ha="center", va="center", backgroundcolor="w")
    for size, colour in BLOCKS.items():
        axes.bar(0, 0, color=colour, label=f"batch of {size}")
    axes.set_title(
        f"The same {num_samples} samples: a reset or a changed batch size may leave some out, a plan does not"
    )
    axes.set(xlabel="samples of the epoch, in the order in which they are trained", xlim=(0, num_samples))
    axes.set_yticks(range(len(epochs)), list(epochs))
    axes.invert_yaxis()
    add_legend(axes, "beside")
    return figure


def figure_of_runs(
    curves: Mapping[str, Sequence[tuple[float, float]]], bars: Mapping[str, Mapping[str, float]]
) -> Figure:
    """Accuracy against million pixels trained, one curve a run; then one panel of bars for each measure.

    Args:
        curves: ``{run: [(million pixels, accuracy) after each epoch]}``.
        bars: ``{measure with its unit: {run: value}}``.
    """
    figure, (axes, *panels) = new_figure(13.0, 3.6, columns=1 + len(bars))
    drawn = {name: ([x for x, _ in points], [y for _, y in points]) for name, points in curves.items()}
    unit = "accuracy on test digits, 32 pixels a side"
    draw_curves(axes, drawn, title="Per pixel trained", x="million pixels", y=unit)
    colours = dict(zip(curves, (BLUE, VERMILION, GREEN, PURPLE), strict=False))
    for panel, (measure, of_runs) in zip(panels, bars.items(), strict=True):
        found = panel.bar(range(len(of_runs)), list(of_runs.values()), color=[colours[name] for name in of_runs])
        panel.bar_label(found, fmt="{:,.4g}", padding=2, fontsize=9)
        panel.set(title=measure, xticks=[], ylim=(0, 1.15 * max(of_runs.values())))
    figure.suptitle("Resizing saves pixels and time, as does stopping early; the peak is the budget's, at every size")
    return figure


def digit_net() -> nn.Module:
    """Three convolutions; for square images of any side from 4 on."""
    torch.manual_seed(0)
    stages: list[nn.Module] = []
    channels = 1
    for out in (16, 32, 64):
        stages += [nn.Conv2d(channels, out, 3, 1 if channels == 1 else 2, 1), nn.BatchNorm2d(out), nn.ReLU()]
        channels = out
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10))


@cache
def peak_mib(side: int, batch_size: int) -> float:
    """The predicted peak of a step of ``digit_net`` on a CPU."""

    def batch(samples: int) -> tuple[Tensor, Tensor]:
        return torch.ones(samples, 1, side, side), torch.zeros(samples, dtype=torch.long)

    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return predict_peak(digit_net, batch, optimizer, batch_size=batch_size, device="cpu").peak_bytes / 2**20


def stage_mib(stage: SizeStage) -> float:
    assert isinstance(stage.size, int)
    return peak_mib(stage.size, stage.batch_size)


def figure_of_schedule(plan: SchedulePlan, rule: LrRule) -> Figure:
    """Size, batch size, peak bytes and learning rate factor of a plan against its optimizer steps."""
    figure, panels = new_figure(12.0, 2.8, columns=4)
    starts = [step for step, _ in plan.sizes]
    factor = plan.lr_factor(rule)
    lines: dict[str, list[float]] = {
        "pixels a side": [float(str(stage.size)) for _, stage in plan.sizes],
        "samples in a batch of a rank": [stage.batch_size for _, stage in plan.sizes],
        "MiB at the peak of a step": [stage_mib(stage) for _, stage in plan.sizes],
        f"learning rate, times ({rule})": [factor(step) for step in starts],
    }
    for axes, (name, values), colour in zip(panels, lines.items(), (BLUE, VERMILION, PURPLE, GREEN), strict=True):
        axes.step([*starts, plan.total_steps], [*values, values[-1]], where="post", color=colour, linewidth=2)
        axes.set(xlabel="optimizer steps", ylabel=name, ylim=(0, 1.1 * max(values)), xlim=(0, plan.total_steps))
    title = "Within one budget, the batch goes down where the size goes up; what the learning rate does is a choice"
    figure.suptitle(title)
    return figure


def schedule_explorer() -> Explorer:
    """Sizes, a budget, epochs and a rule → sizes, batches, steps and learning rate over the run."""

    def render(smallest: int, largest: int, budget: int, epochs: int, hold: bool, rule: LrRule) -> tuple[Figure, str]:
        middle = max(8, (smallest + largest) // 2 // 8 * 8)
        sides = sorted({smallest, middle, largest})
        starts = [round(epochs * i / len(sides)) for i in range(len(sides))]
        made = SizeSchedule.with_budget(dict(zip(starts, sides, strict=True)), budget * largest**2, multiple_of=1)
        if hold:
            batches = [made.stages[-1].batch_size * (largest**2 // side**2) for side in sides]
            stages = [(start, side, batch) for start, side, batch in zip(starts, sides, batches, strict=True)]
            made = SizeSchedule(stages, effective_batch_size=math.lcm(*batches))
        plan = made.plan(1437, max_epochs=epochs)
        peaks = ", ".join(f"{stage_mib(stage):.1f}" for stage in made.stages)
        words = f"{made.table()}\n{plan.total_steps:,} optimizer steps, {plan.micro_batches:,} batches; MiB: {peaks}"
        return figure_of_schedule(plan, rule), words

    controls: dict[str, Any] = {
        "smallest": ipywidgets.SelectionSlider(options=(8, 16, 24, 32), value=8, description="pixels a side, first"),
        "largest": ipywidgets.SelectionSlider(options=(32, 48, 64), value=32, description="pixels a side, last"),
        "budget": int_slider(16, 64, "samples of the last size"),
        "epochs": int_slider(6, 12, "epochs", lowest=3),
        "hold": ipywidgets.Checkbox(value=False, description="hold the effective batch"),
        "rule": ipywidgets.Dropdown(options=("linear", "sqrt", "none"), description="learning rate"),
    }
    title = "sizes and a budget → batches, steps, bytes and learning rate of 1,437 digits"
    return Explorer(controls, render, title=title)


def _batch_sizes(sides: Sequence[int], budget: int, multiple_of: int) -> list[int]:
    return [budget // side**2 // multiple_of * multiple_of for side in sides]


def _wrong_sizes(sides: list[int], budget: int, multiple_of: int) -> dict[str, list[int]]:
    of_first = budget // sides[0] ** 2
    exact = [budget / side**2 / multiple_of for side in sides]
    by_side = [budget // side // multiple_of * multiple_of for side in sides]
    halved = [of_first * sides[0] // side // multiple_of * multiple_of for side in sides]
    up = [math.ceil(multiples) * multiple_of for multiples in exact]
    nearest = [round(multiples) * multiple_of for multiples in exact]
    return {
        "{got} divides by the side: twice the side is four times the pixels.": by_side,
        "{got} halves the batch where the side doubles: the pixels are four times as many.": halved,
        "{got} rounds up, and so goes beyond the budget: a batch that does not fit is an out-of-memory error.": up,
        "{got} rounds to the nearest, which may be beyond the budget.": nearest,
        "{got} fits, and is no multiple of what was asked for.": [budget // side**2 for side in sides],
        "{got} gives a batch also where the budget holds none: say 0, so that somebody notices before the device.": (
            [max(multiple_of, size) for size in _batch_sizes(sides, budget, multiple_of)]
        ),
    }


batch_sizes = Exercise(
    "batch_sizes",
    solution=_batch_sizes,
    cases=[
        dict(sides=[1], budget=8, multiple_of=1),
        dict(sides=[8, 16], budget=16_384, multiple_of=1),
        dict(sides=[8, 16, 24], budget=16_384, multiple_of=1),
        dict(sides=[8, 24, 32], budget=16_384, multiple_of=8),
        dict(sides=[24, 8], budget=1000, multiple_of=1),
        dict(sides=[8, 24], budget=15_000, multiple_of=8),
        dict(sides=[64, 96], budget=32_768, multiple_of=4),
    ],
    misconceptions=_wrong_sizes,
)


def _windows(batch_sizes: Sequence[int], effective_batch_size: int, world_size: int) -> list[int]:
    return [effective_batch_size // (batch * world_size) for batch in batch_sizes]


def _wrong_windows(batch_sizes: list[int], effective_batch_size: int, world_size: int) -> dict[str, list[int]]:
    first, last = batch_sizes[0], batch_sizes[-1]
    of_first = effective_batch_size // (first * world_size)
    on_one_rank = [effective_batch_size // batch for batch in batch_sizes]
    multiplied = [effective_batch_size * world_size // batch for batch in batch_sizes]
    return {
        "{got} forgets the ranks: each of them adds its batch to every update.": on_one_rank,
        "{got} multiplies by the ranks: more ranks need fewer micro-batches, not more.": multiplied,
        "{got} is one number for all stages: the batch shrinks, so the window has to grow.": [
            of_first for _ in batch_sizes
        ],
        "{got} is upside down: the largest batch needs the shortest window.": [batch // last for batch in batch_sizes],
        "{got} holds the first stage's batch, whatever was asked for.": [first // batch for batch in batch_sizes],
    }


windows = Exercise(
    "windows",
    solution=_windows,
    cases=[
        dict(batch_sizes=[64], effective_batch_size=64, world_size=1),
        dict(batch_sizes=[64, 16, 4], effective_batch_size=64, world_size=1),
        dict(batch_sizes=[64, 16, 4], effective_batch_size=256, world_size=2),
        dict(batch_sizes=[32, 8], effective_batch_size=384, world_size=4),
    ],
    misconceptions=_wrong_windows,
)

Run = Sequence[tuple[int, float]]
"""``(side, accuracy)`` of each epoch."""


def _within(run: Run, budget: float, cost: Callable[[int], float]) -> float:
    """Accuracy after the last epoch that ends within a budget."""
    spent, accuracy = 0.0, 0.0
    for side, after in run:
        spent += cost(side)
        if spent <= budget:
            accuracy = after
    return accuracy


def _gain(baseline: Run, resized: Run, cost: Callable[[int], float] = lambda side: side**2) -> float:
    budget = min(sum(cost(side) for side, _ in run) for run in (baseline, resized))
    return round(_within(resized, budget, cost) - _within(baseline, budget, cost), 4)


def _wrong_gains(baseline: Run, resized: Run) -> dict[str, float]:
    at_the_end = round(resized[-1][1] - baseline[-1][1], 4)
    best = round(max(accuracy for _, accuracy in resized) - max(accuracy for _, accuracy in baseline), 4)
    by_epochs = _gain(baseline, resized, cost=lambda side: 1)
    by_sides = _gain(baseline, resized, cost=lambda side: side)
    return {
        "{got} lets the longer run go on past the cheaper one's pixels: it has trained more.": at_the_end,
        "{got} compares the best epochs, wherever they are: picked afterwards, by the accuracy itself.": best,
        "{got} compares after as many epochs. An epoch of small images costs less: count pixels.": by_epochs,
        "{got} counts sides, not pixels: an epoch at 16 costs a quarter of one at 32.": by_sides,
    }


gain = Exercise(
    "gain",
    solution=_gain,
    cases=[
        dict(baseline=[(32, 0.5), (32, 0.75)], resized=[(32, 0.875), (32, 0.6875)]),
        dict(baseline=[(32, 0.5), (32, 0.75)], resized=[(32, 0.5), (32, 0.625), (32, 0.875)]),
        dict(
            baseline=[(32, 0.5), (32, 0.75)],
            resized=[(16, 0.125), (16, 0.25), (16, 0.375), (16, 0.5), (32, 0.75), (32, 0.875)],
        ),
        dict(
            baseline=[(32, 0.25), (32, 0.5), (32, 0.625), (32, 0.875), (32, 0.75)],
            resized=[(16, 0.25), (16, 0.375), (32, 0.75), (32, 0.9375), (32, 0.625)],
        ),
    ],
    misconceptions=_wrong_gains,
)

EXERCISES = (batch_sizes, windows, gain)
