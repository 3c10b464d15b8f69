"""What chapter 10 shows: a run that is trained and watched, what trials of it see, and what others find in faults."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ipywidgets
import torch
from lightning.pytorch import Callback
from matplotlib import image
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, RandomSampler

from course_lib.datasets import data_path
from rehearse import RehearsalReport
from workbook.ch10_exercises import EXERCISES, masked_labels, stops_early, two_ranks
from workbook.ch10_runs import mended, night, parts
from workbook.display import BLUE, GREY, ORANGE, VERMILION, new_figure
from workbook.trainers import quiet_trainer
from workbook.widgets import Explorer

__all__ = ["EXERCISES", "masked_labels", "stops_early", "two_ranks"]

ON_SPEED_OR_DEVICE = re.compile("does not have many workers|log_every_n_steps|to speed up|GPU available")


# ---------------------------------------------------------------------------------------------- what a real fit does


class Seen(NamedTuple):
    """A run as it was trained."""

    losses: list[float]
    """Of each micro-batch."""
    rates: list[float]
    """Of each optimizer step."""
    orders: list[tuple[int, ...]]
    """The labels of each epoch, in the order in which they came."""
    moved: dict[str, int]
    """Of each parameter: how many of its numbers are others than before."""
    warnings: list[str]


class Watch(Callback):
    """Writes down what a fit does."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.orders: list[list[int]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.orders.append([])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.orders[-1] += batch[1].tolist()
        self.losses.append(outputs["loss"].item())


def train(trainer: Any, model: Any, data: Any) -> Seen:
    """Fit, and say what happened; warnings on speed and on the device are left out."""
    watch = Watch()
    trainer.callbacks.append(watch)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, data)
    moved = {name: int((parameter != before[name]).sum()) for name, parameter in model.named_parameters()}
    return Seen(watch.losses, watch.rates, [tuple(order) for order in watch.orders], moved, list(_heard(caught)))


def _heard(caught: Iterable[warnings.WarningMessage]) -> Iterable[str]:
    for warning in caught:
        if issubclass(warning.category, UserWarning) and not ON_SPEED_OR_DEVICE.search(str(warning.message)):
            yield str(warning.message)


def print_report(report: RehearsalReport) -> None:
    """Print a report without the seconds that it took and the folder of its output, which are this machine's."""
    notes = tuple(note for note in report.notes if "is kept in" not in note)
    print(str(replace(report, seconds=0.0, notes=notes)).replace(" (0.0 s)", "", 1))


def figure_of_file(path: Path) -> Figure:
    """A picture that was written to a file."""
    picture = image.imread(path)
    figure, axes = new_figure(10.0, 10.0 * picture.shape[0] / picture.shape[1])
    axes.imshow(picture)
    axes.set_axis_off()
    return figure


# ------------------------------------------------------------------------------------------------ what may be meant


class _Frozen(parts.Line):
    """A layer that is not trained, below one that is."""

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self.first = torch.nn.Linear(4, 4).requires_grad_(False)

    def loss(self, batch: Any) -> Any:
        x, y, index = batch
        return super().loss((self.first(x), y, index))


def runs_of_choice() -> dict[str, Any]:
    """By what may be meant: a right run of two epochs that has it."""

    def run(model: Any, samples: int = 40, **options: Any) -> Any:
        trainer = quiet_trainer(max_epochs=2, accelerator="cpu")
        return trainer, model, DataLoader(parts.Points(samples), 8, **(options or {"shuffle": True}))

    with_replacement = RandomSampler(range(43), replacement=True)
    return {
        "frozen layer, drop_last, replacement": run(_Frozen(10), 43, sampler=with_replacement, drop_last=True),
        "constant rate": run(parts.Line()),
    }


# ----------------------------------------------------------------------------------------------- what trials see


class Tried(NamedTuple):
    """What a run would do, without training it."""

    rates: list[float]
    """Of each optimizer step."""
    orders: list[list[int]]
    """Of each epoch."""
    held: dict[str, tuple[int, bool]]
    """By parameter: how many numbers it has, and whether the optimizer holds it."""


