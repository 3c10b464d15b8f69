"""What chapter 06 shows: which index is in which batch, how one order is dealt to the ranks, and a widget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from workbook.ch06_exercises import EXERCISES as EXERCISES
from workbook.ch06_exercises import one_order_for_all_ranks as one_order_for_all_ranks
from workbook.ch06_exercises import repair_a_sampler as repair_a_sampler
from workbook.ch06_exercises import shard_by_hand as shard_by_hand
from workbook.ch06_two_ranks import stream_of
from workbook.display import GREEN, ORANGE, PURPLE, SKY, VERMILION, add_legend_below, new_figure
from workbook.widgets import Explorer, int_slider

COLOURS = (SKY, ORANGE, GREEN, PURPLE)
"""Of the ranks."""
STREAMS = {"primary": SKY, "secondary": ORANGE, "neither": VERMILION}

OTHER_VERSIONS = {
    "1.9.5": "AttributeError: 'TwoStreams' object has no attribute 'batch_size'",
    "2.0.9": "AttributeError: 'TwoStreams' object has no attribute 'batch_size'",
    "2.2.5": "TypeError: Lightning can't inject a (distributed) sampler …",
    "2.4.0": "TypeError: Lightning can't inject a (distributed) sampler …",
    "2.5.5": "TypeError: Lightning can't inject a (distributed) sampler …",
}
"""What the four variants do under other versions of Lightning, recorded with torch 2.13 on a CPU, in November 2026.

