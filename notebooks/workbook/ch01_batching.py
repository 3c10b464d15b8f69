"""What chapter 01 shows and asks: what a batch size buys and what it costs; and the exercises."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ipywidgets
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from workbook.display import BLUE, GREY, VERMILION, add_legend, draw_curves, new_figure, numbered
from workbook.exercises import Exercise
from workbook.widgets import Explorer, int_slider

# What this thread computes, so that a busy machine gives the same answer; Windows counts it in steps of 16 ms.
clock = time.perf_counter if sys.platform == "win32" else time.thread_time

RECORDED_SECONDS = {
    size: microseconds * 1e-6
    for size, microseconds in {
        1: 139, 2: 141, 4: 146, 8: 147, 16: 151, 32: 161, 64: 172, 128: 198, 256: 278, 512: 431, 1024: 728,
        1437: 950, 2048: 1261, 4096: 2376,
    }.items()
}  # fmt: skip
"""One update of the chapter's net by batch size: fastest of 30, Intel Xeon, one thread, torch 2.13.0, 2026-11-21."""


def sample_gradients(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The gradient of each sample's loss at the model's weights, one row for each sample, in double precision."""
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, Tensor], one_x: Tensor, one_y: Tensor) -> Tensor:
        return loss_of(functional_call(model, weights, (one_x[None],)), one_y[None])

    by_name = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x.double(), y)
    return torch.cat([gradients.flatten(1) for gradients in by_name.values()], dim=1)


def noise(batch_size: int, spread: float, samples: int, *, replacement: bool) -> float:
    """The expected squared distance of a batch's mean gradient from the mean over all samples.

    Args:
        batch_size: Samples that are drawn for a batch.
        spread: The mean squared distance of one sample's gradient from that of all.
        samples: How many samples there are.
        replacement: Whether a sample can be drawn twice. An epoch of a shuffling DataLoader draws none twice.
    """
    left = 1.0 if replacement or samples == 1 else (samples - batch_size) / (samples - 1)
    return spread / batch_size * left


class Noise:
    """Measures the noise of random batches, given one gradient for each sample (rows)."""

    def __init__(self, gradients: Tensor) -> None:
        deviations = gradients - gradients.mean(0)
        self.products = deviations @ deviations.T  # whose entries give every batch's distance, without its gradient
        self.samples = len(gradients)
        self.spread = self.products.diagonal().mean().item()
        """Of one sample: the mean squared distance from the gradient of all."""
        self.size_where_noise_is_signal = self.spread / gradients.mean(0).square().sum().item()
        """The batch size at which the noise is as large as the squared length of the gradient itself."""

    def measure(self, batch_size: int, *, replacement: bool, draws: int = 400) -> float:
        """The mean over ``draws`` random batches of the squared distance from the gradient of all."""
        rng = torch.Generator().manual_seed(batch_size)
        shares = torch.zeros(draws, self.samples, dtype=self.products.dtype)
        for share in shares:
            order = torch.randperm(self.samples, generator=rng)[:batch_size]
            drawn = torch.randint(self.samples, (batch_size,), generator=rng) if replacement else order
            share += drawn.bincount(minlength=self.samples) / batch_size
        return ((shares @ self.products) * shares).sum(1).mean().item()


def figure_of_noise(measured: dict[bool, dict[int, float]], spread: float, samples: int) -> Figure:
    """Measured noise over batch size, in units of one sample's, on the lines that the formulas give."""
    figure, axes = new_figure(8.0, 3.6)
    looks = {
        True: ("with replacement: 1 / B", BLUE, "-", "o"),
        False: ("without: times (N−B) / (N−1)", VERMILION, "--", "s"),
    }
    for replacement, (name, colour, line, marker) in looks.items():
        found = {size: value for size, value in measured[replacement].items() if value > 1e-9 * spread}
        sizes = [size for size in range(1, samples + 1) if replacement or size < samples]
        expected = [noise(size, 1.0, samples, replacement=replacement) for size in sizes]
        axes.plot(sizes, expected, color=colour, linestyle=line, linewidth=1.5)
        shares = [value / spread for value in found.values()]
        axes.plot(list(found), shares, marker, color=colour, label=name, markersize=6)
    title = "The noise of a batch's gradient falls with 1 / B"
    axes.set(title=title, xlabel="batch size B (samples)", ylabel="noise, in that of one sample")
    axes.set(xscale="log", yscale="log", ylim=(1e-4, 2))
    add_legend(axes, "lower left")
    return figure


def figure_of_sizes(accuracies: dict[int, float], chance: float) -> Figure:
    """Accuracy over batch size after the same samples, at one learning rate."""
    figure, axes = new_figure(8.0, 3.2)
    axes.plot(list(accuracies), list(accuracies.values()), "o-", color=BLUE)
    axes.axhline(chance, color=GREY, linestyle="--")
    end = (max(accuracies), chance)
    axes.annotate("guessing", end, (0, 4), textcoords="offset points", ha="right", color="#555555")
    title = "Neither one sample at a time nor all at once"
    axes.set(title=title, xlabel="batch size (samples)", ylabel="accuracy on the test digits", ylim=(0, 1))
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(accuracies), [str(size) for size in accuracies])
    axes.minorticks_off()
    return figure


