"""What chapter 09 shows: the lives of a run as rows of micro-batches, and a widget that kills a run anywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.schedules import SizeSchedule
from workbook import ch09_training_script as script
from workbook.ch09_exercises import EXERCISES, faults, steps_after_resume, updates_made
from workbook.ch09_lives import MicroBatch, applied, missing_and_twice, simulate
from workbook.display import BLUE, GREEN, ORANGE, SKY, VERMILION, add_legend_below, new_figure
from workbook.widgets import Explorer, int_slider

__all__ = ["EXERCISES", "faults", "steps_after_resume", "updates_made"]

COLOURS = {8: SKY, 12: BLUE, 16: ORANGE}
"""By pixels a side."""
SIZES = {8: "8 pixels a side", 12: "12 pixels", 16: "16 pixels"}


class Block(NamedTuple):
    """A micro-batch in the figure."""

    row: int
    x: float
    """Of its left edge: windows, and parts of the window that is filled."""
    side: int
    kind: str
    """``"applied"``, ``"undone"`` (a kill took the window back) or ``"skipped"``."""


def blocks(diary: Sequence[MicroBatch], bad_sample: int | None, k: int = script.WINDOW) -> list[Block]:
    """A row for each rank of each life; a window that has the bad sample was skipped, if it was not undone."""
    kept = {id(micro_batch) for micro_batch in applied(diary)}
    bad = {(m.life, m.window) for m in diary if bad_sample in m.samples}
    rows = {row: number for number, row in enumerate(sorted({(m.life, m.rank) for m in diary}))}
    filled: dict[tuple[int, int, int], int] = {}
    found = []
    for micro_batch in diary:
        place = (micro_batch.life, micro_batch.rank, micro_batch.window)
        number = filled[place] = filled.get(place, -1) + 1
        if id(micro_batch) not in kept:
            kind = "undone"
        elif (micro_batch.life, micro_batch.window) in bad:
            kind = "skipped"
        else:
            kind = "applied"
        found.append(Block(rows[place[:2]], micro_batch.window + number / k, micro_batch.side, kind))
    return found


def figure_of_lives(
    diary: Sequence[MicroBatch], title: str, *, bad_sample: int | None = None, k: int = script.WINDOW
) -> Figure:
    """Ranks, sizes, windows, kills, resumes and skips of a run, life by life."""
    names = sorted({(m.life, m.rank) for m in diary})
    figure, axes = new_figure(11.0, 1.6 + 0.42 * len(names))
    found = blocks(diary, bad_sample, k)
    for block in found:
        look: dict[str, Any] = {"color": COLOURS[block.side], "edgecolor": "white"}
        if block.kind == "undone":
            look = {"color": "white", "edgecolor": COLOURS[block.side], "hatch": "///"}
        elif block.kind == "skipped":
            look = {"color": VERMILION, "edgecolor": "white"}
        axes.barh(block.row, 1 / k, left=block.x, height=0.74, align="center", linewidth=0.8, **look)
    lives = sorted({life for life, _ in names})
    for life in lives[:-1]:
        rows = [number for number, name in enumerate(names) if name[0] == life]
        end = max(block.x for block in found if block.row in rows) + 1 / k
        start = min(block.x for block in found if block.row == rows[-1] + 1)
        axes.plot([end + 0.12] * len(rows), rows, "X", color="black", markersize=9)
        axes.annotate(
            "", (start, rows[-1] + 0.62), (end + 0.12, rows[-1] + 0.3),
            arrowprops={"arrowstyle": "->", "linestyle": "--", "color": GREEN, "linewidth": 1.6},
        )  # fmt: skip
    last = max(micro_batch.window for micro_batch in diary) + 1
    axes.set(
        title=title, xlabel="windows, each one attempt of an optimizer step (number, from 0)", xlim=(0, last + 0.4)
    )
    axes.set_xticks(range(last + 1))
    axes.grid(axis="x", color="#dddddd", zorder=0)
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(names)), [f"life {life}, rank {rank}" for life, rank in names])
    axes.invert_yaxis()
    add_legend_below(figure, _legend(found, len(lives)))
    return figure


def figure_of_clean_points(k: int = script.WINDOW) -> Figure:
    """Two windows, a validation and an epoch's end: where clean points lie, and which one a checkpoint holds."""
    figure, axes = new_figure(11.0, 2.6)
    for micro_batch in range(2 * k):
        axes.barh(0, 0.94, left=micro_batch, height=0.6, align="center", color=SKY)
        axes.text(micro_batch + 0.47, 0, f"{micro_batch + 1}", ha="center", va="center")
    for left, width, name in ((2 * k + 0.2, 1.5, "validation"), (2 * k + 1.9, 1.5, "epoch's end")):
        axes.barh(0, width, left=left, height=0.6, align="center", color="#dddddd")
        axes.text(left + width / 2, 0, name, ha="center", va="center")
    points = [0, k, 2 * k, 2 * k + 1.8, 2 * k + 3.5]
    axes.plot(points, [0.55] * len(points), "v", color=GREEN, markersize=11, label="clean point")
    for asked, held in ((k - 1.5, 0.0), (2 * k - 1.5, k), (2 * k + 1.0, 2 * k)):
        axes.plot(asked, -0.55, "X", color="black", markersize=9, label="checkpoint asked for" if not held else None)
        look = {"arrowstyle": "->", "linestyle": "--", "color": VERMILION, "linewidth": 1.6}
        axes.annotate("", (held, -0.42), (asked, -0.55), arrowprops=look)
    axes.plot([], [], "--", color=VERMILION, label="what it holds, and what is done again")
    axes.set(title="A checkpoint holds the last clean point", xlim=(-0.3, points[-1] + 0.3), ylim=(-0.95, 0.95))
    axes.set_axis_off()
    add_legend_below(figure, axes.get_legend_handles_labels()[0])
    return figure


