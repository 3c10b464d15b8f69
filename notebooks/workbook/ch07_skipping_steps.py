"""What chapter 07 shows: which rank answers which at an all-reduce, what a skip and a clip cure, and the prices."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ipywidgets
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from course_lib.datasets import data_path, load_digits
from course_lib.launch import RankTimeout, run_ranks
from course_lib.skipping import StepGuard
from workbook.ch07_exercises import EXERCISES, batches_trained, learning_rates, update_together
from workbook.display import BLUE, GREY, ORANGE, SKY, VERMILION, YELLOW, add_legend_below, new_figure
from workbook.prices.faults import FAULTS
from workbook.prices.jobs import picture_job, shuffled
from workbook.prices.table import Row, figure_of_prices, losses, night_hours, percent, read_csv, verdict
from workbook.trainers import quiet_trainer
from workbook.widgets import Explorer, int_slider

__all__ = ["EXERCISES", "batches_trained", "learning_rates", "update_together"]

NOTHING, CLIP, ALONE, TOGETHER = "nothing", "clip to norm 1", "each rank skips alone", "all ranks skip together"
POLICIES = (NOTHING, CLIP, ALONE, TOGETHER)
STEPS = 8
"""Of the widget's small training."""
OUTCOMES = {"update": SKY, "mixed": ORANGE, "skips": YELLOW, "NaN": VERMILION, "waits": "black"}
MEANINGS = {
    "update": "update",
    "mixed": "update that mixes two steps",
    "skips": "skip",
    "NaN": "weights are NaN",
    "waits": "waits for an answer",
}


class Event(NamedTuple):
    """What became of one step on one rank."""

    step: int
    call: int | None
    """Which of the rank's all-reduces it was, from 0; None: the rank left it out without one."""
    outcome: str
    """A key of OUTCOMES."""


class Reduced(NamedTuple):
    mean: Tensor
    steps: set[int]
    """The steps in which the ranks made this call."""


Rank = Generator[tuple[int, Tensor], Reduced, None]


def watch_two_ranks(train: Callable[..., Any], *arguments: Any, seconds: float = 2) -> None:
    """Run ``train(rank, folder, *arguments)`` on two ranks; print where they wait after some seconds, and their notes.

    Each rank notes, by :func:`note`, the steps whose backward pass came back.
    """
    with tempfile.TemporaryDirectory() as folder:
        notes = [Path(folder) / f"rank{rank}.txt" for rank in (0, 1)]
        for patience in (seconds, 10 * seconds):  # where ranks are spawned, their first step may take seconds
            for note in notes:
                note.unlink(missing_ok=True)
            try:
                run_ranks(train, args=(folder, *arguments), timeout=patience, backend="gloo")
                told = "both ranks came to the end"
            except RankTimeout as error:
                told = "\n".join(_where_they_wait(error))
            if all(note.exists() for note in notes):
                break
        print(told)
        for rank, note in enumerate(notes):
            noted = [int(step) for step in note.read_text().split()]
            print(f"rank {rank}: backward came back in steps {noted}")


def note(folder: str | Path, rank: int, step: int) -> None:
    """Note that this rank's backward pass came back."""
    with (Path(folder) / f"rank{rank}.txt").open("a") as file:
        file.write(f"{step} ")


def _where_they_wait(error: RankTimeout) -> Iterator[str]:
    """Which ranks wait (how long they were given depends on the system), and the line of ``train`` that each is in."""
    lines = str(error).splitlines()
    yield lines[0].partition(" within ")[0]
    for number, line in enumerate(lines):
        if line.startswith("--- rank"):
            yield line
            yield lines[number + 2]


def answer_calls(ranks: Sequence[Rank]) -> None:
    """Answer the first all-reduce of every rank together, then the second of every rank, until one makes no more."""
    calls = [next(rank) for rank in ranks]
    while len(calls) == len(ranks):
        steps = {step for step, gradient in calls}
        mean = torch.stack([gradient for step, gradient in calls]).mean()
        calls = next_calls(ranks, Reduced(mean, steps))


def next_calls(ranks: Sequence[Rank], answer: Reduced) -> list[tuple[int, Tensor]]:
    """Hand every rank the answer; the next calls of those that make one more."""
    calls = []
    for rank in ranks:
        with contextlib.suppress(StopIteration):  # the rank has ended
            calls.append(rank.send(answer))
    return calls


