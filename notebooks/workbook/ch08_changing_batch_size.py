"""What chapter 08 shows: epochs as rows of batches, a budget of bytes as curves, and three runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import ipywidgets
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from course_lib.memory import predict_peak, saved_bytes
from course_lib.schedules import SizeSchedule
from course_lib.schedules.schedule_plan import SchedulePlan
from workbook.ch08_exercises import EXERCISES, batch_sizes, gain, windows
from workbook.ch08_squares import Squares, SquaresOfPairs, square
from workbook.display import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    Curve,
    add_legend,
    draw_curves,
    new_figure,
    numbered,
)
from workbook.trainers import quiet_trainer
from workbook.widgets import Explorer, int_slider

__all__ = ["EXERCISES", "Squares", "SquaresOfPairs", "batch_sizes", "gain", "square", "windows"]

NUM_SAMPLES = 48
BLOCKS = {16: BLUE, 8: SKY, 4: ORANGE}
LARGEST_BATCH = 1024
"""Of the widget: more than that many of its digits change nothing in the picture."""

Batches = Sequence[tuple[int, int]]
"""``(samples, pixels a side)`` of each batch of an epoch, in order."""
Points = Sequence[tuple[float, float]]


def fit(model: Any, *loaders: Any, max_epochs: int = 3, **options: Any) -> dict[int, Batches]:
    """Train in a Trainer, on the CPU and in one process; what the model has recorded, by epoch."""
    trainer = quiet_trainer(accelerator="cpu", devices=1, max_epochs=max_epochs, **options)
    trainer.fit(model, *loaders)
    return model.epochs  # type: ignore[no-any-return]


def count(batches: Batches) -> int:
    """Samples of an epoch."""
    return sum(samples for samples, side in batches)


def samples(epochs: Mapping[int, Batches]) -> list[int]:
    """Samples of each epoch."""
    return [count(batches) for batches in epochs.values()]


def tell(epochs: Mapping[int, Batches]) -> None:
    """Print the batches of each epoch, the sides of their images, and how many samples were trained."""
    for epoch, batches in epochs.items():
        sizes = [samples for samples, side in batches]
        sides = sorted({side for samples, side in batches})
        print(f"epoch {epoch}: batches {sizes}, sides {sides}, {count(batches)} of 48 samples")


def figure_of_epochs(runs: Mapping[str, Mapping[int, Batches]], title: str, num_samples: int = NUM_SAMPLES) -> Figure:
    """One epoch a row, each batch a block with its pixels a side; what is missing to ``num_samples`` is hatched."""
    epochs = {f"{run}, epoch {epoch}": batches for run, of_run in runs.items() for epoch, batches in of_run.items()}
    figure, axes = new_figure(10.0, 0.55 * len(epochs) + 1.4)
    for row, batches in enumerate(epochs.values()):
        start = 0
        for batch, side in batches:
            axes.barh(row, batch, left=start, color=BLOCKS[batch], edgecolor="white", linewidth=1.5, height=0.7)
            colour = "white" if batch == 16 else "black"
            axes.text(start + batch / 2, row, f"{side} px", ha="center", va="center", fontsize=9, color=colour)
            start += batch
        if start < num_samples:
            axes.barh(row, num_samples - start, left=start, color="white", edgecolor=GREY, hatch="///", height=0.7)
            middle, told = (start + num_samples) / 2, f"{num_samples - start} never trained"
            axes.text(middle, row, told, ha="center", va="center", backgroundcolor="w")
    used = {batch for batches in epochs.values() for batch, _ in batches}
    for size, colour in BLOCKS.items():
        if size in used:
            axes.bar(0, 0, color=colour, label=f"batch of {size}")
    axes.set_title(title)
    axes.set(xlabel="samples of the epoch, in the order of training (px: pixels a side)")
    axes.set(xlim=(0, num_samples))
    axes.set_yticks(range(len(epochs)), list(epochs))
    axes.invert_yaxis()
    add_legend(axes, "beside")
    return figure


def figure_of_runs(long: Points, resized: Points, own: Sequence[float], stopped: int = 2) -> Figure:
    """Left: accuracy at 16 pixels against million pixels, of two runs. Right: the resized run at two sizes.

    Args:
        long: ``(million pixels, accuracy at 16 pixels)`` after each epoch at 16 pixels.
        resized: The same of the resized run.
        own: The resized run's accuracy at the size that it trains on, after each epoch.
        stopped: The number of epochs after which the rival stops.
    """
    figure, (left, right) = new_figure(11.0, 4.2, columns=2)
    drawn: dict[str, Curve] = {}
    for name, points in (("16 pixels throughout", long), ("8, then 12, then 16 pixels", resized)):
        drawn[name] = ([x for x, _ in points], [y for _, y in points])
    unit = "accuracy on test digits (share)"
    draw_curves(left, drawn, title="As many pixels, and a similar end", x="million pixels trained", y=unit)
    x, y = long[stopped - 1]
    left.plot([x], [y], "D", markersize=13, fillstyle="none", color=GREEN, label=f"stopped after {stopped} epochs")
    by_epoch = {"at the size it trains on": numbered(own), "at 16 pixels a side": numbered([y for _, y in resized])}
    title = "The resized run is poor at 16 pixels until it trains there"
    draw_curves(right, by_epoch, title=title, x="epoch of the resized run (number, from 1)", y=unit)
    for axes in (left, right):
        axes.set_ylim(0, 1.02)
        axes.legend(loc="lower right", frameon=False)
    return figure


def digit_net(width: int = 16, seed: int = 0) -> nn.Module:
    """Three convolutions, the first with ``width`` channels; for square images of any side from 4 on."""
    torch.manual_seed(seed)
    stages: list[nn.Module] = []
    channels = 1
    for out, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        stages += [nn.Conv2d(channels, out, 3, stride, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        channels = out
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10))


class AttentionNet(nn.Module):
    """Attention between all pixels of a square image; ``fused`` keeps no matrix of all pairs for the backward pass."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused = fused
        self.embed, self.parts, self.classify = nn.Conv2d(1, 16, 1), nn.Linear(16, 48), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.embed(images).flatten(2).transpose(1, 2)
        query, key, value = self.parts(pixels).unflatten(2, (3, 1, 16)).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            mixed = (query @ key.mT / 4).softmax(-1) @ value
        return self.classify(mixed.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


def bytes_saved(net: nn.Module, batch_size: int, side: int) -> int:
    """What a forward pass of square images keeps for the backward pass."""
    images = torch.ones(batch_size, 1, side, side)
    return saved_bytes(lambda: net(images), model=net)


@cache
def peak_bytes(side: int, batch_size: int) -> int:
    """The predicted peak of a training step of ``digit_net`` on a CPU."""

    def batch(samples: int) -> tuple[Tensor, Tensor]:
        return torch.ones(samples, 1, side, side), torch.zeros(samples, dtype=torch.long)

    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return predict_peak(digit_net, batch, optimizer, batch_size=batch_size, device="cpu").peak_bytes


def largest_batch(side: int, budget_bytes: int) -> int:
    """The largest power of two whose step stays within the budget; 0 where not even one image does."""
    one = peak_bytes(side, 1)
    if one > budget_bytes:
        return 0
    of_an_image = peak_bytes(side, 2) - one
    guess = 1 + (budget_bytes - one) // of_an_image
    batch_size = min(LARGEST_BATCH, 1 << (guess.bit_length() - 1))
    while peak_bytes(side, batch_size) > budget_bytes:  # a guess is checked before it is given
        batch_size //= 2
    return batch_size


class Budgeted(NamedTuple):
    """A run within a budget: what the widget draws."""

    schedule: SizeSchedule
    plan: SchedulePlan
    budget_bytes: int

    def peaks(self) -> list[int]:
        """Bytes at the peak of a step, in each stage."""
        return [peak_bytes(int(str(stage.size)), stage.batch_size) for stage in self.schedule.stages]


def budgeted(budget_mib: int, smallest: int, largest: int, epochs: int, hold: bool) -> Budgeted:
    """Three sizes for a third of the epochs each, in the largest batches that the budget holds.

    Raises:
        ValueError: The budget does not hold a step of one image of some size.
    """
    sides = sorted({smallest, max(smallest, (smallest + largest) // 2 // 8 * 8), largest})
    budget, stages = budget_mib * 2**20, []
    for number, side in enumerate(sides):
        batch_size = largest_batch(side, budget)
        if not batch_size:
            needed = peak_bytes(side, 1) / 2**20
            raise ValueError(
                f"{budget_mib} MiB cannot hold a step of one image of {side} pixels a side: it needs {needed:.1f} MiB"
            )
        stages.append((round(epochs * number / len(sides)), side, batch_size))
    largest_of_all = max(batch_size for _, _, batch_size in stages)
    schedule = SizeSchedule(stages, effective_batch_size=largest_of_all if hold else None)
    return Budgeted(schedule, schedule.plan(1437, max_epochs=epochs), budget)


def figure_of_budget(run: Budgeted) -> Figure:
    """Pixels a side, samples and peak bytes of a run against its optimizer steps."""
    figure, (size, samples, peak) = new_figure(11.0, 3.4, columns=3)
    plan, stages = run.plan, run.schedule.stages
    edges = [*(step for step, _ in plan.sizes), plan.total_steps]
    updates = [run.schedule.samples_per_step(stage) for stage in stages]
    batches = [stage.batch_size for stage in stages]
    _draw_steps(size, edges, [int(str(stage.size)) for stage in stages], BLUE, "-", "")
    _draw_steps(samples, edges, batches, VERMILION, "-", "of a batch")
    _draw_steps(samples, edges, updates, "black", "--", "of an update")
    peaks_mib = [peak / 2**20 for peak in run.peaks()]
    _draw_steps(peak, edges, peaks_mib, ORANGE, "-", "peak of a step")
    peak.axhline(run.budget_bytes / 2**20, color=GREY, linestyle=":", linewidth=2, label="budget")
    for axes, unit in ((size, "pixels a side"), (samples, "samples"), (peak, "memory (MiB)")):
        axes.set(xlabel="optimizer steps", ylabel=unit, xlim=(0, plan.total_steps))
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    for axes in (samples, peak):
        add_legend(axes)
    grown = " → ".join(str(batch) for batch in batches)
    figure.suptitle(f"Batches of {grown} samples keep every step within {run.budget_bytes // 2**20} MiB")
    return figure


def _draw_steps(axes: Any, edges: Sequence[int], values: Sequence[float], colour: str, line: str, label: str) -> None:
    axes.step(edges, [*values, values[-1]], where="post", color=colour, linestyle=line, linewidth=2, label=label)


def told(run: Budgeted) -> str:
    """The run in words, a line for each stage."""
    lines = []
    for stage, peak in zip(run.schedule.stages, run.peaks(), strict=True):
        update = run.schedule.samples_per_step(stage)
        lines.append(
            f"from epoch {stage.start}: side {stage.size}, batches of {stage.batch_size}, "
            f"{update // stage.batch_size} to an update of {update} samples; peak {peak / 2**20:.2f} MiB"
        )
    return "\n".join([*lines, f"{run.plan.total_steps:,} optimizer steps, {run.plan.micro_batches:,} batches"])


def _figure_of_refusal(reason: str) -> Figure:
    figure, axes = new_figure(11.0, 1.2)
    axes.set_axis_off()
    axes.set_title("No batch fits")
    axes.text(0.5, 0.4, reason, ha="center", va="center", transform=axes.transAxes)
    return figure


def budget_explorer() -> Explorer:
    """A budget of memory, sizes and epochs → batches, steps and peak bytes over the run."""

    def render(budget_mib: int, smallest: int, largest: int, epochs: int, hold: bool) -> tuple[Figure, str]:
        try:
            run = budgeted(budget_mib, smallest, largest, epochs, hold)
        except ValueError as refusal:
            return _figure_of_refusal(str(refusal)), str(refusal)
        return figure_of_budget(run), told(run)

    controls: dict[str, Any] = {
        "budget_mib": int_slider(5, 16, "budget (MiB)"),
        "smallest": ipywidgets.SelectionSlider(options=(8, 16, 24, 32), value=8, description="pixels a side, first"),
        "largest": ipywidgets.SelectionSlider(options=(32, 48, 64), value=32, description="pixels a side, last"),
        "epochs": int_slider(6, 12, "epochs", lowest=3),
        "hold": ipywidgets.Checkbox(value=False, description="equally many samples in every update"),
    }
    return Explorer(controls, render, title="a budget of memory and sizes → batches, optimizer steps and peaks")