def try_by_hand(model: Any, sampler: Any, steps: int, epochs: int) -> Tried:
    """Step the schedule of a model, draw the orders of a sampler, and look which parameters the optimizer holds."""
    [optimizer], [config] = model.configure_optimizers()
    rates = []
    for _ in range(steps):
        rates.append(config["scheduler"].get_last_lr()[0])
        optimizer.step()
        config["scheduler"].step()
    orders = []
    for epoch in range(epochs):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return Tried(rates, orders, {name: (p.numel(), id(p) in held) for name, p in model.named_parameters()})


def figure_of_trials(tried: Tried, title: str, shown: int = 16) -> Figure:
    """Where the rate ends, the first samples of each epoch, and which parameters are trained."""
    figure, (rate, order, parameters) = new_figure(12.0, 3.4, columns=3)
    figure.suptitle(title)
    peak = max(tried.rates)
    shares = [100 * rate / peak for rate in tried.rates]
    rate.plot(range(1, len(shares) + 1), shares, color=BLUE)
    rate.plot([len(shares)], shares[-1:], "o", color=VERMILION)
    rate.annotate(f"{shares[-1]:.0f} %", (len(shares), shares[-1]), (-6, 8), textcoords="offset points", ha="right")
    rate.set(title="the rate of each optimizer step", xlabel="optimizer steps (number, from 1)", ylabel="% of its peak")
    rate.set(ylim=(0, 115))
    order.imshow([epoch[:shown] for epoch in tried.orders], cmap="cividis", aspect="auto")
    order.set(title=f"the first {shown} samples of each epoch", ylabel="epochs (number, from 0)")
    order.set(xlabel="place in the epoch (from 0); colour: index of the sample")
    order.set_xticks(range(0, shown, 5))
    order.set_yticks(range(len(tried.orders)))
    for row in range(1, len(tried.orders)):
        order.axhline(row - 0.5, color="white", linewidth=1.5)
    labels = [f"{name}\n{numbers:,} numbers" for name, (numbers, _) in tried.held.items()]
    for row, (_, is_held) in enumerate(tried.held.values()):
        parameters.barh(row, 100 if is_held else 0, color=BLUE)
        if not is_held:
            parameters.text(2, row, "no optimizer holds it", va="center", color=VERMILION)
    parameters.set_yticks(range(len(labels)), labels)
    parameters.set(title="what the optimizer holds", xlabel="% of the numbers of a parameter", xlim=(0, 105))
    parameters.invert_yaxis()
    return figure


HORIZONS = {
    f"{night.EPOCHS * night.SAMPLES // night.BATCH} (micro-batches)": night.EPOCHS * night.SAMPLES // night.BATCH,
    "48 (optimizer steps)": 48,
    "6 (epochs)": night.EPOCHS,
}
GROUPS = {"ndim == 2": night.Digits.parameter_groups, "ndim > 1": mended.Digits.parameter_groups}
SAMPLERS = {"one seed": night.Shuffled, "(seed, epoch)": mended.ShuffledByEpoch}


def trial_explorer() -> Explorer:
    """The three choices in which the run goes wrong → what the trials by hand see."""

    def render(horizon: str, weights: str, order: str) -> tuple[Figure, str]:
        tried = tried_with(horizon, weights, order)
        return figure_of_trials(tried, "What the run would do, without training it"), told(tried)

    controls: dict[str, Any] = {
        "horizon": ipywidgets.Dropdown(options=list(HORIZONS), description="the cosine's horizon"),
        "weights": ipywidgets.Dropdown(options=list(GROUPS), description="a weight has"),
        "order": ipywidgets.Dropdown(options=list(SAMPLERS), description="the order depends on"),
    }
    return Explorer(controls, render, title="horizon, groups and order → what the run would do")