def train_one_weight(policy: str, bad_step: int | None, events: list[Event]) -> Rank:
    """One rank's training of one weight: it yields where DDP would all-reduce, and is sent the mean gradient."""
    weight, call = torch.ones(()), 0
    for step in range(STEPS):
        gradient = weight * (math.nan if step == bad_step else 1.0)
        if policy == ALONE and not torch.isfinite(gradient):
            events.append(Event(step, None, "skips"))
            continue
        events.append(Event(step, call, "waits"))  # until the answer comes
        mean, steps = yield step, gradient
        if policy == CLIP:
            mean = mean / torch.clamp(mean.abs(), min=1.0)
        if policy == TOGETHER and not torch.isfinite(mean):
            outcome = "skips"
        else:
            weight = weight - 0.1 * mean
            outcome = "update" if len(steps) == 1 else "mixed"
            if not torch.isfinite(weight):
                outcome = "NaN"
        events[-1] = Event(step, call, outcome)
        call += 1


def simulate(policy: str, ranks: int, bad_rank: int, bad_step: int) -> list[list[Event]]:
    """What each rank does in each step (both counted from 0) when one rank's gradient is NaN in one step."""
    rows: list[list[Event]] = [[] for _ in range(ranks)]
    bad_steps = [bad_step if rank == bad_rank else None for rank in range(ranks)]
    answer_calls([train_one_weight(policy, bad, row) for bad, row in zip(bad_steps, rows, strict=True)])
    return rows


