"""What chapter 01 shows and asks: what a batch size buys and what it costs; and the exercises."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import ipywidgets
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from workbook.display import BLUE, GREEN, GREY, ORANGE, VERMILION, draw_curves, new_figure
from workbook.exercises import Exercise, Misconception
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

# ----------------------------------------------------------------------------------------------- gradient noise


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
        axes.plot(
            list(found), [value / spread for value in found.values()], marker, color=colour, label=name, markersize=6
        )
    axes.set(
        title="The noise of a batch's gradient falls with 1 / B",
        xlabel="batch size B (samples)",
        ylabel="noise, in that of one sample",
        xscale="log",
        yscale="log",
        ylim=(1e-4, 2),
    )
    axes.legend(frameon=False, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# -------------------------------------------------------------------------------------------------- batch size


def figure_of_sizes(accuracies: dict[int, float], chance: float) -> Figure:
    """Accuracy over batch size after the same samples, at one learning rate."""
    figure, axes = new_figure(8.0, 3.2)
    axes.plot(list(accuracies), list(accuracies.values()), "o-", color=BLUE)
    axes.axhline(chance, color=GREY, linestyle="--")
    axes.annotate(
        "guessing", (max(accuracies), chance), (0, 4), textcoords="offset points", ha="right", color="#555555"
    )
    axes.set(
        title="Neither one sample at a time nor all at once",
        xlabel="batch size (samples)",
        ylabel="accuracy on the test digits",
        ylim=(0, 1),
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(accuracies), [str(size) for size in accuracies])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
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
    for axes, unit, title in (
        (left, "samples seen", "By samples, the smallest batch is first …"),
        (right, "seconds of the updates, as recorded", "… by seconds, one in the middle"),
    ):
        curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {
            f"B = {size}": (
                [samples * (1.0 if axes is left else seconds_of_update[size] / size) for samples in run.samples],
                run.losses,
            )
            for size, run in runs.items()
        }
        draw_curves(axes, curves, title=title, x=unit, y="loss on the training digits")
        axes.axhline(target, color=GREY, linewidth=1)
        axes.set_xscale("log")
        axes.set_ylim(0, 2.5)
    return figure


def figure_of_throughput(measured: dict[str, dict[int, float]]) -> Figure:
    """Samples a second over batch size, from the seconds of one update, by the names of who measured them."""
    figure, axes = new_figure(8.0, 3.2)
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        name: (list(seconds), [size / taken for size, taken in seconds.items()]) for name, seconds in measured.items()
    }
    seconds = next(iter(measured.values()))
    curves["if an update took as long at every size"] = (list(seconds), [size / seconds[1] for size in seconds])
    draw_curves(
        axes,
        curves,
        title="Throughput rises with the batch size, up to a plateau",
        x="batch size (samples)",
        y="samples a second",
    )
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
    epochs = range(1, len(losses) + 1)
    draw_curves(
        left, {"loss": (epochs, losses)}, title="The loss falls …", x="epoch", y="mean over the epoch's samples"
    )
    draw_curves(right, {"accuracy": (epochs, accuracies)}, title="… and the accuracy rises", x="epoch", y="test digits")
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


def trade(
    batch_size: int, samples: int, update_cost: float, fixed_bytes: int = 4, bytes_per_sample: int = 560
) -> Trade:
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
        saved_bytes=fixed_bytes + bytes_per_sample * batch_size,
        time=time,
    )


def batch_explorer(samples: int) -> Explorer:
    """Batch size and the fixed cost of an update → updates, noise, bytes and time of an epoch."""

    def render(batch_size: int, update_cost: int) -> tuple[Figure, str]:
        chosen = trade(batch_size, samples, update_cost)
        sizes = sorted({*(2**power for power in range(samples.bit_length())), samples, batch_size})
        trades = [trade(size, samples, update_cost) for size in sizes]
        figure, axes = new_figure(8.6, 4.0)
        curves = {
            "updates": [t.updates / samples for t in trades],
            "noise": [t.noise or math.nan for t in trades],
            "time": [t.time for t in trades],
            "bytes of a batch": [t.saved_bytes / trades[-1].saved_bytes for t in trades],
        }
        looks = zip((BLUE, VERMILION, GREEN, ORANGE), ("-", "--", "-.", ":"), "osD^", strict=True)
        for (name, values), (colour, line, marker) in zip(curves.items(), looks, strict=True):
            axes.plot(sizes, values, color=colour, linestyle=line, marker=marker, label=name)
        axes.axvline(batch_size, color=GREY)
        axes.set(
            title=f"Batches of {batch_size}: noise {chosen.noise:.2%}, updates {chosen.updates / samples:.2%}",
            xlabel="batch size (samples)",
            ylabel="share of its largest value",
            xscale="log",
            yscale="log",
        )
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
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


# ------------------------------------------------------------------------------------------------------ loading


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


# --------------------------------------------------------------------------------------------------- exercises


def _batches(samples: Sequence[Any], batch_size: int, order: Sequence[int], drop_last: bool) -> list[list[Any]]:
    batches = [[samples[i] for i in order[s : s + batch_size]] for s in range(0, len(order), batch_size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < batch_size else batches


def _unordered(samples: Sequence[Any], batch_size: int, order: Sequence[int], drop_last: bool) -> list[list[Any]]:
    return _batches(samples, batch_size, range(len(samples)), drop_last)


def _batches_in_another_order(
    samples: Sequence[Any], batch_size: int, order: Sequence[int], drop_last: bool
) -> list[list[Any]]:
    batches = _unordered(samples, batch_size, order, drop_last)
    return [batches[i] for i in order if i < len(batches)]


def _drops_always(samples: Sequence[Any], batch_size: int, order: Sequence[int], drop_last: bool) -> list[list[Any]]:
    batches = _batches(samples, batch_size, order, False)
    return batches[:-1] if drop_last else batches


def _one_too_many(samples: Sequence[Any], batch_size: int, order: Sequence[int], drop_last: bool) -> list[list[Any]]:
    number = len(order) // batch_size + (not drop_last)
    return [[samples[i] for i in order[b * batch_size : (b + 1) * batch_size]] for b in range(number)]


def _fills_up(samples: Sequence[Any], batch_size: int, order: Sequence[int], drop_last: bool) -> list[list[Any]]:
    batches = _batches(samples, batch_size, order, drop_last)
    short = batch_size - len(batches[-1]) if batches else 0
    return [*batches[:-1], batches[-1] + [samples[i] for i in islice(order, short)]] if short else batches


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
    misconceptions=[
        Misconception(
            _one_too_many,
            "{got} ends with an empty batch: where the batch size divides the samples, there is no short one.",
        ),
        Misconception(
            lambda samples, batch_size, order, drop_last: [
                list(order[s : s + batch_size]) for s in range(0, len(order), batch_size)
            ],
            "{got} are positions. A batch holds the samples that stand there.",
        ),
        Misconception(_batches_in_another_order, "{got} shuffles whole batches: `order` is one of samples."),
        Misconception(_unordered, "{got} has the samples in the order in which they are stored: use `order`."),
        Misconception(
            lambda samples, batch_size, order, drop_last: _batches(samples, batch_size, order, True),
            "{got} loses the short last batch, which holds len(samples) % batch_size samples.",
        ),
        Misconception(_fills_up, "{got} fills the last batch with samples that the epoch has had: some come twice."),
        Misconception(
            lambda samples, batch_size, order, drop_last: _batches(samples, batch_size, order, False),
            "{got} keeps the short last batch, though drop_last is set.",
        ),
        Misconception(_drops_always, "{got} lacks a batch that was full: drop_last drops a short one only."),
    ],
)


def _padded(words: Sequence[str], *, longest: int | None = None, first: int = 1, left: bool = False) -> tuple[Any, Any]:
    width = max(map(len, words)) if longest is None else longest
    rows, masks = [], []
    for word in words:
        letters = [ord(letter) - ord("a") + first for letter in word][:width]
        padding = width - len(letters)
        rows.append([0] * padding * left + letters + [0] * padding * (not left))
        masks.append([False] * padding * left + [True] * len(letters) + [False] * padding * (not left))
    return rows, masks


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
    misconceptions=[
        Misconception(
            lambda words: _padded(words)[0],
            "{got} is the letters alone: without the mask a model takes the padding for letters.",
        ),
        Misconception(
            lambda words: _padded(words, longest=14),
            "{got} pads to the longest word of the book: the longest of this batch is enough.",
        ),
        Misconception(
            lambda words: _padded(words, first=0),
            "{got} gives the letter a the number 0, which is that of the padding: begin with 1.",
        ),
        Misconception(
            lambda words: (_padded(words)[0], [[not real for real in row] for row in _padded(words)[1]]),
            "{got} has True where padding is. Here the mask says what counts: True for a letter.",
        ),
        Misconception(
            lambda words: _padded(words, longest=min(map(len, words))),
            "{got} is cut to the shortest word: letters are lost.",
        ),
        Misconception(
            lambda words: _padded(words, left=True),
            "{got} has the padding before the letters; it was to come after them.",
        ),
        Misconception(
            lambda words: _padded(sorted(words, key=len, reverse=True)),
            "{got} has sorted the words: the batch keeps the order in which they came, as their labels do.",
        ),
        Misconception(
            lambda words: (
                [[ord(letter) - 96 for letter in word] for word in words],
                [[True] * len(word) for word in words],
            ),
            "{got} has rows of different lengths: no tensor can be made of them.",
        ),
    ],
)


def _shares(correct: Sequence[int], sizes: Sequence[int]) -> list[float]:
    return [right / size for right, size in zip(correct, sizes, strict=True)]


mean_accuracy = Exercise(
    "accuracy",
    solution=lambda correct, sizes: sum(correct) / sum(sizes),
    cases=[
        dict(correct=[3, 1], sizes=[4, 4]),
        dict(correct=[96, 96, 4], sizes=[128, 128, 4]),
        dict(correct=[109] * 195 + [40], sizes=[128] * 195 + [40]),
        dict(correct=[2], sizes=[5]),
    ],
    misconceptions=[
        Misconception(
            lambda correct, sizes: sum(_shares(correct, sizes)) / len(sizes),
            "{got} averages the batches: a sample of the short last batch weighs more than one of the others.",
        ),
        Misconception(
            lambda correct, sizes: sum(correct) / (len(sizes) * sizes[0]),
            "{got} takes every batch for a full one: divide by the samples that there were.",
        ),
        Misconception(
            lambda correct, sizes: sum(correct) / len(sizes),
            "{got} is a sum over samples, divided by batches: an accuracy is at most 1.",
        ),
        Misconception(
            lambda correct, sizes: _shares(correct, sizes)[-1],
            "{got} is the accuracy of the last batch: the others were forgotten on the way.",
        ),
        Misconception(
            lambda correct, sizes: sum(correct[:-1]) / sum(sizes[:-1]) if len(sizes) > 1 else 0.0,
            "{got} leaves out the last batch: its samples are of the test set, too.",
        ),
        Misconception(
            lambda correct, sizes: 100 * sum(correct) / sum(sizes),
            "{got} is in percent: a share from 0 to 1 is asked for.",
        ),
        Misconception(
            lambda correct, sizes: sum(_shares(correct, sizes)),
            "{got} adds up the batches' accuracies and divides by nothing.",
        ),
    ],
)

EXERCISES = (by_hand, padded, mean_accuracy)
