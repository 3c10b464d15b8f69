"""The record as prices: `data/prices.csv`, the table of `docs/pages/prices.md`, and its picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workbook.display import BLUE, GREEN, GREY, VERMILION, add_legend_below, new_figure, png_bytes
from workbook.prices.faults import FAULTS
from workbook.prices.jobs import JOBS
from workbook.prices.runs import Record, Run, diverged

SEEDS = list(range(8))
"""Of the pairs in `data/prices.csv`."""
PAGES = Path(__file__).parents[3] / "docs" / "pages"
COSTS, GAINS, NOTHING, UNRESOLVED = "costs", "lower loss", "costs nothing here", "not resolved"
COLOURS = {COSTS: VERMILION, GAINS: BLUE, NOTHING: GREEN, UNRESOLVED: GREY}
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


class Row(NamedTuple):
    """The price of a fault on a job: a line of `data/prices.csv`."""

    job: str
    fault: str
    setting: str
    pairs: int
    measure: str
    """With the mean of the runs without the fault."""
    difference: float
    """With the fault minus without it, mean over the pairs in which neither run diverged."""
    low: float
    """Of the interval of this mean: 95 %, by bootstrap over the pairs."""
    high: float
    diverged: int
    """Runs with the fault whose loss is NaN, or above twice that of guessing."""
    samples_lost: int
    """Of the samples of all epochs, those that no update used; mean over the runs."""
    samples_twice: int
    """How often an update used a sample that had been used in this epoch; mean over the runs."""
    steps_lost: int
    """Updates fewer than without the fault, mean over the runs; negative where there are more."""
    command: str


def interval(differences: list[float]) -> tuple[float, float]:
    """The middle 95 % of the means of 10,000 samples of the differences, drawn with replacement, always the same."""
    if not differences:
        return float("nan"), float("nan")
    drawn = np.random.default_rng(0).choice(differences, size=(10_000, len(differences)))
    low, high = np.percentile(drawn.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def between(record: Record, row: Row, seeds: list[int]) -> tuple[float, float]:
    """The interval of a price by other seeds minus that of the list: both are drawn as in :func:`interval`."""
    rng = np.random.default_rng(0)
    means = []
    for chosen in (seeds, SEEDS):
        pairs = record.pairs(row.job, row.fault, chosen)
        differences = [faulty.loss - right.loss for right, faulty in pairs if not diverged(faulty)]
        if not differences:
            return float("nan"), float("nan")
        means.append(rng.choice(differences, size=(10_000, len(differences))).mean(axis=1))
    low, high = np.percentile(means[0] - means[1], [2.5, 97.5])
    return float(low), float(high)


def rows_of(record: Record, jobs: list[str], faults: list[str], seeds: list[int]) -> list[Row]:
    """By job and fault, the loss and, for pictures, the accuracy. Left out: what has no pair yet."""
    rows = []
    for job in jobs:
        for fault in faults:
            pairs = record.pairs(job, fault, seeds)
            if pairs:
                rows.append(row_of(pairs, "loss"))
            if pairs and job == "cnn":
                rows.append(row_of(pairs, "accuracy"))
    return rows


def row_of(pairs: list[tuple[Run, Run]], measure: str) -> Row:
    job, fault = pairs[0][1].job, pairs[0][1].fault
    learned = [(right, faulty) for right, faulty in pairs if not diverged(faulty)]
    differences = [getattr(faulty, measure) - getattr(right, measure) for right, faulty in learned]
    low, high = interval(differences)
    right_mean = float(np.mean([getattr(right, measure) for right, _ in pairs]))
    return Row(
        job,
        fault,
        FAULTS[fault].setting,
        len(pairs),
        f"validation {measure} (right: {right_mean:.4f})",
        round(float(np.mean(differences)), 4) if differences else float("nan"),
        round(low, 4),
        round(high, 4),
        len(pairs) - len(learned),
        round(float(np.mean([faulty.samples_lost for _, faulty in pairs]))),
        round(float(np.mean([faulty.samples_twice for _, faulty in pairs]))),
        round(float(np.mean([right.steps - faulty.steps for right, faulty in pairs]))),
        f"make prices JOB={job} FAULT={fault}",
    )


def right_of(row: Row) -> float:
    return float(row.measure.rpartition(" ")[2].removesuffix(")"))


def verdict(row: Row) -> str:
    """Of a row of losses. Fewer pairs than those of the list resolve nothing."""
    hundredth = right_of(row) / 100
    if row.diverged == row.pairs:
        return f"diverged {row.diverged} of {row.pairs}"
    if row.pairs < len(SEEDS):
        return UNRESOLVED
    if -hundredth <= row.low and row.high <= hundredth:
        return NOTHING
    if row.low > 0:
        return COSTS
    if row.high < 0:
        return GAINS
    return UNRESOLVED


def night_hours(row: Row) -> float:
    """Of a night of eight hours: the part whose samples no update used."""
    job = JOBS[row.job]()
    return 8 * row.samples_lost / (job.epochs * len(job.training))


def write_csv(rows: list[Row], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(["" if value != value else value for value in row] for row in rows)


def read_csv(path: Path) -> list[Row]:
    """The rows as :func:`write_csv` has written them."""
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            numbers = {name: int(cells[name]) for name in ("pairs", "diverged", *Row._fields[-4:-1])}
            reals = {name: float(cells[name] or "nan") for name in ("difference", "low", "high")}
            rows.append(Row(**{**cells, **numbers, **reals}))  # type: ignore[arg-type]
    return rows


def percent(row: Row, value: float) -> float:
    return 100 * value / right_of(row)


def losses(rows: list[Row]) -> list[Row]:
    """The rows of losses, the dearest first, those that all diverged ahead of them."""
    chosen = [row for row in rows if row.measure.startswith("validation loss")]
    return sorted(chosen, key=lambda row: (row.diverged < row.pairs, -percent(row, row.difference)))


def print_rows(rows: list[Row]) -> None:
    for row in rows:
        judged = verdict(row) if row.measure.startswith("validation loss") else ""
        print(f"{row.job} {row.fault}, {row.measure}, {row.pairs} pairs: ", end="")
        print(f"{row.difference:+.4f} ({row.low:+.4f} to {row.high:+.4f}), diverged {row.diverged}  {judged}")


def table_of(rows: list[Row]) -> str:
    """Markdown: a line for each price."""
    lines = [
        "| fault | setting | job | loss | interval | verdict | accuracy, points | lost | twice | steps lost | hours |",
        "|---|---|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    accuracies = {(row.job, row.fault): row for row in rows if row not in losses(rows)}
    for row in losses(rows):
        title = FAULTS[row.fault].title + (" *(the reading)*" if FAULTS[row.fault].reading else "")
        cells = [title, row.setting, row.job]
        if row.diverged < row.pairs:
            low, high = percent(row, row.low), percent(row, row.high)
            cells += [f"{percent(row, row.difference):+.1f} %", f"{low:+.1f} … {high:+.1f}", verdict(row)]
            cells[-1] += f"; diverged {row.diverged} of {row.pairs}" if row.diverged else ""
            cells[-1] += f"; {row.pairs} pairs" if row.pairs < len(SEEDS) else ""
        else:
            cells += ["–", "–", verdict(row)]
        accuracy = accuracies.get((row.job, row.fault))
        shown = accuracy is not None and row.diverged < row.pairs
        cells.append(f"{100 * accuracy.difference:+.1f}" if accuracy and shown else "–")
        cells += [f"{row.samples_lost:,}", f"{row.samples_twice:,}", f"{row.steps_lost:,}", f"{night_hours(row):.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure_of_prices(rows: list[Row]) -> Figure:
    """Each price with its interval, in percent of the loss; a column for each job."""
    dearest_first = losses(rows)
    names = list(dict.fromkeys(row.fault for row in dearest_first))
    verdicts = [verdict(row) for row in dearest_first]
    figure, columns = new_figure(9.4, 1.6 + 0.25 * len(names), columns=2)
    for job, axes in zip(JOBS, columns, strict=True):
        axes.axvspan(-1, 1, color="#EEEEEE")
        for row in dearest_first:
            if row.job != job:
                continue
            y = -names.index(row.fault)
            if row.diverged == row.pairs:
                axes.text(
                    0.98, y, verdict(row), transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9
                )
                continue
            colour = COLOURS[verdict(row)]
            axes.plot([percent(row, row.low), percent(row, row.high)], [y, y], color=colour, linewidth=2)
            axes.plot(percent(row, row.difference), y, "o", color=colour, markersize=5)
        axes.set_xscale("symlog", linthresh=1)
        ticks = [-10, -1, 0, 1, 10, 100]
        axes.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
        axes.set_xlim(-30, 200)
        axes.set(title=job, xlabel="validation loss, % more than without the fault")
        axes.set_ylim(-len(names) + 0.4, 0.6)
        axes.grid(axis="y", color="#EEEEEE", linewidth=0.6)
        axes.set_yticks(
            [-at for at in range(len(names))], [FAULTS[name].title for name in names] if job == "gpt" else []
        )
        axes.tick_params(axis="y", length=0, labelsize=9)
    costly = sum(found == COSTS or found.startswith("diverged") for found in verdicts)
    figure.suptitle(
        f"Of {len(verdicts)} prices, {costly} are a cost that eight pairs of runs resolve, "
        f"and {verdicts.count(NOTHING)} are nothing (within ±1 %)",
        fontsize=11,
    )
    handles = [Line2D([], [], color=colour, marker="o", label=name) for name, colour in COLOURS.items()]
    add_legend_below(figure, handles)
    return figure


def write_page(rows: list[Row], pages: Path = PAGES) -> None:
    """Put the table into the page, between its two marks, and the picture beside it."""
    page = pages / "prices.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{table_of(rows)}\n{END}{after}", encoding="utf-8")
    (pages / "prices.png").write_bytes(png_bytes(figure_of_prices(rows)))
