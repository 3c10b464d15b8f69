"""What chapter 02 shows and asks: a worker, datasets for workers, a loader's epoch as a chart; and the exercises.

The datasets and the worker are here, not in the notebook, because a process that was spawned imports what it runs.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from course_lib.datasets import Integers, load_words
from course_lib.pipeline import BatchTrace, predict_throughput, simulate_pipeline
from workbook.display import BLUE, GREY, ORANGE, draw_curves, new_figure
from workbook.exercises import Exercise, Misconception, NotSolved
from workbook.widgets import Explorer, int_slider

# --------------------------------------------------------------------------------------------------- a worker


def answer_tasks(pipe: Any, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
    while (indices := pipe.recv()) is not None:
        pipe.send(collate_fn([dataset[index] for index in indices]))


def start_worker(dataset: Any, collate_fn: Callable[[Any], Any] = default_collate) -> Any:
    """Our end of the pipe to a new process that answers tasks."""
    ours, theirs = torch.multiprocessing.Pipe()
    arguments = (theirs, dataset, collate_fn)
    torch.multiprocessing.Process(target=answer_tasks, args=arguments, daemon=True).start()
    theirs.close()
    return ours


# --------------------------------------------------------------------------------------- datasets for workers


class Sleepy(Dataset[int]):
    """Sample i is the int i; reading it takes ``seconds[i]`` and no CPU, like a disk or a network."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = list(seconds)

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds[index])
        return index


class Busy(Sleepy):
    """Sample i is the int i; making it takes ``seconds[i]`` of a CPU, like decoding and augmenting."""

    def __getitem__(self, index: int) -> int:
        end = time.process_time() + self.seconds[index]
        while time.process_time() < end:
            pass
        return index


class Resizable(Dataset[Tensor]):
    """Square images of zeros; their size is an attribute, a tensor of one number, or comes with the index."""

    def __init__(self, samples: int, size: int | Tensor) -> None:
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int | tuple[int, int]) -> Tensor:
        size = index[1] if isinstance(index, tuple) else int(self.size)
        return torch.zeros(size, size)


class ReaderIds(Dataset[int]):
    """Each of ``samples`` samples is the id of the process that reads it."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Draws(Dataset[int]):
    """Each sample is a random number below 2**31, drawn in one of three ways.

    ``way``: "global" draws from NumPy's global generator; "own" from a generator that is made here, once; "by index"
    from one that is made anew of (seed, epoch, index) for each sample.
    """

    def __init__(self, samples: int, way: str) -> None:
        self.samples, self.way = samples, way
        self.rng, self.epoch = np.random.default_rng(0), 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        if self.way == "global":
            return int(np.random.randint(2**31))  # noqa: NPY002 - it is what many datasets do
        rng = self.rng if self.way == "own" else np.random.default_rng([0, self.epoch, index])
        return int(rng.integers(2**31))


def reseed(worker_id: int) -> None:
    """A ``worker_init_fn``: gives the worker's copy of the dataset a generator of its own."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.rng = np.random.default_rng(info.seed)


class InList(Dataset[float]):
    """Floats in a list: each is a Python object, which counts its references."""

    def __init__(self, samples: int) -> None:
        self.values: Any = [float(i) for i in range(samples)]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> float:
        return self.values[index]  # type: ignore[no-any-return]


class InArray(InList):
    """The same floats in one array."""

    def __init__(self, samples: int) -> None:
        self.values = np.arange(samples, dtype=np.float64)


def private_bytes(samples: Any) -> int:
    """A ``collate_fn``: in place of the batch, the bytes that this process shares with no other."""
    return int(psutil.Process().memory_full_info().uss)


def growth_of_workers(dataset: Any, workers: int = 2) -> list[int]:
    """By how many private bytes each forked worker has grown between its first batch and its last, over an epoch."""
    loader = DataLoader(
        dataset,
        len(dataset) // 40,
        num_workers=workers,
        collate_fn=private_bytes,
        multiprocessing_context="fork",
    )
    batches = list(loader)
    return [batches[worker::workers][-1] - batches[worker] for worker in range(workers)]


def can_fork() -> bool:
    return "fork" in torch.multiprocessing.get_all_start_methods()