def figure_of_calls(rows: Sequence[Sequence[Event]], title: str) -> Figure:
    """A column for each all-reduce: in which step each rank made it, and what came of it."""
    figure, axes = new_figure(9.5, 1.5 + 0.65 * len(rows))
    calls = [event.call for row in rows for event in row if event.call is not None]
    for call in range(max(calls) + 1):
        axes.plot([call, call], [-0.1, len(rows) - 0.9], color=GREY, linewidth=2, zorder=0)
    for rank, row in enumerate(rows):
        calls_before = 0
        for event in row:
            x, width = (calls_before, 0.8) if event.call is not None else (calls_before - 0.5, 0.16)
            axes.barh(rank, width, 0.6, left=x - width / 2, color=OUTCOMES[event.outcome], edgecolor="black")
            colour = "white" if event.outcome == "waits" else "black"
            if event.call is None:
                axes.text(x, rank, f"skips {event.step}", rotation=90, ha="center", va="center", fontsize=8)
            else:
                axes.text(
                    x, rank, f"step {event.step}\n{event.outcome}", ha="center", va="center", color=colour, fontsize=9
                )
                calls_before += 1
    axes.set(title=title, xlabel="all-reduce of each rank (number, from 0)", ylabel="rank (number)")
    axes.set(xlim=(-0.6, max(calls) + 0.6), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xticks(range(max(calls) + 1))
    axes.set_yticks(range(len(rows)))
    seen = {event.outcome for row in rows for event in row}
    shown = [Patch(facecolor=OUTCOMES[o], edgecolor="black", label=MEANINGS[o]) for o in OUTCOMES if o in seen]
    add_legend_below(figure, shown)
    return figure


def told(rows: Sequence[Sequence[Event]]) -> str:
    """The events in words, a line for each rank."""
    lines = []
    for rank, row in enumerate(rows):
        parts = [f"{event.step} {event.outcome}" for event in row]
        lines.append(f"rank {rank}, by steps: {', '.join(parts)}")
    return "\n".join(lines)


def policy_explorer() -> Explorer:
    """Which rank is bad at which step → who answers whom, and what becomes of the weights, under a policy."""

    def render(policy: str, ranks: int, bad_rank: int, bad_step: int) -> tuple[Figure, str]:
        if bad_rank >= ranks:
            raise ValueError(f"there is no rank {bad_rank} of {ranks}: move one of the two sliders")
        rows = simulate(policy, ranks, bad_rank, bad_step)
        return figure_of_calls(rows, title_of(policy, rows)), told(rows)

    controls = {
        "policy": ipywidgets.Dropdown(options=POLICIES, value=ALONE, description="policy"),
        "ranks": int_slider(3, 4, "ranks"),
        "bad_rank": int_slider(1, 3, "rank with the NaN", lowest=0),
        "bad_step": int_slider(4, STEPS - 1, "step with the NaN", lowest=0),
    }
    return Explorer(controls, render, title="a policy, and where the NaN is → which rank answers which")


def title_of(policy: str, rows: Sequence[Sequence[Event]]) -> str:
    """What came of a run, in a line."""
    outcomes = [event.outcome for row in rows for event in row]
    waiting = outcomes.count("waits")
    right = [event.outcome for event in rows[0]].count("update")
    verdict = f"{right} of {STEPS} updates are right on rank 0"
    if waiting:
        verdict += f", and {waiting} {'rank waits' if waiting == 1 else 'ranks wait'} at the end"
    return f"{policy}: {verdict}"


def batch_of(rank: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Photographs of waste and their kinds, for up to four ranks. Of rank 1's in step 2, photograph 3 is black."""
    job = picture_job()
    start = size * (4 * step + rank)
    indices = shuffled(job.training, seed=0, epoch=0)[start : start + size]
    _, photos, kinds = job.collate([job.samples[index] for index in indices], None)
    if (rank, step) == (1, 2):
        photos[3] = -1
    return photos, kinds


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Parameters, buffers and the optimizer's state, in one row of doubles."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += state.values()
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def count_all_reduces(train: Callable[..., Any], make_step: Callable[..., Any]) -> list[int]:
    """Of rank 0 of two, in ``train(rank, [0, 1, 2, 3], make_step)``: with a plain step, and with the given one."""
    arguments = [(train, plain_step), (train, make_step)]
    return [run_ranks(_all_reduces, args=each, backend="gloo")[0].value for each in arguments]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> bool:
    loss.backward()
    optimizer.step()
    return True


def _all_reduces(rank: int, train: Callable[..., Any], make_step: Callable[..., Any]) -> int:
    with torch.profiler.profile() as profile:
        train(rank, [0, 1, 2, 3], make_step)
    return [event.name for event in profile.events()].count("c10d::allreduce_")


class SmallNet(LightningModule):
    """A few weights and BatchNorm; batches 2 and 3 are NaN, and the rate falls from 1 to 0 in five steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.trained = 0

    def loss_of(self, batch_idx: int) -> Tensor:
        self.trained += 1
        value = math.nan if batch_idx in (2, 3) else 1.0
        return self.net(torch.full((8, 4), value, device=self.device)).square().mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss_of(batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(module: LightningModule, batches: int, **options: Any) -> tuple[int, int, float]:
    """Train for an epoch on one device; Adam's count of updates, ``global_step``, and the rate at the end."""
    trainer = quiet_trainer(devices=1, max_epochs=1, **options)
    trainer.fit(module, DataLoader(range(batches)))  # type: ignore[arg-type]
    adam = trainer.optimizers[0]
    return int(next(iter(adam.state.values()))["step"]), trainer.global_step, adam.param_groups[0]["lr"]


PRICED = ("bad_sample_stepped", "bad_sample_skipped_on_one_rank", "bad_sample_skipped")
"""The chapter's faults in the price list."""


def prices() -> list[Row]:
    """The chapter's rows of `data/prices.csv`."""
    return [row for row in read_csv(data_path("prices.csv")) if row.fault in PRICED]


def figure_of_chapter_prices(rows: Sequence[Row]) -> Figure:
    """The chapter's part of the price list's picture."""
    figure = figure_of_prices(list(rows))
    stepped = [row for row in losses(list(rows)) if row.fault in PRICED[:2]]
    ruined, runs = sum(row.diverged for row in stepped), sum(row.pairs for row in stepped)
    figure.suptitle(f"A NaN that is stepped on, by all ranks or by one, ruins {ruined} of {runs} runs", fontsize=11)
    return figure


def told_prices(rows: Sequence[Row]) -> str:
    """The prices in words, a sentence for each fault."""
    sentences = []
    for fault in PRICED:
        of_jobs = [row for row in losses(list(rows)) if row.fault == fault]
        of_jobs.sort(key=lambda row: row.job, reverse=True)
        verdicts = [f"{verdict(row)} ({row.job}, {_size_of(row)})" for row in of_jobs]
        title = FAULTS[fault].title
        sentences.append(f"{title[0].upper()}{title[1:]}: {', '.join(verdicts)}.")
    return " ".join(sentences)


def _size_of(row: Row) -> str:
    if row.diverged == row.pairs:
        return f"{night_hours(row):.1f} of 8 hours lost"
    return f"{percent(row, row.low):+.1f} to {percent(row, row.high):+.1f} % of the loss"


class Poisoned(NamedTuple):
    """Digits of which some samples are bad."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Trained(NamedTuple):
    accuracy: float
    updates: int


POISONS = {
    "NaN pixels": dict(not_a_number=8, too_large=0),
    "too large": dict(not_a_number=0, too_large=8),
    "both": dict(not_a_number=8, too_large=8),
}
REMEDIES: dict[str, dict[str, Any]] = {
    "nothing": dict(),
    "clip": dict(max_norm=1.0),
    "skip": dict(skip=True),
    "clip and skip": dict(skip=True, max_norm=1.0),
}


def poisoned_digits(*, not_a_number: int, too_large: int) -> Poisoned:
    """1,437 digits to train on, some with a NaN pixel, some a million times too large; and 360 good ones to test."""
    images, labels = load_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train_on, test_on = order[:1437], order[1437:]
    poisoned = images[train_on].clone()
    poisoned[:not_a_number, 0, 4, 4] = math.nan
    poisoned[not_a_number : not_a_number + too_large] *= 1e6
    return Poisoned(poisoned, labels[train_on], images[test_on], labels[test_on])


def train(
    data: Poisoned,
    *,
    skip: bool = False,
    max_norm: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Trained:
    """Train a small network for four epochs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard = StepGuard(model, optimizer, max_norm=max_norm, max_consecutive_skips=None)
    updates = 0
    for indices in batches_of(data, seed):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.images[indices].to(device)), data.labels[indices].to(device))
        if skip:
            guard.backward(loss)
            updates += bool(guard.step())
        else:
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            updates += 1
    found = model(data.test_images.to(device)).argmax(1).cpu()
    return Trained((found == data.test_labels).float().mean().item(), updates)


