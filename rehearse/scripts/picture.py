"""The picture of a night: its rate, its epochs, its windows, its validations and its saves, from left to right."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import Any

from rehearse.scripts.events import Backward, Delivered, Forward, PassBegun, Saved, Step
from rehearse.scripts.journal import Journal
from rehearse.scripts.windows import windows_of

ORANGE, BLUE, GREEN, RED = "#E69F00", "#0072B2", "#009E73", "#D55E00"
"""Okabe and Ito's, told apart by everybody; each stands with a mark of its own."""


def draw_night(journal: Journal, file: str | os.PathLike[str], findings: Sequence[tuple[str, int | None]] = ()) -> None:
    """Write a PNG.

    Args:
        journal: A script that was rehearsed.
        file: Where the picture is written to.
        findings: Sentences that are told under it, each with the micro-batch that is marked with its number. Where
            there are some, what was lost, left over or used twice is marked as well.

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
    rate.set_ylim(0, 1.05 * rate.get_ylim()[1])
    if len(journal.optimizers) > 1:
        rate.legend(loc="upper right")
    window.plot(*marks.windows, "x", color=BLUE, markersize=4)
    window.set_ylabel("micro-batches\nin a step")
    window.set_ylim(0, 1.15 * max(marks.windows[1], default=1))
    rows = {"epochs begin": (marks.epochs, "|", ORANGE), "validations": (marks.validations, "s", GREEN)}
    rows["saves"] = (marks.saves, "^", BLUE)
    for height, (at, shape, colour) in enumerate(rows.values()):
        moments.plot(at, [height] * len(at), shape, color=colour, markersize=7)
    moments.set_yticks(range(len(rows)), list(rows))
    moments.set_ylim(-0.6, len(rows) - 0.4)
    moments.set_xlabel("micro-batch")
    if findings and marks.wrong:
        window.plot(marks.wrong, [0] * len(marks.wrong), "X", color=RED, markersize=6, clip_on=False)
    told = []
    for number, (text, shows_at) in enumerate(findings, 1):
        told.append(textwrap.fill(f"{number}  {text}", 130, subsequent_indent="    "))
        if shows_at is not None:
            for axis in (rate, window, moments):
                axis.axvline(shows_at, color=RED, linestyle=":", linewidth=1)
            style = {"boxstyle": "circle", "facecolor": "white", "edgecolor": RED}
            up = 0.15 + 0.22 * ((number - 1) % 3)  # findings that stand close to each other do not overlap
            across = {"transform": window.get_xaxis_transform(), "ha": "center"}
            window.text(shows_at, up, str(number), color=RED, size=8, bbox=style, **across)
    figure.text(0.01, -0.02, "\n".join(told), color=RED, fontsize=8, va="top")
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
    marks, trained = Marks(), journal.trained()
    position, evaluating = 0, True
    for place, event in enumerate(journal.events):
        if isinstance(event, Delivered):
            position += place in trained
        elif isinstance(event, Backward):
            position += not trained
        elif isinstance(event, PassBegun) and place in trained:
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
