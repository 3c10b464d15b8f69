"""What chapter 03 shows and asks: a step's memory as a picture, what trades memory for what; and the exercises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal
from weakref import WeakSet

import ipywidgets
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from course_lib.leaks.graphs import graph_roots
from course_lib.memory import CATEGORIES, Moment, predict_peak
from course_lib.memory.allocator import MIB
from workbook.display import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, add_legend, draw_curves, new_figure
from workbook.exercises import Exercise
from workbook.widgets import Explorer, int_slider

COLOURS = dict(zip(CATEGORIES, (BLUE, GREY, ORANGE, PURPLE, SKY, GREEN, VERMILION), strict=True))
PHASES = ("forward", "backward", "step")


def figure_of_step(timeline: Sequence[Moment]) -> Figure:
    """What a step holds after each allocation and free, stacked by category; the phases are named above."""
    figure, axes = new_figure(10.0, 3.8)
    moments = timeline[1:]
    held = [name for name in CATEGORIES if max(moment.by_category[name] for moment in moments) * 200 > _peak(timeline)]
    axes.stackplot(
        range(len(moments)),
        [[moment.by_category[name] / MIB for moment in moments] for name in held],
        labels=held,
        colors=[COLOURS[name] for name in held],
        step="post",
    )
    top, start, stepped = 1.16 * _peak(timeline) / MIB, 0, False
    for phase, group in groupby(moments, key=lambda moment: moment.phase):
        number = len(list(group))
        if number > len(moments) / 40:
            axes.axvline(start, color="black", linewidth=0.6)
            axes.text(start + len(moments) / 150, top * 0.93, "after" if stepped else phase, fontsize=9)
        start, stepped = start + number, phase == "step"
    worst = max(range(len(moments)), key=lambda i: moments[i].total)
    axes.plot(worst, moments[worst].total / MIB, "v", color="black", label=f"peak: {_peak(timeline) / MIB:.1f} MiB")
    axes.set_title("Most of a step's memory is there for a moment, late in the forward pass and early in the backward")
    axes.set(xlabel="allocations and frees of one step", ylabel="MiB held", xlim=(0, len(moments)), ylim=(0, top))
    add_legend(axes, "beside")
    return figure


def _peak(timeline: Sequence[Moment]) -> int:
    return max(moment.total for moment in timeline)


def figure_of_lines(peaks: Mapping[int, Mapping[str, int]], limit_bytes: int) -> Figure:
    """Peak bytes of each phase against the batch size, ``{batch size: {phase: bytes}}``, and a limit."""
    figure, axes = new_figure(8.0, 3.4)
    sizes = sorted(peaks)
    curves = {phase: (sizes, [peaks[size][phase] / MIB for size in sizes]) for phase in PHASES}
    title = "Each moment of a step has a line of its own; the highest is the peak"
    draw_curves(axes, curves, title=title, x="samples in a batch", y="MiB held at most")
    axes.axhline(limit_bytes / MIB, color=GREY, linewidth=1)
    axes.annotate("limit", (0, limit_bytes / MIB), (4, 3), textcoords="offset points", color="black", fontsize=9)
    axes.set(xlim=(0, max(sizes)), ylim=(0, None))
    return figure


def figure_of_trades(trades: Mapping[int, Mapping[str, Mapping[str, int]]]) -> Figure:
    """Bytes by category at the peak: ``{batch size: {what was changed: {category: bytes}}}``, a panel a batch size."""
    figure, panels = new_figure(11.0, 3.6, columns=len(trades))
    for axes, (batch_size, peaks) in zip(panels, trades.items(), strict=True):
        first = _draw_stacks(axes, peaks, MIB)
        axes.axvline(first, color="black", linewidth=0.8, linestyle="--")
        axes.invert_yaxis()
        axes.set(title=f"batches of {batch_size}", xlabel="MiB at the peak")
    add_legend(panels[-1], "beside")
    figure.suptitle("Checkpointing and accumulation save activations, so they pay where activations are what there is")
    return figure


def _draw_stacks(axes: Axes, peaks: Mapping[str, Mapping[str, int]], unit: float) -> float:
    """One bar for each name, of bytes by category; returns where the first ends."""
    ends = [0.0] * len(peaks)
    for category in CATEGORIES:
        widths = [by_category.get(category, 0) / unit for by_category in peaks.values()]
        if sum(widths) * 200 > sum(ends):
            axes.barh(list(peaks), widths, left=ends, color=COLOURS[category], label=category)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    return ends[0]


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.short = nn.Conv2d(channels, out, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.body(x))


def image_net(width: int) -> nn.Module:
    """Five residual stages, each with half the side and twice the channels of the one before."""
    channels = [width * 2**stage for stage in range(5)]
    stages = [_Residual(a, b) for a, b in zip([3, *channels], channels, strict=False)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 1000))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
CARDS = (8, 16, 24, 80)
"""GB of usual cards; as their makers count, in 10**9 bytes."""


def memory_explorer() -> Explorer:
    """Batch, side, width, precision and optimizer → the predicted peak on CUDA as a bar, and which cards it fits."""

    def render(
        batch: int, side: int, width: int, precision: Literal["fp32", "bf16"], optimizer: str
    ) -> tuple[Figure, str]:
        def images(samples: int) -> tuple[Tensor, Tensor]:
            return torch.ones(samples, 3, side, side), torch.zeros(samples, dtype=torch.long)

        predicted = predict_peak(
            lambda: image_net(width), images, OPTIMIZERS[optimizer], batch_size=batch, precision=precision
        )
        phase = max(predicted.timeline[1:], key=lambda moment: moment.total).phase
        told = [f"predicted peak: {predicted.peak_bytes / 1e9:.2f} GB, in the {phase}"]
        told += [f"fits in {card} GB: {'yes' if predicted.fits(card * 10**9) else 'no'}" for card in CARDS]
        return _bar(predicted.by_category), "\n".join(told)

    sides = ipywidgets.SelectionSlider(options=(64, 128, 224, 256, 384, 512), value=224, description="pixels a side")
    controls = {
        "batch": int_slider(64, 512, "samples in a batch"),
        "side": sides,
        "width": int_slider(64, 256, "channels of the first stage"),
        "precision": ipywidgets.Dropdown(options=("fp32", "bf16"), description="precision"),
        "optimizer": ipywidgets.Dropdown(options=tuple(OPTIMIZERS), description="optimizer"),
    }
    return Explorer(controls, render, title="batch, pixels, width, precision, optimizer → the bytes of a step")


def _bar(by_category: Mapping[str, int]) -> Figure:
    figure, axes = new_figure(8.6, 1.9)
    end = _draw_stacks(axes, {"": by_category}, 1e9)
    for card in CARDS:
        axes.axvline(card * 0.9, color="black", linestyle=":", linewidth=1)
        axes.annotate(f"{card} GB", (card * 0.9, 0.4), rotation=90, fontsize=8, ha="right", va="top")
    axes.set(title="What the step holds at its peak", xlabel="GB (dotted: 90% of a card)", yticks=[])
    axes.set_xlim(0, max(1.05 * end, CARDS[0]))
    add_legend(axes, "beside")
    axes.spines.left.set_visible(False)
    return figure


def _peak_bytes(num_parameters: int, saved_numbers_per_sample: int, batch_size: int, optimizer_copies: int) -> int:
    always = num_parameters * (1 + optimizer_copies)
    end_of_forward = always + saved_numbers_per_sample * batch_size
    return 4 * max(end_of_forward, always + num_parameters)


def _wrong_peaks(
    num_parameters: int, saved_numbers_per_sample: int, batch_size: int, optimizer_copies: int
) -> dict[str, int]:
    right = _peak_bytes(num_parameters, saved_numbers_per_sample, batch_size, optimizer_copies)
    always = num_parameters * (1 + optimizer_copies)
    activations = saved_numbers_per_sample * batch_size
    without_state = _peak_bytes(num_parameters, saved_numbers_per_sample, batch_size, optimizer_copies=0)
    forward, step = 4 * (always + activations), 4 * (always + num_parameters)
    return {
        "{got} counts numbers: each takes 4 bytes in single precision.": right // 4,
        "{got} adds all that the step ever holds. At no moment is it all there: the backward pass frees "
        "activations while it makes gradients.": step + 4 * activations,
        "{got} multiplies the parameters by the batch: all samples share them.": 4
        * (always * batch_size + activations),
        "{got} leaves the optimizer's state out of one moment at least. It is there all the time.": without_state,
        "{got} is the end of the forward pass. With few samples another moment holds more: which?": forward,
        "{got} is the activations alone: parameters and the optimizer's state are there too.": 4 * activations,
        "{got} is the optimizer's step: no sample is in it. The forward pass has activations.": step,
    }


peak_bytes = Exercise(
    "peak_bytes",
    solution=_peak_bytes,
    cases=[
        dict(num_parameters=0, saved_numbers_per_sample=50, batch_size=8, optimizer_copies=0),
        dict(num_parameters=100, saved_numbers_per_sample=50, batch_size=8, optimizer_copies=0),
        dict(num_parameters=100, saved_numbers_per_sample=50, batch_size=8, optimizer_copies=2),
        dict(num_parameters=1000, saved_numbers_per_sample=50, batch_size=1, optimizer_copies=2),
        dict(num_parameters=1000, saved_numbers_per_sample=50, batch_size=20, optimizer_copies=1),
    ],
    misconceptions=_wrong_peaks,
)


def kept_by(validate: Callable[[nn.Module, list[Tensor]], Any]) -> Callable[[int], dict[str, Any]]:
    """Turn ``validate(model, batches)`` -> ``{"losses": …, "worst": …}`` into what it returns, and what that keeps.

    The result is a function of a number of batches: the losses rounded, the worst batch's number; the tensors that
    earlier batches have saved, at most, when a forward pass begins; and the graph nodes and batches that the returned
    value keeps alive.
    """

    def epoch(num_batches: int) -> dict[str, Any]:
        model, batches = _model_and_batches(num_batches)
        saved: WeakSet[SavedTensor] = WeakSet()
        before_forward = [0]
        model.register_forward_pre_hook(lambda *_: before_forward.append(len(saved)))

        def pack(tensor: Tensor) -> SavedTensor:
            box = SavedTensor(tensor)
            saved.add(box)
            return box

        with saved_tensors_hooks(pack, lambda box: box.tensor):
            returned = validate(model, batches)
        if not isinstance(returned, dict) or set(returned) != {"losses", "worst"}:
            raise ValueError(f'it must return a dict of "losses" and "worst", got {returned!r}')
        tensors = [leaf for leaf in _leaves(returned) if isinstance(leaf, Tensor)]
        worst = returned["worst"]
        held = {tensor.data_ptr() for tensor in tensors}
        return {
            "losses": [round(torch.as_tensor(loss).item(), 4) for loss in returned["losses"]],
            "worst": next((number for number, batch in enumerate(batches) if batch is worst), worst),
            "saved by earlier batches": max(before_forward),
            "graph nodes kept": len(graph_nodes(tensors)),
            "batches kept": sum(batch.data_ptr() in held for batch in batches),
        }

    return epoch


class SavedTensor:
    """What autograd saves, in a box that a WeakSet can hold."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def _model_and_batches(num_batches: int) -> tuple[nn.Module, list[Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), list(torch.randn(num_batches, 8, 4))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple | set):
        return [value]
    leaves = []
    for item in value:
        leaves += _leaves(item)
    return leaves