class Run(NamedTuple):
    """A training run: the loss at checkpoints, by samples seen and by seconds of computing."""

    samples: list[int]
    seconds: list[float]
    losses: list[float]

    def until(self, target: float) -> tuple[int, float] | None:
        """Samples and seconds at the first checkpoint whose loss is below ``target``; None where there is none."""
        for samples, seconds, loss in zip(*self, strict=True):
            if loss < target:
                return samples, seconds
        return None


def figure_of_winners(runs: dict[int, Run], seconds_of_update: dict[int, float], target: float) -> Figure:
    """The loss of runs with different batch sizes, against samples seen and against the seconds of their updates."""
    figure, (left, right) = new_figure(11.0, 3.6, columns=2)
    by_samples, by_seconds = {}, {}
    for size, run in runs.items():
        by_samples[f"B = {size}"] = (run.samples, run.losses)
        seconds = [samples / size * seconds_of_update[size] for samples in run.samples]
        by_seconds[f"B = {size}"] = (seconds, run.losses)
    loss = "loss on the training digits"
    draw_curves(left, by_samples, title="By samples, the smallest batch is first …", x="samples seen", y=loss)
    unit = "seconds of the updates, as recorded"
    draw_curves(right, by_seconds, title="… by seconds, one in the middle", x=unit, y=loss)
    for axes in (left, right):
        axes.axhline(target, color=GREY, linewidth=1)
        axes.set_xscale("log")
        axes.set_ylim(0, 2.5)
    return figure


def figure_of_throughput(measured: dict[str, dict[int, float]]) -> Figure:
    """Samples a second over batch size, from the seconds of one update, by the names of who measured them."""
    figure, axes = new_figure(8.0, 3.2)
    curves = {}
    for name, seconds in measured.items():
        curves[name] = (list(seconds), [size / taken for size, taken in seconds.items()])
    first = next(iter(measured.values()))
    curves["if an update took as long at every size"] = (list(first), [size / first[1] for size in first])
    title = "Throughput rises with the batch size, up to a plateau"
    draw_curves(axes, curves, title=title, x="batch size (samples)", y="samples a second")
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    return figure


def throughput_explorer(measured: dict[str, dict[int, float]]) -> Explorer:
    """What the reader's machine measured, beside what was recorded."""

    def render(shown: str) -> tuple[Figure, str]:
        seconds = measured[shown]
        lines = [f"B = {size}: {seconds[size] / size * 1e6:.2f} µs a sample" for size in (1, 64, 4096)]
        return figure_of_throughput({shown: seconds, "recorded": RECORDED_SECONDS}), "\n".join(lines)

    controls = {"shown": ipywidgets.Dropdown(options=list(measured), description="measured on")}
    return Explorer(controls, render, title="what this machine measured → samples a second, beside the recorded ones")


def figure_of_training(losses: Sequence[float], accuracies: Sequence[float]) -> Figure:
    """The mean loss over each epoch's samples, and the accuracy after it."""
    figure, (left, right) = new_figure(11.0, 3.0, columns=2)
    unit = "mean over the epoch's samples"
    draw_curves(left, {"loss": numbered(losses)}, title="The loss falls …", x="epoch", y=unit)
    risen = "… and the accuracy rises"
    draw_curves(right, {"accuracy": numbered(accuracies)}, title=risen, x="epoch", y="test digits")
    right.set_ylim(0, 1.05)
    return figure


class Trade(NamedTuple):
    """What one epoch costs and gives at one batch size."""

    updates: int
    last_batch: int
    """Samples in the last batch."""
    noise: float
    """Of a batch that holds no sample twice, in the noise of one sample."""
    saved_bytes: int
    """What autograd keeps for the backward pass of a full batch."""
    time: float
    """Of an epoch, in the time of one that takes one sample at a time."""


