"""What chapter 00 shows: how samples, micro-batches, windows and updates fit together; and one exercise."""

from __future__ import annotations

from matplotlib.figure import Figure

from workbook.display import SKY, VERMILION, YELLOW, new_figure
from workbook.exercises import Exercise
from workbook.widgets import Explorer, int_slider

UNITS = ("sample", "micro-batch", "window", "update")
"""From the smallest to the largest; an update has a window, and comes at its end."""


def count_units(batch_size: int, k: int, windows: int) -> dict[str, int]:
    """How many of each unit there are in full windows of ``k`` micro-batches of ``batch_size`` samples."""
    return dict(zip(UNITS, (batch_size * k * windows, k * windows, windows, windows), strict=True))


def named(count: int, unit: str) -> str:
    """``1 sample``, ``2 micro-batches``."""
    plural = "es" if unit.endswith("ch") else "s"
    return f"{count} {unit}{'' if count == 1 else plural}"


def figure_of_units(batch_size: int, k: int, windows: int) -> Figure:
    """A row for each unit over the samples in the order of training; the colour changes with the window."""
    counts = count_units(batch_size, k, windows)
    samples = counts["sample"]
    figure, axes = new_figure(9.0, 2.9)
    for row, (unit, count) in enumerate(counts.items()):
        width = samples // count
        for number in range(count):
            begin = number * width
            middle, end = begin + width / 2, begin + width
            if unit == "update":
                axes.plot(end, row, marker="^", markersize=11, color=VERMILION, clip_on=False)
                continue
            window = begin // (batch_size * k)
            colour = (SKY, YELLOW)[window % 2]
            axes.barh(row, width, 0.7, left=begin, color=colour, edgecolor="black", linewidth=0.8, clip_on=False)
            if samples <= 40 or unit != "sample":
                axes.text(middle, row, str(number), ha="center", va="center", fontsize=8)
    axes.set_xticks(range(0, samples + 1, batch_size * k))
    axes.set_yticks(range(len(counts)), [named(count, unit) for unit, count in counts.items()])
    axes.set(xlim=(0, samples), ylim=(3.6, -0.6), ylabel="unit", xlabel="samples read so far")
    made = f"{named(counts['micro-batch'], 'micro-batch')} and {named(windows, 'update')}"
    axes.set_title(f"{named(samples, 'sample')}: {made}")
    return figure


def text_of_units(batch_size: int, k: int, windows: int) -> str:
    """The numbers behind the figure, in a sentence for each unit that is made of others."""
    counts = count_units(batch_size, k, windows)
    return (
        f"{named(windows, 'window')} of {named(k, 'micro-batch')}: {named(counts['micro-batch'], 'micro-batch')}\n"
        f"{named(counts['micro-batch'], 'micro-batch')} of {named(batch_size, 'sample')}: "
        f"{named(counts['sample'], 'sample')}\n"
        f"one update at the end of each window: {named(counts['update'], 'update')}"
    )


def units_explorer(batch_size: int = 2, k: int = 3, windows: int = 4) -> Explorer:
    """A widget: the units for other sizes, all windows full."""
    controls = {
        "batch_size": int_slider(batch_size, 4, "samples in a micro-batch"),
        "k": int_slider(k, 4, "micro-batches in a window"),
        "windows": int_slider(windows, 5, "windows"),
    }

    def render(batch_size: int, k: int, windows: int) -> tuple[Figure, str]:
        return figure_of_units(batch_size, k, windows), text_of_units(batch_size, k, windows)

    return Explorer(controls, render, title="samples, micro-batches, windows and updates")


first_answer = Exercise(
    "the first answer",
    solution=40,
    misconceptions={
        "{got} is the number of optimizer steps, and so of windows. How many micro-batches does each window have?": 10,
        "{got} divides by the size of a window. There are more micro-batches than steps, because each step takes "
        "several.": 2.5,
        "{got} is 10 / 4 rounded down. There are more micro-batches than steps, because each step takes several.": 2,
        "{got} is 10 / 4 rounded up. There are more micro-batches than steps, because each step takes several.": 3,
        "{got} is the sum of steps and window size. Each of the steps has a whole window.": 14,
        "{got} leaves out one window: the first step needs a full window too.": 36,
        "{got} has one window too many: after the last step there is nothing left to accumulate.": 44,
    },
)

EXERCISES = (first_answer,)