def _legend(found: Sequence[Block], lives: int) -> list[Any]:
    handles: list[Any] = [
        Patch(color=COLOURS[side], label=SIZES[side]) for side in sorted({block.side for block in found})
    ]
    kinds = {block.kind for block in found}
    if "skipped" in kinds:
        handles.append(Patch(color=VERMILION, label="skipped on all ranks"))
    if "undone" in kinds:
        handles.append(Patch(facecolor="white", edgecolor="black", hatch="///", label="undone by a kill"))
    if lives > 1:
        handles += new_figure()[1].plot([], [], "X", color="black", label="killed")
        handles += new_figure()[1].plot([], [], "--", color=GREEN, label="resumed")
    return handles


def simulated(kills: Sequence[int | None], ranks: Sequence[int]) -> list[MicroBatch]:
    """The diary of the training script's run with these kills, without training it."""
    schedule = SizeSchedule.from_batch_sizes(script.SIDES, script.BATCH_SIZES, accumulate_grad_batches=script.WINDOW)
    return simulate(
        kills,
        ranks,
        schedule,
        num_samples=script.NUM_SAMPLES,
        epochs=script.EPOCHS,
        save_every=script.SAVE_EVERY,
        bad_sample=script.BAD_SAMPLE,
        seed=1,
    )


def told(diary: Sequence[MicroBatch]) -> str:
    """A run in words: its lives, and what came of the samples."""
    lines = []
    for life in sorted({micro_batch.life for micro_batch in diary}):
        own = [micro_batch for micro_batch in diary if micro_batch.life == life]
        ranks = max(micro_batch.rank for micro_batch in own) + 1
        windows = sorted({micro_batch.window for micro_batch in own})
        micro_batches = len(own) // ranks
        lines.append(
            f"life {life}: {ranks} rank{'s' * (ranks > 1)}, {micro_batches} micro-batches each, "
            f"windows {windows[0]} to {windows[-1]}"
        )
    kept = applied(diary)
    for epoch, (missing, twice) in enumerate(missing_and_twice(kept, script.NUM_SAMPLES, script.EPOCHS)):
        lines.append(f"epoch {epoch}: missing {missing}, twice {twice}")
    undone = len(diary) - len(kept)
    return "\n".join([*lines, f"micro-batches trained in vain, over all ranks: {undone}"])


