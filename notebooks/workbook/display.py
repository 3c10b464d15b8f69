"""What a notebook shows besides numbers: figures with their sentence, the source of a piece, the claims.

Outputs are stored and compared, so each has a part that is the same on every machine: a figure's picture is not
compared, its sentence is.
"""

from __future__ import annotations

import inspect
import io
import logging
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
from IPython.display import Markdown, display
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#999999",
)  # fmt: skip
"""Okabe and Ito's colours, which colour-blind readers can tell apart (jfly.uni-koeln.de/color)."""

COLUMNS = 88
"""What a cell prints is not wider: the rest would run out of the page."""

Curve = tuple[Sequence[float], Sequence[float]]
"""Points: their x, and their y."""
Place = Literal["best", "upper left", "lower left", "beside"]
"""Of a legend: beside the axes, or in them."""


def new_figure(width: float = 9.0, height: float = 3.0, columns: int = 1) -> tuple[Figure, Any]:
    """A white figure with one Axes, or an array of ``columns`` of them, open at the top and right. Sizes in inches."""
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        return figure, figure.subplots(1, columns)


def add_legend(axes: Axes, place: Place = "best") -> None:
    """A legend without a frame, within the axes or beside them, on the right."""
    if place == "beside":
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    else:
        axes.legend(loc=place, frameon=False)


def add_legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """One legend for all axes of a figure, under them."""
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def png_bytes(figure: Figure) -> bytes:
    """The picture as a file's content."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def show_figure(figure: Figure, sentence: str) -> None:
    """Show the picture, and under it the sentence that says what to see: it stands in for whoever cannot see it."""
    display({"image/png": png_bytes(figure), "text/plain": f"[figure: {sentence}]"}, raw=True)
    display(Markdown(f"*{sentence}*"))


def draw_curves(axes: Axes, curves: Mapping[str, Curve], *, title: str, x: str, y: str, legend: Place = "best") -> None:
    """Draw named curves, told apart by colour, line and marker; ``legend`` is the place of :func:`add_legend`."""
    looks = zip((BLUE, VERMILION, GREEN, PURPLE), ("-", "--", "-.", ":"), "osD^", strict=True)
    for (name, (xs, ys)), (colour, line, marker) in zip(curves.items(), looks, strict=False):
        axes.plot(xs, ys, color=colour, linestyle=line, marker=marker, markevery=max(1, len(xs) // 10), label=name)
    axes.set(title=title, xlabel=x, ylabel=y)
    add_legend(axes, legend)


def numbered(values: Sequence[float]) -> Curve:
    """A curve of values over their numbers from 1: of epochs, of steps."""
    return range(1, len(values) + 1), values


def wrapped(text: str, indent: str = "") -> str:
    """The text in lines that fit on a page; what goes on in a further line is indented more than the first."""
    filled = []
    for line in text.splitlines():
        begin = indent + line[: len(line) - len(line.lstrip())]
        further = begin if indent else begin + "   "
        filled.append(textwrap.fill(line.strip(), COLUMNS, initial_indent=begin, subsequent_indent=further))
    return "\n".join(filled)


def print_wrapped(text: object) -> None:
    """Print a report or a sentence in lines that fit on a page."""
    print(wrapped(str(text)))


def show_source(*objects: Callable[..., Any] | property | type | Path) -> None:
    """Show the source of functions, classes or properties as the library has it, or a whole file."""
    sources = []
    for source in objects:
        if isinstance(source, Path):
            sources.append(source.read_text(encoding="utf-8"))
        else:
            sources.append(inspect.getsource(source.fget if isinstance(source, property) and source.fget else source))  # type: ignore[arg-type]
    code = "\n".join(textwrap.dedent(source) for source in sources)
    display(Markdown(f"```python\n{code}```"))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Show rows as a Markdown table; numbers stand right."""
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    lines = [columns, ["---:" if n else "---" for n in numeric], *rows]
    display(Markdown("\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)))


def quiet_lightning() -> None:
    """Silence what Lightning says about the machine and about toy runs; errors still come through."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