class Killed(Dataset[int]):
    """Sample i is the int i; the process that reads sample ``at`` is killed, as for want of memory."""

    def __init__(self, samples: int, at: int) -> None:
        self.samples, self.at = samples, at

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            time.sleep(0.3)  # what was answered before is on its way
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
        return index


class CountingBatchSampler:
    """Batches of ``range(samples)``; counts its iterators, and the batches that were drawn from the last of them."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.iterators = self.drawn = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.iterators += 1
        self.drawn = 0
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        for start in range(0, self.samples, self.batch_size):
            self.drawn += 1
            yield list(range(start, min(start + self.batch_size, self.samples)))

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)


# ------------------------------------------------------------------------------------------ an epoch as a chart


class Bar(NamedTuple):
    """A stretch of time of one process, in seconds since the first fetch."""

    row: str
    """"main", or "worker 0", "worker 1", …"""
    kind: str
    """"fetch", "wait" or "compute"."""
    batch: int
    start: float
    end: float


def bars(traces: Sequence[BatchTrace]) -> list[Bar]:
    """What each process does when, from a trace.

    The main process computes between a delivery and the next wait, so the last step's end is not known and left out.
    """
    begin = min(trace.fetch_start_s for trace in traces)
    found = []
    for trace in traces:
        row = "main" if trace.worker is None else f"worker {trace.worker}"
        found.append(Bar(row, "fetch", trace.batch, trace.fetch_start_s - begin, trace.fetch_end_s - begin))
        if trace.worker is not None:
            wait_start = max(0.0, trace.wait_start_s - begin)
            found.append(Bar("main", "wait", trace.batch, wait_start, trace.delivered_s - begin))
    for trace, following in itertools.pairwise(traces):
        found.append(Bar("main", "compute", trace.batch, trace.delivered_s - begin, following.wait_start_s - begin))
    return found


def fetches_at_once(traces: Sequence[BatchTrace]) -> int:
    """The most batches that were being fetched at one time."""
    return max(sum(a.fetch_start_s <= b.fetch_start_s < a.fetch_end_s for a in traces) for b in traces)


def fetches_behind_a_step(traces: Sequence[BatchTrace]) -> int:
    """How many batches were fetched, at least in part, while the main process computed."""
    found = bars(traces)
    steps = [bar for bar in found if bar.kind == "compute"]
    fetches = [bar for bar in found if bar.kind == "fetch"]
    return sum(any(step.start < fetch.end and fetch.start < step.end for step in steps) for fetch in fetches)


LOOKS = {"fetch": (ORANGE, ""), "wait": ("white", "////"), "compute": (BLUE, "")}


def draw_epoch(axes: Axes, traces: Sequence[BatchTrace], *, title: str) -> None:
    """Draw who does what when: a row a process, a bar a batch, whose number is in it."""
    found = [bar for bar in bars(traces) if bar.end > bar.start]
    rows = sorted({bar.row for bar in found}, key=lambda row: (row != "main", row))
    for bar in found:
        colour, hatch = LOOKS[bar.kind]
        left, width = 1000 * bar.start, 1000 * (bar.end - bar.start)
        edge = GREY if bar.kind == "wait" else "white"
        axes.barh(rows.index(bar.row), width, left=left, height=0.8, color=colour, hatch=hatch, edgecolor=edge)
        if bar.kind != "wait":
            middle, white = left + width / 2, "white" if bar.kind == "compute" else "black"
            axes.text(middle, rows.index(bar.row), str(bar.batch), ha="center", va="center", fontsize=7, color=white)
    axes.set(
        title=title, xlabel="milliseconds", yticks=range(len(rows)), yticklabels=rows, ylim=(-0.6, len(rows) - 0.4)
    )
    axes.spines[["top", "right"]].set_visible(False)


def label_looks(figure: Figure) -> None:
    """One legend for all charts of a figure, under them."""
    for kind, (colour, hatch) in LOOKS.items():
        figure.axes[0].barh(0, 0, color=colour, hatch=hatch, edgecolor=GREY, label=kind)
    figure.legend(loc="outside lower center", ncols=len(LOOKS), frameon=False)


def figure_of_epochs(panels: dict[str, Sequence[BatchTrace]]) -> Figure:
    """One chart a panel, side by side, over one time axis."""
    figure, axes = new_figure(11.0, 2.6, columns=len(panels))
    end = 1000 * max(bar.end for traces in panels.values() for bar in bars(traces))
    for ax, (title, traces) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        draw_epoch(ax, traces, title=title)
        ax.set_xlim(0, end * 1.02)
    label_looks(figure)
    return figure


def recorded_epochs() -> dict[str, list[BatchTrace]]:
    """What `trace` said of torch's loader without workers, with one and with two: 240 ms to load, 160 ms to compute.

    Recorded on 2 virtual cores, torch 2.13.0, Linux, 21 November 2026; so the figure is the same on every machine.
    Milliseconds: fetched from, to; waited for from, to.
    """
    times: dict[str, list[tuple[Any, ...]]] = {
        "no worker: in turn": [
            (None, 0, 243, 0, 243), (None, 404, 648, 403, 648), (None, 809, 1052, 809, 1053),
            (None, 1216, 1475, 1214, 1476), (None, 1639, 1881, 1637, 1881),
        ],
        "1 worker: behind the step": [
            (0, 54, 298, 25, 320), (0, 301, 542, 481, 549), (0, 543, 785, 710, 792), (0, 788, 1030, 953, 1039),
            (0, 1035, 1276, 1200, 1281),
        ],
        "2 workers: and two at a time": [
            (0, 50, 297, 39, 317), (1, 68, 312, 477, 485), (0, 300, 541, 646, 654), (1, 315, 556, 815, 820),
            (0, 545, 786, 981, 986),
        ],
    }  # fmt: skip
    return {
        title: [BatchTrace(i, worker, *(ms / 1000 for ms in row)) for i, (worker, *row) in enumerate(rows)]
        for title, rows in times.items()
    }


def pipeline_explorer() -> Explorer:
    """Milliseconds to load and to compute, workers, prefetch → the epoch as a chart, and its pace."""

    def render(load: int, compute: int, workers: int, prefetch: int) -> tuple[Figure, str]:
        times = (load / 1000, compute / 1000)
        traces = simulate_pipeline(*times, workers, prefetch, batches=12)
        pace = predict_throughput(*times, workers, prefetch)
        limit = (
            "the two in turn set" if not workers else "the workers set" if workers < load / compute else "the step sets"
        )
        figure, axes = new_figure(10.0, 1.7 + 0.35 * workers)
        draw_epoch(axes, traces, title=f"{pace:.1f} batches per second; {limit} the pace")
        label_looks(figure)
        waited = 1000 * sum(trace.waited_s for trace in traces)
        end = 1000 * traces[-1].delivered_s
        return figure, (
            f"{pace:.1f} batches/s in the long run ({limit} the pace); "
            f"of the first {end:.0f} ms, {waited:.0f} ms waiting for {len(traces)} batches"
        )

    controls = {
        "load": int_slider(40, 100, "ms to load a batch"),
        "compute": int_slider(20, 100, "ms to compute"),
        "workers": _from_zero(2, 6, "workers"),
        "prefetch": int_slider(2, 6, "prefetch_factor"),
    }
    return Explorer(controls, render, title="load and compute time, workers, prefetch → the epoch as a chart")


def _from_zero(value: int, highest: int, name: str) -> Any:
    slider = int_slider(value, highest, name)
    slider.min = 0
    return slider


# ------------------------------------------------------------------------------------------ workers and cores


def keep_on_one_core(worker_id: int) -> None:
    """A ``worker_init_fn``: all workers run on the same core, where the system has a call for that."""
    process = psutil.Process()
    if can_keep_on_one_core():
        process.cpu_affinity([min(process.cpu_affinity())])


def can_keep_on_one_core() -> bool:
    return hasattr(psutil.Process, "cpu_affinity")  # Linux and Windows; not macOS


def seconds_of_an_epoch(loader: Any) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


KINDS: dict[str, Any] = {
    "light: in memory": Integers(400),
    "medium: 2 ms of a CPU": Busy([0.002] * 96),
    "heavy: 20 ms of a CPU": Busy([0.02] * 24),
    "slow: 20 ms of a disk": Sleepy([0.02] * 24),
}


def sweep(workers: Sequence[int], kinds: dict[str, Any] = KINDS, epochs: int = 3) -> dict[str, list[float]]:
    """Samples per second by kind of sample, for each number of workers; the best of ``epochs``, without the start.

    One sample a batch, and no training step. Means something on a machine that does nothing else.
    """
    rates: dict[str, list[float]] = {}
    for kind, dataset in kinds.items():
        rates[kind] = []
        for number in workers:
            loader = DataLoader(dataset, num_workers=number, persistent_workers=number > 0)
            seconds = [seconds_of_an_epoch(loader) for _ in range(epochs + (number > 0))]
            rates[kind].append(len(dataset) / min(seconds))
    return rates


class Recorded(NamedTuple):
    """A sweep that was run before, for a figure that is the same on every machine."""

    told: str
    workers: tuple[int, ...]
    rates: dict[str, list[float]]
    """Samples per second."""
    cores: int


RECORDED = Recorded(
    "recorded on 2 virtual cores: the best of 3 epochs; torch 2.13.0, Python 3.11.7, Linux, 21 November 2026",
    (0, 1, 2, 4, 8),
    {
        "light: in memory": [48994.8, 786.5, 1128.8, 930.0, 688.4],
        "medium: 2 ms of a CPU": [408.0, 218.3, 407.9, 467.5, 524.4],
        "heavy: 20 ms of a CPU": [44.7, 42.5, 77.4, 78.1, 79.0],
        "slow: 20 ms of a disk": [43.8, 41.7, 89.5, 168.2, 313.3],
    },
    cores=2,
)


def figure_of_sweep(workers: Sequence[int], rates: dict[str, list[float]], cores: int) -> Figure:
    """Speed against the number of workers, each kind of sample relative to its own speed without workers."""
    figure, axes = new_figure(9.0, 3.6)
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        kind: (workers, [rate / by[0] for rate in by]) for kind, by in rates.items()
    }
    title = "How many workers help depends on the sample"
    draw_curves(axes, curves, title=title, x="workers", y="speed relative to\nno workers")
    axes.axvline(cores, color=GREY, linewidth=1)
    axes.annotate("cores", (cores, 1), (3, -3), textcoords="offset points", color="#555555", va="top", fontsize=9,
                  xycoords=("data", "axes fraction"))  # fmt: skip
    axes.set(
        yscale="log",
        xticks=workers,
        yticks=[1 / 64, 1 / 16, 1 / 4, 1, 4],
        yticklabels=["1/64", "1/16", "1/4", "1", "4"],
    )
    axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


# --------------------------------------------------------------------------------------------------- exercises


def _padded(samples: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, samples))
    rows = [[*sample, *[pad] * (longest - len(sample))] for sample in samples]
    return torch.tensor(rows), torch.tensor([len(sample) for sample in samples])


def _lengths(samples: list[list[int]]) -> Tensor:
    return torch.tensor([len(sample) for sample in samples])


pad_collate = Exercise(
    "pad_collate",
    solution=_padded,
    cases=[
        dict(samples=[[1, 2], [3, 4]], pad=0),
        dict(samples=[[1, 2], [3]], pad=0),
        dict(samples=[[5], [6, 7, 8], [9, 1]], pad=0),
        dict(samples=[[1, 0], [3, 0, 5]], pad=0),
        dict(samples=[[], [4]], pad=0),
        dict(samples=[[1], [2, 3]], pad=-100),
    ],
    misconceptions=[
        Misconception(
            lambda samples, pad: _padded(samples, pad)[0],
            "There are no lengths: whoever gets the batch cannot tell padding from data.",
        ),
        Misconception(
            lambda samples, pad: (
                torch.tensor([sample[: min(map(len, samples))] for sample in samples]),
                torch.tensor([min(map(len, samples))] * len(samples)),
            ),
            "All are cut to the shortest: data are lost.",
        ),
        Misconception(
            lambda samples, pad: (_padded(samples, pad)[0], torch.tensor([max(map(len, samples))] * len(samples))),
            "Each sample got the length of the longest: that is the batch's width, not the sample's length.",
        ),
        Misconception(
            lambda samples, pad: (_padded([sample[::-1] for sample in samples], pad)[0].flip(1), _lengths(samples)),
            "This pads on the left. The data come first here, so that row[:length] is the sample.",
        ),
        Misconception(
            lambda samples, pad: (_padded([*samples, [0] * 8], pad)[0][:-1], _lengths(samples)),
            "This pads to a fixed width: the longest sample *of the batch* is wide enough, and costs less.",
        ),
        Misconception(
            lambda samples, pad: (_padded(samples, pad)[0], (_padded(samples, pad)[0] != pad).sum(1)),
            "The lengths count what is not `pad`: a sample may hold that value as data. Take its own length.",
        ),
        Misconception(
            lambda samples, pad: (_padded(samples, 0)[0], _lengths(samples)),
            "This fills up with 0, whatever `pad` says.",
        ),
    ],
)


class PropertyExercise:
    """A question with many right answers: the first property that one does not have is the diagnosis.

    ``find_fault`` takes the answer and returns what is wrong with it, or None.
    """

    def __init__(
        self, name: str, find_fault: Callable[[Any], str | None], misconceptions: Sequence[Misconception]
    ) -> None:
        self.name, self.find_fault, self.misconceptions = name, find_fault, misconceptions

    def check(self, answer: Any) -> None:
        """Print that the answer is right, or raise :class:`NotSolved` with the diagnosis."""
        if answer is None or answer is ...:
            raise NotSolved(f"{self.name}: no answer yet. Put yours in the place of `...`.")
        if not callable(answer):
            raise NotSolved(f"{self.name}: a function is asked for, got {answer!r}.")
        try:
            fault = self.find_fault(answer)
        except Exception as error:
            raise NotSolved(f"{self.name} raised {type(error).__name__}: {error}") from error
        if fault:
            raise NotSolved(f"{self.name}: {fault}")
        print(f"{self.name}: solved.")


def _missing_and_twice(seen: Iterable[Any], expected: Iterable[Any]) -> str | None:
    uses, wanted = Counter(seen), Counter(expected)
    missing, extra = (wanted - uses).total(), (uses - wanted).total()
    return f"of {wanted.total()} samples, {missing} are missing and {extra} come again" if missing or extra else None


def padding(batches: Iterable[Sequence[int]], lengths: Sequence[int]) -> int:
    """The positions that are filled up when each batch is padded to its longest sample."""
    return sum(max(lengths[i] for i in batch) * len(batch) - sum(lengths[i] for i in batch) for batch in batches)


def _shuffled_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist()
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def _buckets(
    lengths: Sequence[int],
    batch_size: int,
    seed: int,
    epoch: int,
    rng: Any = None,
    shuffle_samples: bool = True,
    shuffle_batches: bool = True,
) -> list[list[int]]:
    rng = rng or np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths)).tolist() if shuffle_samples else list(range(len(lengths)))
    order.sort(key=lambda index: lengths[index])
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))] if shuffle_batches else batches


def _fault_of_buckets(bucket_batches: Any) -> str | None:
    def made(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
        batches = bucket_batches(list(lengths), batch_size, seed, epoch)
        return [[int(index) for index in batch] for batch in batches]

    words = [len(word) for word in load_words()]
    for lengths, batch_size in (([1, 2, 3, 4], 2), ([5, 1, 4, 1, 3], 2), (words, 32)):
        batches = made(lengths, batch_size, 0, 0)
        if lost := _missing_and_twice(itertools.chain(*batches), range(len(lengths))):
            return f"{lost}.\nEach index belongs into exactly one batch, those of a short last batch too."
        if max(map(len, batches)) > batch_size:
            return f"a batch has {max(map(len, batches))} indices, asked for are at most {batch_size}."
    batches, shuffled = made(words, 32, 0, 0), _shuffled_batches(words, 32, 0, 0)
    if padding(batches, words) * 2 > padding(shuffled, words):
        return (
            f"2,000 words in batches of 32 are padded by {padding(batches, words):,} positions; batches of a plain "
            f"shuffle by {padding(shuffled, words):,}.\nWords of one length belong together: that is the bucket."
        )
    if made(words, 32, 0, 0) != batches:
        return "two calls with the same (seed, epoch) differ.\nDraw from a generator made of the two, not a global one."
    if made(words, 32, 0, 1) == batches:
        return "epoch 1 comes in the order of epoch 0.\nThe epoch belongs into the generator's seed."
    if made(words, 32, 1, 0) == made(words, 32, 0, 1):
        return "(seed 1, epoch 0) and (seed 0, epoch 1) have one order: their sum is no seed.\nGive the pair."
    longest = [max(words[index] for index in batch) for batch in batches]
    if longest == sorted(longest) or longest == sorted(longest, reverse=True):
        return "the batches come sorted by length: the net sees only short words, then only long.\nShuffle the batches."
    if sorted(map(sorted, made(words, 32, 0, 1))) == sorted(map(sorted, batches)):
        return (
            "every epoch has the same batches, in another order.\n"
            "Shuffle the indices before they are sorted: a stable sort keeps that order among equal lengths."
        )
    return None


bucket_batches = PropertyExercise(
    "bucket_batches",
    _fault_of_buckets,
    [
        Misconception(
            lambda lengths, batch_size, seed, epoch: [
                batch for batch in _buckets(lengths, batch_size, seed, epoch) if len(batch) == batch_size
            ],
            "Each index belongs into exactly one batch, those of a short last batch too.",
        ),
        Misconception(
            lambda lengths, batch_size, seed, epoch: _buckets(lengths, 2 * batch_size, seed, epoch),
            "a batch has 4 indices, asked for are at most 2.",
        ),
        Misconception(_shuffled_batches, "Words of one length belong together: that is the bucket."),
        Misconception(
            lambda lengths, batch_size, seed, epoch: _buckets(
                lengths, batch_size, seed, epoch, np.random.default_rng()
            ),
            "Draw from a generator made of the two, not a global one.",
        ),
        Misconception(
            lambda lengths, batch_size, seed, epoch: _buckets(lengths, batch_size, seed, 0),
            "The epoch belongs into the generator's seed.",
        ),
        Misconception(
            lambda lengths, batch_size, seed, epoch: _buckets(lengths, batch_size, seed + epoch, 0),
            "their sum is no seed.\nGive the pair.",
        ),
        Misconception(
            lambda lengths, batch_size, seed, epoch: _buckets(lengths, batch_size, seed, epoch, shuffle_batches=False),
            "Shuffle the batches.",
        ),
        Misconception(
            lambda lengths, batch_size, seed, epoch: _buckets(lengths, batch_size, seed, epoch, shuffle_samples=False),
            "Shuffle the indices before they are sorted: a stable sort keeps that order among equal lengths.",
        ),
    ],
)


def _fault_of_prefetched(prefetched: Any) -> str | None:
    asking = threading.get_ident()
    for number, ahead in ((1, 2), (6, 2), (50, 4)):
        drawn, drawn_at, results = 0, [], []
        fetched_by: set[int] = set()

        def tasks(number: int = number) -> Iterator[int]:
            nonlocal drawn
            for task in range(number):
                drawn += 1
                yield task

        def fetch(task: int, fetched_by: set[int] = fetched_by) -> int:
            fetched_by.add(threading.get_ident())
            time.sleep(0.05 if task == 0 else 0)  # the slowest comes first
            return 10 * task

        for result in prefetched(fetch, tasks(), ahead):
            results.append(result)
            drawn_at.append(drawn)
        setting = f"{number} tasks, {ahead} ahead: "
        if sorted(results) != [10 * task for task in range(number)]:
            return (
                f"{setting}{len(results)} results came.\nAfter the last task, what is still ahead has to be given out."
            )
        if results != sorted(results):
            return (
                f"{setting}the results begin with {results[:4]}.\nWait for the oldest, not for the first that is ready."
            )
        for position, count in enumerate(drawn_at):
            told = f"{setting}when result {position} came, {count} tasks had been drawn.\n"
            if count > position + 1 + ahead:
                return f"{told}At most `ahead` may be under way behind the one that is given out."
            if count < min(number, position + ahead):
                return f"{told}As many as `ahead` should be under way, all the time."
        if asking in fetched_by:
            return f"{setting}the thread that asks fetches.\nHand the tasks to a pool, or nothing runs meanwhile."
    return None


def _by_map(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    with ThreadPoolExecutor(4) as pool:
        yield from pool.map(fetch, tasks)


def _by_window(fetch: Any, tasks: Any, ahead: int, give_rest: bool = True) -> Iterator[Any]:
    pending: deque[Any] = deque()
    with ThreadPoolExecutor(4) as pool:
        for task in tasks:
            pending.append(pool.submit(fetch, task))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while give_rest and pending:
            yield pending.popleft().result()


def _by_first_ready(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks, pending = iter(tasks), []
    with ThreadPoolExecutor(4) as pool:
        for task in itertools.islice(tasks, ahead):
            pending.append(pool.submit(fetch, task))
        while pending:
            ready = next((future for future in pending if future.done()), None)
            if ready is not None:
                pending.remove(ready)
                pending.extend(pool.submit(fetch, task) for task in itertools.islice(tasks, 1))
                yield ready.result()


def _by_blocks(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks = iter(tasks)
    with ThreadPoolExecutor(4) as pool:
        while block := list(itertools.islice(tasks, ahead)):
            yield from pool.map(fetch, block)


def _ahead_in_this_thread(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks, pending = iter(tasks), deque()  # type: ignore[var-annotated]
    pending.extend(itertools.islice(tasks, ahead))
    while pending:
        result = fetch(pending.popleft())
        pending.extend(itertools.islice(tasks, 1))
        yield result


prefetched = PropertyExercise(
    "prefetched",
    _fault_of_prefetched,
    [
        Misconception(_by_map, "At most `ahead` may be under way behind the one that is given out."),
        Misconception(
            lambda fetch, tasks, ahead: _by_window(fetch, tasks, ahead, give_rest=False),
            "After the last task, what is still ahead has to be given out.",
        ),
        Misconception(_by_first_ready, "Wait for the oldest, not for the first that is ready."),
        Misconception(_by_blocks, "As many as `ahead` should be under way, all the time."),
        Misconception(_ahead_in_this_thread, "Hand the tasks to a pool, or nothing runs meanwhile."),
    ],
)


def _fault_of_share(share: Any) -> str | None:
    for number, workers in ((6, 0), (6, 1), (6, 2), (10, 3), (2, 5)):
        infos: list[Any] = [types.SimpleNamespace(id=i, num_workers=workers) for i in range(workers)] or [None]
        read = [list(share(iter(range(number)), info)) for info in infos]
        setting = f"{number} lines, {workers} workers: {read}"
        if lost := _missing_and_twice(itertools.chain(*read), range(number)):
            told = "Without workers, one process reads all." if not workers else "Each line belongs to one worker."
            return f"{setting}\n{lost}. {told}"
        if max(map(len, read)) - min(map(len, read)) > 1:
            return f"{setting}\nShares may differ by one line: here some still read while others have nothing left."
    return None


share = PropertyExercise(
    "share",
    _fault_of_share,
    [
        Misconception(lambda lines, info: lines, "0 are missing and 6 come again. Each line belongs to one worker."),
        Misconception(
            lambda lines, info: lines if info is None else itertools.islice(lines, info.id, None),
            "0 are missing and 5 come again. Each line belongs to one worker.",
        ),
        Misconception(
            lambda lines, info: itertools.islice(
                lines, 1 if info is None else info.id, None, info and info.num_workers
            ),
            "Without workers, one process reads all.",
        ),
        Misconception(
            lambda lines, info: lines if info is None or info.id == 0 else [],
            "Shares may differ by one line: here some still read while others have nothing left.",
        ),
        Misconception(
            lambda lines, info: (
                lines
                if info is None
                else (line for i, line in enumerate(lines) if i % info.num_workers == (info.id + 1))
            ),
            "6 are missing and 0 come again. Each line belongs to one worker.",
        ),
    ],
)

EXERCISES = (pad_collate, bucket_batches, prefetched, share)