def trade(batch_size: int, samples: int, update_cost: float) -> Trade:
    """One epoch of ``samples`` in batches of ``batch_size``.

    ``update_cost`` is the fixed cost of an update, in the time that one more sample in a batch costs. The bytes are
    those counted in the chapter for its network. Raises ValueError where a batch is larger than all samples.
    """
    if not 1 <= batch_size <= samples:
        raise ValueError(f"batch_size must be an int from 1 to the {samples} samples, got {batch_size}")
    updates = math.ceil(samples / batch_size)
    time = (updates * update_cost + samples) / (samples * update_cost + samples)
    return Trade(
        updates=updates,
        last_batch=samples - (updates - 1) * batch_size,
        noise=noise(batch_size, 1.0, samples, replacement=False),
        saved_bytes=4 + 560 * batch_size,
        time=time,
    )


def batch_explorer(samples: int) -> Explorer:
    """Batch size and the fixed cost of an update → updates, noise, bytes and time of an epoch."""

    def render(batch_size: int, update_cost: int) -> tuple[Figure, str]:
        chosen = trade(batch_size, samples, update_cost)
        sizes = sorted({*(2**power for power in range(samples.bit_length())), samples, batch_size})
        trades = [trade(size, samples, update_cost) for size in sizes]
        figure, axes = new_figure(8.6, 4.0)
        largest = trades[-1].saved_bytes
        curves = {
            "updates": (sizes, [at.updates / samples for at in trades]),
            "noise": (sizes, [at.noise if at.noise else math.nan for at in trades]),
            "time": (sizes, [at.time for at in trades]),
            "bytes of a batch": (sizes, [at.saved_bytes / largest for at in trades]),
        }
        title = f"Batches of {batch_size}: noise {chosen.noise:.2%}, updates {chosen.updates / samples:.2%}"
        unit = "share of its largest value"
        draw_curves(axes, curves, title=title, x="batch size (samples)", y=unit, legend="beside")
        axes.axvline(batch_size, color=GREY)
        axes.set(xscale="log", yscale="log")
        last = "" if chosen.last_batch == batch_size else f", the last of {chosen.last_batch}"
        return figure, (
            f"{chosen.updates} update{'s' * (chosen.updates > 1)} an epoch{last}\n"
            f"noise {chosen.noise:.4f} of one sample's\n"
            f"{chosen.saved_bytes:,} bytes for the backward pass of a batch\n"
            f"{chosen.time:.1%} of the time that one sample at a time takes"
        )

    controls = {
        "batch_size": int_slider(32, samples, "batch size"),
        "update_cost": int_slider(250, 1000, "fixed cost of an update, in samples"),
    }
    return Explorer(controls, render, title="batch size → updates, noise, bytes and time of an epoch")


class UnshardedStream(IterableDataset[int]):
    """The integers 0…n-1; its readers do not know of each other."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class WhoLoads(Dataset[tuple[int, int]]):
    """Sample i is (i, the number of the worker that read it); -1 stands for the process that trains."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return index, -1 if info is None else info.id


def _cut(samples: Sequence[Any], batch_size: int) -> list[list[Any]]:
    return [list(samples[start : start + batch_size]) for start in range(0, len(samples), batch_size)]


def _batches(samples: Sequence[Any], batch_size: int, order: Sequence[int], drop_last: bool) -> list[list[Any]]:
    batches = _cut([samples[i] for i in order], batch_size)
    if drop_last and len(batches[-1]) < batch_size:
        batches.pop()
    return batches


def _wrong_batches(samples: list[Any], batch_size: int, order: list[int], drop_last: bool) -> dict[str, Any]:
    ordered = [samples[i] for i in order]
    every, full = _cut(ordered, batch_size), _batches(samples, batch_size, order, drop_last=True)
    right = full if drop_last else every
    stored = _cut(samples, batch_size)
    lacking = -len(samples) % batch_size
    with_empty = right if lacking or drop_last else [*right, []]
    filled_up = _cut(ordered + ordered[:lacking], batch_size)
    return {
        "{got} ends with an empty batch: where the batch size divides the samples, there is no short one.": with_empty,
        "{got} are positions. A batch holds the samples that stand there.": _cut(order, batch_size),
        "{got} shuffles whole batches: `order` is one of samples.": [stored[i] for i in order if i < len(stored)],
        "{got} has the samples in the order in which they are stored: use `order`.": stored,
        "{got} loses the short last batch, which holds len(samples) % batch_size samples.": full,
        "{got} fills the last batch with samples that the epoch has had: some come twice.": filled_up,
        "{got} keeps the short last batch, though drop_last is set.": every,
        "{got} lacks a batch that was full: drop_last drops a short one only.": every[:-1] if drop_last else every,
    }