def graph_nodes(tensors: Sequence[Tensor]) -> set[Any]:
    """All nodes of autograd's graphs that these tensors keep alive."""
    return {node for _, nodes in graph_roots(tensors, {}) for node in nodes}


def _validate(
    model: nn.Module, batches: list[Tensor], *, keep: Callable[[Tensor], Any] = Tensor.item, keep_batch: bool = False
) -> dict[str, Any]:
    losses = [keep(model(batch).square().mean()) for batch in batches]
    worst = max(range(len(losses)), key=losses.__getitem__)
    return {"losses": losses, "worst": batches[worst] if keep_batch else worst}


_with_graphs = partial(_validate, keep=lambda loss: loss)
_with_batch = partial(_validate, keep_batch=True)


def _numbers_at_the_end(model: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    returned = _with_graphs(model, batches)
    return returned | {"losses": [loss.item() for loss in returned["losses"]]}


kept = Exercise(
    "validate",
    solution=_validate,
    judge=kept_by,
    cases=[dict(num_batches=1), dict(num_batches=5)],
    misconceptions={
        "Each loss has its graph, and the graph its batch's activations. (`del` drops a name; the list still holds "
        "the loss.)": partial(_with_graphs, keep_batch=True),
        "The batch is gone, the graphs are not: the list still holds each loss, and the loss its graph.": _with_graphs,
        "A clone is one more node of the same graph.": partial(_validate, keep=Tensor.clone),
        "Numbers at the end come too late: until then the list holds each batch's graph.": _numbers_at_the_end,
        "No graph is kept any more, but a whole batch is. Its number tells as much.": _with_batch,
    },
)


def searched(find: Callable[[Callable[[int], int], int], Any]) -> Callable[[int, int, int], dict[str, Any] | None]:
    """Turn ``find(run, limit)`` into what it answers and what that took: on a device of const + slope · b bytes.

    ``run(batch_size)`` returns the bytes that a step holds, and raises a ``MemoryError`` above the limit.
    """

    def search(const: int, slope: int, limit: int) -> dict[str, Any] | None:
        tried: list[int] = []

        def held(batch_size: int) -> int:
            return const + slope * batch_size

        def run(batch_size: int) -> int:
            if not isinstance(batch_size, int) or batch_size < 1:
                raise ValueError(f"run takes a batch size, an int of at least 1, got {batch_size!r}")
            tried.append(batch_size)
            if len(tried) > 1000:
                raise ValueError("run was called 1,000 times: does the search come to an end?")
            if held(batch_size) > limit:
                raise MemoryError(f"a batch of {batch_size} holds {held(batch_size)} bytes, the limit is {limit}")
            return held(batch_size)

        answer = find(run, limit)
        if answer is None:
            return None
        return {
            "answer": answer,
            "it has run": answer in tried and held(answer) <= limit,
            "at most 3 trials": len(tried) <= 3,
            "errors": sum(held(size) > limit for size in tried),
        }

    return search


def _by_line(run: Callable[[int], int], limit: int) -> int:
    size = _untried(run, limit)
    run(size)
    return size


def _untried(run: Callable[[int], int], limit: int) -> int:
    one, two = run(1), run(2)
    return 2 + (limit - two) // (two - one)


def _by_doubling(run: Callable[[int], int], limit: int) -> int:
    size = 1
    while True:
        try:
            run(size)
        except MemoryError:
            return size // 2
        size *= 2


def _by_halving(run: Callable[[int], int], limit: int) -> int:
    size = limit
    while True:
        try:
            run(size)
            return size
        except MemoryError:
            size //= 2


def _in_proportion(run: Callable[[int], int], limit: int) -> int:
    size = limit // run(1)
    run(size)
    return size


def _one_by_one(run: Callable[[int], int], limit: int) -> int:
    size, step = 1, run(2) - run(1)
    while run(size) + step <= limit:
        size += 1
    return size


three_trials = Exercise(
    "find",
    solution=_by_line,
    judge=searched,
    cases=[
        dict(const=0, slope=10, limit=1000),
        dict(const=300, slope=10, limit=1000),
        dict(const=300, slope=7, limit=1000),
        dict(const=90_000, slope=333, limit=1_000_000),
    ],
    misconceptions={
        "It never ran: so far the answer is a prediction.": _untried,
        "Doubling ends with an error, finds a power of two, and takes a trial for each binary digit, and one more.": (
            _by_doubling
        ),
        "Halving begins with errors: on a real device each may leave the process in pieces.": _by_halving,
        "One trial gives a proportion, and a step holds const + slope · b: const was counted for each sample.": (
            _in_proportion
        ),
        "That is right and slow. Two trials tell const and slope: jump.": _one_by_one,
    },
)

EXERCISES = (peak_bytes, kept, three_trials)