def tried_with(horizon: str, weights: str, order: str) -> Tried:
    """The trials of the run with one choice of each kind."""

    class Chosen(night.Digits):
        parameter_groups = GROUPS[weights]

        def horizon(self) -> int:
            return HORIZONS[horizon]

    steps = night.EPOCHS * night.SAMPLES // (night.BATCH * night.WINDOW)
    return try_by_hand(Chosen(), SAMPLERS[order](), steps, night.EPOCHS)


def told(tried: Tried) -> str:
    """Trials in words."""
    last = 100 * tried.rates[-1] / max(tried.rates)
    orders = len(set(map(tuple, tried.orders)))
    loose = [name for name, (_, is_held) in tried.held.items() if not is_held]
    return "\n".join(
        [
            f"the last step has {last:.1f} % of the peak rate",
            f"different orders in {len(tried.orders)} epochs: {orders}",
            f"parameters that no optimizer holds: {', '.join(loose) or 'none'}",
        ]
    )


# ------------------------------------------------------------------------------------------- what others find

TOOLS = ("torchtest2", "torch-audit", "trainproof", "Lightning", "fast_dev_run", "rehearse")


CHECKS_SHOWN = (
    "length", "horizon", "dealing", "order", "resume", "workers", "window", "no_sync", "bad_step", "growth",
    "changes", "setup",
)  # fmt: skip


class Planted(NamedTuple):
    """One planted fault, and which tools found it; None where a tool could not be asked."""

    fault: str
    check: str
    found: Mapping[str, bool | None]


def read_planted() -> tuple[dict[str, str], list[Planted]]:
    """What was recorded in ``data/rehearse_peers.csv``: when and with what, and a row for each planted fault."""
    answers = {"yes": True, "no": False, "": None}
    lines = data_path("rehearse_peers.csv").read_text(encoding="utf-8").splitlines()
    about = dict(line.removeprefix("# ").split(": ", 1) for line in lines if line.startswith("#"))
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    planted = [Planted(row["fault"], row["check"], {tool: answers[row[tool]] for tool in TOOLS}) for row in rows]
    return about, sorted(planted, key=lambda fault: (CHECKS_SHOWN.index(fault.check), fault.fault))


def by_check(planted: Sequence[Planted]) -> list[list[object]]:
    """A row for each check: its name, the number of its faults, and how many of them each tool found."""
    rows: list[list[object]] = []
    for check in dict.fromkeys(fault.check for fault in planted):
        own = [fault for fault in planted if fault.check == check]
        rows.append([check, len(own), *(sum(fault.found[tool] is True for fault in own) for tool in TOOLS)])
    total = [sum(row[column] for row in rows) for column in range(1, len(TOOLS) + 2)]  # type: ignore[misc]
    return [*rows, ["all", *total]]


def figure_of_planted(planted: Sequence[Planted], title: str) -> Figure:
    """A column for each fault, a row for each tool: what was found."""
    figure, axes = new_figure(12.0, 3.0)
    for column, fault in enumerate(planted):
        for row, tool in enumerate(TOOLS):
            colour = {True: BLUE, False: "white", None: GREY}[fault.found[tool]]
            axes.barh(row, 1, left=column, height=0.8, color=colour, edgecolor="#bbbbbb", linewidth=0.6)
    checks = [fault.check for fault in planted]
    starts = [column for column, check in enumerate(checks) if column == 0 or check != checks[column - 1]]
    ends = [*starts[1:], len(checks)]
    for start in starts[1:]:
        axes.axvline(start, color=ORANGE, linewidth=1)
    axes.set_xticks([(a + b) / 2 for a, b in zip(starts, ends, strict=True)], [checks[start] for start in starts])
    axes.tick_params(axis="x", rotation=40, length=0)
    axes.set_yticks(range(len(TOOLS)), TOOLS)
    axes.set(
        title=title, xlabel="planted faults, by the check that is to find them", ylabel="tool", xlim=(0, len(checks))
    )
    axes.invert_yaxis()
    return figure


def differing(model: torch.nn.Module, other: torch.nn.Module) -> int:
    """How many numbers of two models' parameters and buffers differ."""
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return sum(int((one != two).sum()) for one, two in pairs)