def kill_explorer() -> Explorer:
    """Two kills, and the ranks of three lives → the lives of the run, and what came of every sample."""

    def render(first_kill: int, second_kill: int, ranks: int, ranks_later: int) -> tuple[Figure, str]:
        diary = simulated([first_kill, second_kill, None], [ranks, ranks_later, ranks_later])
        figure = figure_of_lives(
            diary, "What a kill undoes is trained again, wherever the kills are", bad_sample=script.BAD_SAMPLE
        )
        return figure, told(diary)

    controls: dict[str, Any] = {
        "first_kill": int_slider(13, 30, "first kill, after micro-batches"),
        "second_kill": int_slider(14, 25, "second kill, after micro-batches of its life"),
        "ranks": int_slider(2, 3, "ranks at first"),
        "ranks_later": int_slider(2, 3, "ranks after the first kill"),
    }
    return Explorer(controls, render, title="two kills and the ranks of each life → the timeline of the run")


def lines_of_code(*functions: Callable[..., Any]) -> int:
    """The lines of functions that are neither empty nor documentation."""
    count = 0
    for function in functions:
        text = inspect.getsource(function)
        if function.__doc__:
            text = text.replace(f'"""{function.__doc__}"""', "")
        count += sum(1 for line in text.splitlines() if line.strip())
    return count


def times_read(whole: Sequence[MicroBatch], diary: Sequence[MicroBatch], epoch: int) -> dict[int, list[float]]:
    """How often each micro-batch of an epoch was read and applied, by life: a share where only some samples were.

    The micro-batches, of all ranks together, are those of an uninterrupted run, in its order.
    """
    slots: list[set[int]] = []
    for rank in sorted({micro_batch.rank for micro_batch in whole}):
        own = [m for m in whole if m.rank == rank and m.epoch == epoch]
        for number, micro_batch in enumerate(own):
            if number == len(slots):
                slots.append(set())
            slots[number] |= set(micro_batch.samples)
    shares = {}
    for life in sorted({micro_batch.life for micro_batch in diary}):
        read = {sample for m in applied(diary) if (m.life, m.epoch) == (life, epoch) for sample in m.samples}
        shares[life] = [len(read & slot) / len(slot) for slot in slots]
    return shares


def figure_of_reads(shares: dict[int, list[float]], title: str) -> Figure:
    """A row for each life: the micro-batches of one epoch that it read; and a row with how often each was read."""
    figure, axes = new_figure(11.0, 2.6)
    lives = sorted(shares)
    for row, life in enumerate(lives):
        for number, share in enumerate(shares[life]):
            colour = BLUE if share >= 0.5 else "white"
            axes.barh(row, 1, left=number, height=0.7, color=colour, edgecolor="#999999")
    sums = [round(sum(own)) for own in zip(*shares.values(), strict=True)]
    for number, times in enumerate(sums):
        colour = {0: VERMILION, 1: "white"}.get(times, ORANGE)
        axes.barh(len(lives), 1, left=number, height=0.7, color=colour, edgecolor="#999999")
        axes.text(number + 0.5, len(lives), str(times), ha="center", va="center")
    axes.set(title=title, xlabel="micro-batches of the epoch, of both ranks, in its order (number, from 0)")
    axes.set(xlim=(0, len(sums)), ylabel="what was applied")
    axes.set_xticks([number + 0.5 for number in range(len(sums))], [str(number) for number in range(len(sums))])
    axes.set_yticks(range(len(lives) + 1), [*(f"life {life}" for life in lives), "times trained"])
    axes.invert_yaxis()
    return figure
