"""What chapter 07 shows: which rank answers which at an all-reduce, and what a skip and a clip each cure."""

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
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor, nn

from course_lib.datasets import load_digits
from course_lib.launch import RankTimeout, run_ranks
from course_lib.skipping import StepGuard
from workbook.ch07_exercises import EXERCISES, batches_trained, learning_rates, update_together
from workbook.display import BLUE, GREY, ORANGE, SKY, VERMILION, YELLOW, add_legend_below, new_figure
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

    Each rank notes, in ``rank0.txt`` and ``rank1.txt`` of the folder, the steps whose backward pass came back.
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


def events_of(answered: Sequence[Sequence[int]], steps: int, skipped: Sequence[int] = ()) -> list[list[Event]]:
    """The events of a run, from the steps whose backward pass came back on each rank, in order.

    ``skipped`` are the steps that all ranks left out after their backward pass.
    """
    rows = []
    for own in answered:
        row: list[Event] = []
        for call, step in enumerate(own):
            missing = range(own[call - 1] + 1 if call else 0, step)
            row += [Event(left_out, None, "skips") for left_out in missing]
            alike = all(len(other) > call and other[call] == step for other in answered)
            row.append(Event(step, call, "skips" if step in skipped else "update" if alike else "mixed"))
        if own[-1] < steps - 1:
            row.append(Event(own[-1] + 1, len(own), "waits"))
        rows.append(row)
    return rows


def figure_of_skips(norms: Sequence[float]) -> Figure:
    """Two ranks that make every call, and skip the steps whose norm is not finite."""
    steps = list(range(len(norms)))
    skipped = [step for step in steps if not math.isfinite(norms[step])]
    rows = events_of([steps, steps], steps=len(steps), skipped=skipped)
    return figure_of_calls(rows, f"Every rank makes every call, and both skip step {', '.join(map(str, skipped))}")


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


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Parameters, buffers and the optimizer's state, in one row of doubles."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += state.values()
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


class Poisoned(NamedTuple):
    """Digits of which some samples are bad."""

    images: Tensor
    labels: Tensor
    known_bad: Tensor
    """Whether the pixels are NaN or far too large."""
    test_images: Tensor
    test_labels: Tensor


class Trained(NamedTuple):
    accuracy: float
    updates: int
    large_applied: int
    """Updates made from a batch that holds a sample that is too large, and no NaN."""


def poisoned_digits(*, not_a_number: int, too_large: int) -> Poisoned:
    """1,437 digits to train on, some with a NaN pixel, some a million times too large; and 360 good ones to test."""
    images, labels = load_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train_on, test_on = order[:1437], order[1437:]
    poisoned, known_bad = images[train_on].clone(), torch.zeros(1437, dtype=torch.bool)
    poisoned[:not_a_number, 0, 4, 4] = math.nan
    poisoned[not_a_number : not_a_number + too_large] *= 1e6
    known_bad[: not_a_number + too_large] = True
    return Poisoned(poisoned, labels[train_on], known_bad, images[test_on], labels[test_on])


def train(
    data: Poisoned,
    *,
    skip: bool = False,
    max_norm: float | None = None,
    spike_factor: float | None = None,
    filtered: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Trained:
    """Train a small network for four epochs; ``filtered`` leaves out the samples known to be bad."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bounds: Any = dict(max_norm=max_norm, spike_factor=spike_factor, max_consecutive_skips=None)
    guard = StepGuard(model, optimizer, **bounds)
    updates = large_applied = 0
    for indices in batches_of(data, filtered, seed):
        images = data.images[indices]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), data.labels[indices].to(device))
        if skip:
            guard.backward(loss)
            updated = bool(guard.step())
        else:
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            updated = True
        updates += updated
        large_applied += updated and images.max().item() > 1e3  # False where a pixel is NaN
    found = model(data.test_images.to(device)).argmax(1).cpu()
    return Trained((found == data.test_labels).float().mean().item(), updates, large_applied)


def batches_of(data: Poisoned, filtered: bool, seed: int, epochs: int = 4) -> Iterator[Tensor]:
    """The indices of batches of 32, shuffled in every epoch."""
    for epoch in range(epochs):
        order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(100 * seed + epoch))
        if filtered:
            order = order[~data.known_bad[order]]
        yield from order.split(32)


def outcome_of(runs: Sequence[Trained]) -> str:
    """In words that are the same on every machine: whether runs of several seeds learned, and their updates."""
    accuracies = [run.accuracy for run in runs]
    fewest, most = min(run.updates for run in runs), max(run.updates for run in runs)
    updates = str(most) if fewest == most else f"{fewest} to {most}"
    if min(accuracies) > 0.85:
        verdict = "learns"
    elif max(accuracies) < 0.25:
        verdict = "guesses"
    else:
        verdict = "depends on the seed"
    return f"{verdict} ({updates} updates)"


TITLES = {
    "NaN pixels": "NaN pixels:\na skip helps, a clip does not",
    "too large": "Too large by a million:\na clip helps, a skip does not",
    "both": "Both:\nit takes both",
}


def figure_of_policies(trained: Mapping[str, Mapping[str, Sequence[Trained]]]) -> Figure:
    """Accuracies by fault (a panel each) and policy (a row each), a circle for each seed."""
    figure, panels = new_figure(10.0, 3.4, columns=len(trained))
    for axes, (fault, by_policy) in zip(panels, trained.items(), strict=True):
        for row, runs in enumerate(by_policy.values()):
            for run in runs:
                colour = BLUE if run.accuracy > 0.85 else VERMILION
                axes.plot(run.accuracy, row, "o", color=colour, markersize=8, markerfacecolor="none")
        names = list(by_policy) if axes is panels[0] else [""] * len(by_policy)
        axes.set_yticks(range(len(by_policy)), names)
        axes.set(xlim=(0, 1.05), ylim=(len(by_policy) - 0.5, -0.5), xlabel="accuracy (share of 360 digits)")
        axes.set_title(TITLES[fault], fontsize=11)
        axes.grid(axis="y", color=GREY, alpha=0.4)
    panels[0].set_ylabel("policy")
    add_legend_below(figure, [Line2D([], [], color="black", linestyle="", marker="o", mfc="none", label="a seed")])
    return figure