The first one's error. In each version the second raises `TypeError: WithAttributes() takes no arguments`, the third
`TypeError: Trying to inject a modified sampler …`, and the fourth runs: no batch of 28 is as asked, 80 indices are of
neither stream.
"""


def figure_of_batches(panels: Mapping[str, Sequence[Sequence[int]]], *, title: str, most: int = 8) -> Figure:
    """The first batches of each rank, a row for each batch and a square for each index, coloured by its stream."""
    shown = {title: list(batches)[:most] for title, batches in panels.items()}
    height = 1.8 + 0.3 * max(len(batches) for batches in shown.values())
    figure, axes = new_figure(3.1 * len(shown), height, columns=len(shown))
    for ax, (whose, batches) in zip(np.atleast_1d(axes), shown.items(), strict=True):
        for row, batch in enumerate(batches):
            for place, index in enumerate(batch):
                colour = STREAMS[stream_of(index)]
                ax.add_patch(Rectangle((place - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
                ax.text(place, row, str(index), ha="center", va="center", fontsize=9)
        ax.set(xlim=(-0.5, 3.5), ylim=(len(batches) - 0.5, -0.5), title=whose, xlabel="place in the batch (samples)")
        ax.set_xticks(range(4))
        ax.set_yticks(range(len(batches)))
    np.atleast_1d(axes)[0].set_ylabel("batch (micro-batches)")
    figure.suptitle(title)
    labels = {"primary": "primary, 0–19", "secondary": "secondary, 100–107", "neither": "of neither, 20–99"}
    used = {stream_of(index) for batches in shown.values() for batch in batches for index in batch}
    handles = [Patch(color=colour, label=labels[name]) for name, colour in STREAMS.items() if name in used]
    add_legend_below(figure, handles)
    return figure


class Part(NamedTuple):
    """What one rank gets in one step: some neighbours in the order."""

    begin: int
    end: int
    rank: int
    step: int


def dealt(begin: int, end: int, batch_size: int, ranks: int) -> list[Part]:
    """How the positions from begin to end are dealt, as the sampler of the chapter's ladder does."""
    left = end - begin
    steps = -(-left // (batch_size * ranks))
    if steps * ranks > left:
        raise ValueError(f"{left} samples would leave one of {ranks} ranks with an empty batch")
    parts = []
    for number, positions in enumerate(np.array_split(np.arange(begin, end), steps * ranks)):
        step, rank = divmod(number, ranks)
        parts.append(Part(int(positions[0]), int(positions[-1]) + 1, rank, step))
    return parts


def dealt_and_resumed(samples: int, batch_size: int, ranks: int, stop: int, ranks_after: int) -> list[list[Part]]:
    """The whole epoch on some ranks; and the same epoch, stopped after some steps and gone on with on others."""
    whole = dealt(0, samples, batch_size, ranks)
    before = [part for part in whole if part.step < stop]
    position = before[-1].end if before else 0
    if position == samples:
        return [whole, whole]
    after = [part._replace(step=part.step + stop) for part in dealt(position, samples, batch_size, ranks_after)]
    return [whole, [*before, *after]]


def figure_of_dealing(
    samples: int = 10, batch_size: int = 2, ranks: int = 2, epoch: int = 0, stop: int = 1, ranks_after: int = 3
) -> Figure:
    """One order in two rows: dealt to some ranks, and stopped after some steps and dealt to others from there."""
    rows = dealt_and_resumed(samples, batch_size, ranks, stop, ranks_after)
    order = order_of(samples, epoch)
    figure, axes = new_figure(9.0, 3.1)
    for row, parts in enumerate(rows):
        _draw_parts(axes, row, parts, order)
    position = next((part.end for part in reversed(rows[0]) if part.step < stop), 0)
    axes.plot([position - 0.5] * 2, [0.55, 1.45], color="black", linewidth=3)
    axes.text(position - 0.5, 1.5, f"state: epoch {epoch}, position {position}", ha="center", va="top", fontsize=9)
    axes.set(
        xlim=(-0.6, samples - 0.4), ylim=(1.8, -0.6), xlabel="position in the epoch's order (samples)",
        ylabel="run", title="One order: each rank takes its slice of every step, and the position is the state",
    )  # fmt: skip
    axes.set_xticks(range(samples))
    axes.set_yticks([0, 1], [f"{ranks} ranks", f"stopped after step {stop},\nthen {ranks_after} ranks"])
    shown = sorted({part.rank for parts in rows for part in parts})
    add_legend_below(figure, [Patch(color=COLOURS[rank], label=f"rank {rank}") for rank in shown])
    return figure


def order_of(samples: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([0, epoch]).permutation(samples)


def _draw_parts(axes: Axes, row: int, parts: Sequence[Part], order: NDArray[np.int64]) -> None:
    for part in parts:
        for position in range(part.begin, part.end):
            corner = (position - 0.5, row - 0.35)
            axes.add_patch(Rectangle(corner, 1, 0.7, facecolor=COLOURS[part.rank], edgecolor="white"))
            axes.text(position, row - 0.08, str(order[position]), ha="center", va="center", fontsize=10)
            axes.text(position, row + 0.2, f"r{part.rank}", ha="center", va="center", fontsize=7)
        if part.rank == 0:
            axes.text(part.begin - 0.45, row - 0.38, f"step {part.step + 1}", ha="left", va="bottom", fontsize=8)
            axes.plot([part.begin - 0.5] * 2, [row - 0.5, row + 0.35], color="black", linewidth=1)


def dealing_explorer() -> Explorer:
    """Samples, batch size, ranks, and where to stop → who gets which index."""

    def render(
        samples: int, batch_size: int, ranks: int, epoch: int, stop: int, ranks_after: int
    ) -> tuple[Figure, str]:
        order = order_of(samples, epoch)
        _, parts = dealt_and_resumed(samples, batch_size, ranks, stop, ranks_after)
        lines = []
        for rank in range(max(ranks, ranks_after)):
            batches = [order[part.begin : part.end].tolist() for part in parts if part.rank == rank]
            lines.append(f"rank {rank}: " + " ".join(str(batch) for batch in batches))
        sizes = sorted({part.end - part.begin for part in parts})
        steps = max(part.step for part in parts) + 1
        lines.append(f"{steps} steps, batches of {' or '.join(str(size) for size in sizes)}")
        return figure_of_dealing(samples, batch_size, ranks, epoch, stop, ranks_after), "\n".join(lines)

    controls = {
        "samples": int_slider(10, 24, "samples", lowest=4),
        "batch_size": int_slider(2, 5, "largest batch"),
        "ranks": int_slider(2, 4, "ranks"),
        "epoch": int_slider(0, 5, "epoch", lowest=0),
        "stop": int_slider(1, 5, "stop after step", lowest=0),
        "ranks_after": int_slider(3, 4, "ranks afterwards"),
    }
    return Explorer(controls, render, title="samples, largest batch, ranks, where to stop → who gets which index")