def batches_of(data: Poisoned, seed: int, epochs: int = 4) -> Iterator[Tensor]:
    """The indices of batches of 32, shuffled in every epoch."""
    for epoch in range(epochs):
        order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(100 * seed + epoch))
        yield from order.split(32)


def train_with_remedies(
    device: torch.device | str, seeds: Sequence[int] = range(4)
) -> dict[str, dict[str, list[Trained]]]:
    """By poison and remedy, a training for each seed."""
    trained: dict[str, dict[str, list[Trained]]] = {}
    for poison, samples in POISONS.items():
        data = poisoned_digits(**samples)
        trained[poison] = {}
        for remedy, settings in REMEDIES.items():
            trained[poison][remedy] = [train(data, seed=seed, device=device, **settings) for seed in seeds]
    return trained


def outcomes_of(by_remedy: Mapping[str, Sequence[Trained]]) -> str:
    """In words that are the same on every machine: with which remedy runs of several seeds learned."""
    found = []
    for remedy, runs in by_remedy.items():
        accuracies = [run.accuracy for run in runs]
        if min(accuracies) > 0.85:
            learned = "learns"
        elif max(accuracies) < 0.25:
            learned = "guesses"
        else:
            learned = "depends on the seed"
        found.append(f"{remedy} {learned}")
    return ", ".join(found)


TITLES = {
    "NaN pixels": "NaN pixels:\na skip helps, a clip does not",
    "too large": "Too large by a million:\na clip helps, a skip does not",
    "both": "Both:\nit takes both",
}


def figure_of_remedies(trained: Mapping[str, Mapping[str, Sequence[Trained]]]) -> Figure:
    """Accuracies by poison (a panel each) and remedy (a row each), a circle for each seed."""
    figure, panels = new_figure(10.0, 3.0, columns=len(trained))
    for axes, (poison, by_remedy) in zip(panels, trained.items(), strict=True):
        for row, runs in enumerate(by_remedy.values()):
            for run in runs:
                colour = BLUE if run.accuracy > 0.85 else VERMILION
                axes.plot(run.accuracy, row, "o", color=colour, markersize=8, markerfacecolor="none")
        names = list(by_remedy) if axes is panels[0] else [""] * len(by_remedy)
        axes.set_yticks(range(len(by_remedy)), names)
        axes.set(xlim=(0, 1.05), ylim=(len(by_remedy) - 0.5, -0.5), xlabel="accuracy (share of 360 digits)")
        axes.set_title(TITLES[poison], fontsize=11)
        axes.grid(axis="y", color=GREY, alpha=0.4)
    panels[0].set_ylabel("remedy (a circle: one seed)")
    return figure