by_hand = Exercise(
    "by_hand",
    solution=_batches,
    cases=[
        dict(samples=list("abcd"), batch_size=2, order=[0, 1, 2, 3], drop_last=False),
        dict(samples=list("abcd"), batch_size=2, order=[3, 1, 2, 0], drop_last=False),
        dict(samples=list("abcde"), batch_size=2, order=[2, 0, 4, 1, 3], drop_last=False),
        dict(samples=list("abcde"), batch_size=2, order=[2, 0, 4, 1, 3], drop_last=True),
        dict(samples=list("abcdef"), batch_size=3, order=[5, 3, 1, 0, 2, 4], drop_last=True),
        dict(samples=list("abc"), batch_size=8, order=[1, 2, 0], drop_last=False),
        dict(samples=list("abc"), batch_size=8, order=[1, 2, 0], drop_last=True),
    ],
    misconceptions=_wrong_batches,
)


def _padded(words: Sequence[str], *, longest: int | None = None, first: int = 1, left: bool = False) -> tuple[Any, Any]:
    width = max(len(word) for word in words) if longest is None else longest
    rows, masks = [], []
    for word in words:
        letters = [ord(letter) - ord("a") + first for letter in word][:width]
        real = [True] * len(letters)
        padding = width - len(letters)
        rows.append([0] * padding + letters if left else letters + [0] * padding)
        masks.append([False] * padding + real if left else real + [False] * padding)
    return rows, masks


def _wrong_paddings(words: list[str]) -> dict[str, Any]:
    rows, masks = _padded(words)
    flipped = [[not real for real in mask] for mask in masks]
    by_length = _padded(sorted(words, key=len, reverse=True))
    rugged = [[number for number in row if number] for row in rows], [[real for real in mask if real] for mask in masks]
    return {
        "{got} is the letters alone: without the mask a model takes the padding for letters.": rows,
        "{got} pads to the longest word of the book: the longest of this batch is enough.": _padded(words, longest=14),
        "{got} gives the letter a the number 0, which is that of the padding: begin with 1.": _padded(words, first=0),
        "{got} has True where padding is. Here the mask says what counts: True for a letter.": (rows, flipped),
        "{got} is cut to the shortest word: letters are lost.": _padded(words, longest=min(len(w) for w in words)),
        "{got} has the padding before the letters; it was to come after them.": _padded(words, left=True),
        "{got} has sorted the words: the batch keeps the order in which they came, as their labels do.": by_length,
        "{got} has rows of different lengths: no tensor can be made of them.": rugged,
    }


padded = Exercise(
    "collate",
    solution=_padded,
    cases=[
        dict(words=["c"]),
        dict(words=["ab", "cd"]),
        dict(words=["ab", "c"]),
        dict(words=["a", "hat", "up"]),
        dict(words=["alice", "i", "am"]),
    ],
    misconceptions=_wrong_paddings,
)


def _wrong_accuracies(correct: list[int], sizes: list[int]) -> dict[str, float]:
    shares = [right / size for right, size in zip(correct, sizes, strict=True)]
    averaged, as_if_full = sum(shares) / len(sizes), sum(correct) / (len(sizes) * sizes[0])
    without_last = sum(correct[:-1]) / max(1, sum(sizes[:-1]))
    return {
        "{got} averages the batches: a sample of the short last batch weighs more than one of the others.": averaged,
        "{got} takes every batch for a full one: divide by the samples that there were.": as_if_full,
        "{got} is a sum over samples, divided by batches: an accuracy is at most 1.": sum(correct) / len(sizes),
        "{got} is the accuracy of the last batch: the others were forgotten on the way.": shares[-1],
        "{got} leaves out the last batch: its samples are of the test set, too.": without_last,
        "{got} is in percent: a share from 0 to 1 is asked for.": 100 * sum(correct) / sum(sizes),
        "{got} adds up the batches' accuracies and divides by nothing.": sum(shares),
    }


mean_accuracy = Exercise(
    "accuracy",
    solution=lambda correct, sizes: sum(correct) / sum(sizes),
    cases=[
        dict(correct=[3, 1], sizes=[4, 4]),
        dict(correct=[96, 96, 4], sizes=[128, 128, 4]),
        dict(correct=[109] * 195 + [40], sizes=[128] * 195 + [40]),
        dict(correct=[2], sizes=[5]),
    ],
    misconceptions=_wrong_accuracies,
)

EXERCISES = (by_hand, padded, mean_accuracy)
