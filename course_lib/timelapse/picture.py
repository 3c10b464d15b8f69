"""The picture of a night: its rate, its epochs, its windows, its validations and its saves, from left to right."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from course_lib.timelapse.journal import Backward, Delivered, Forward, Journal, PassBegun, Saved, Step
from course_lib.timelapse.windows import windows_of

ORANGE, BLUE, GREEN, RED = "#E69F00", "#0072B2", "#009E73", "#D55E00"
"""Okabe and Ito's, told apart by everybody; each stands with a mark of its own."""


def draw_night(journal: Journal, file: str | os.PathLike[str], findings: Sequence[str] = ()) -> None:
    """Write a PNG.

    Args:
        journal: A script that was played.
        file: Where the picture is written to.
        findings: Sentences that are told under it. Where there are some, what was lost, left over or used twice is
            marked at its micro-batch.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the picture of the night needs matplotlib: pip install matplotlib, or leave the picture out"
        ) from error
    marks = marks_of(journal)
    figure: Any = Figure(figsize=(10, 5.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    rate, window, moments = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1.2))
    for number, optimizer in enumerate(journal.optimizers):
        at, rates = marks.rates.get(number, ([], []))
        rate.plot(at, rates, ".-", markersize=2, linewidth=1, drawstyle="steps-post", label=optimizer.name)
    rate.set_ylabel("learning rate")
    if len(journal.optimizers) > 1:
        rate.legend(loc="upper right")
    window.plot(*marks.windows, "x", color=BLUE, markersize=4)
    window.set_ylabel("micro-batches\nin a step")
    window.set_ylim(bottom=0)
    rows = {"epochs begin": (marks.epochs, "|", ORANGE), "validations": (marks.validations, "s", GREEN)}
    rows["saves"] = (marks.saves, "^", BLUE)
    for height, (at, shape, colour) in enumerate(rows.values()):
        moments.plot(at, [height] * len(at), shape, color=colour, markersize=7)
    moments.set_yticks(range(len(rows)), list(rows))
    moments.set_ylim(-0.6, len(rows) - 0.4)
    moments.set_xlabel("micro-batch")
    if findings and marks.wrong:
        window.plot(marks.wrong, [0] * len(marks.wrong), "X", color=RED, markersize=6, clip_on=False)
    for number, text in enumerate(findings):
        figure.text(0.01, -0.03 - 0.045 * number, f"✗ {text}", color=RED, fontsize=8, wrap=True, va="top")
    counts = journal.counts()
    title = f"{journal.micro_batches():,} micro-batches, {counts['optimizer steps']:,} optimizer steps"
    rate.set_title(f"{title}: " + ("nothing found" if not findings else f"{len(findings)} found"), loc="left")
    figure.savefig(file, dpi=110, bbox_inches="tight", format="png")


class Marks:
    """What is drawn: positions in micro-batches."""

    def __init__(self) -> None:
        self.rates: dict[int, tuple[list[int], list[float]]] = {}
        """Of each optimizer: where it stepped, and with which rate."""
        self.windows: tuple[list[int], list[int]] = ([], [])
        """Where a step was made, and of how many micro-batches."""
        self.epochs: list[int] = []
        self.validations: list[int] = []
        self.saves: list[int] = []
        self.wrong: list[int] = []
        """Micro-batches whose gradients no step used, and steps with gradients that were used before, or with none."""


def marks_of(journal: Journal) -> Marks:
    """The numbers behind the picture."""
    marks, training = Marks(), journal.training_loaders()
    position, evaluating = 0, True
    for event in journal.events:
        if isinstance(event, Delivered):
            position += event.loader in training
        elif isinstance(event, Backward):
            position += not training
        elif isinstance(event, PassBegun) and event.loader in training:
            marks.epochs.append(position)
        elif isinstance(event, Step) and event.rates:
            at, rates = marks.rates.setdefault(event.optimizer, ([], []))
            at.append(position)
            rates.append(event.rates[0])
        elif isinstance(event, Forward):
            if not (event.training or evaluating):
                marks.validations.append(position)
            evaluating = not event.training
        elif isinstance(event, Saved):
            marks.saves.append(position)
    for of in windows_of(journal):
        marks.windows[0].extend(window.micro_batch for window in of.windows)
        marks.windows[1].extend(len(window.passes) for window in of.windows)
        marks.wrong += [one.micro_batch for one in (*of.lost, *of.left_over)]
        marks.wrong += [window.micro_batch for window in of.windows if window.stale or window.cleared]
    return marks
