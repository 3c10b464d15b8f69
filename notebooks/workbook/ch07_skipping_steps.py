"""What chapter 07 shows and asks: what each policy does with a bad batch; and the exercises."""

from __future__ import annotations

import math
from typing import NamedTuple

import ipywidgets
import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn

from course_lib.datasets import load_digits
from course_lib.skipping import StepGuard
from workbook.display import BLUE, GREY, ORANGE, SKY, VERMILION, YELLOW, add_legend, new_figure
from workbook.exercises import Exercise
from workbook.widgets import Explorer, int_slider

OUTCOMES = {
    "update": SKY,
    "skipped": YELLOW,
    "weights are NaN": VERMILION,
    "waits for ever": "#000000",
    "one step ahead": ORANGE,
    "error": GREY,
}
POLICIES = ("nothing", "clip", "the rank alone skips", "None in a Trainer", "StepGuard")


def outcomes(policy: str, ranks: int, steps: int, bad_rank: int, bad_step: int) -> list[list[str]]:
    """What each rank (from 0) does in each step (from 1), when one rank's batch holds a NaN in one step."""
    rows = [["update"] * steps for _ in range(ranks)]
    for rank, row in enumerate(rows):
        if policy in ("nothing", "clip"):
            row[bad_step - 1 :] = ["weights are NaN"] * (steps - bad_step + 1)
        elif policy == "StepGuard" or (policy in ("the rank alone skips", "None in a Trainer") and ranks == 1):
            row[bad_step - 1] = "skipped"
        elif policy == "None in a Trainer":
            row[bad_step - 1 :] = ["error"] * (steps - bad_step + 1)
        elif rank == bad_rank:
            # Its next backward is taken by the others for the one that they wait for.
            row[bad_step - 1 :] = ["skipped"] + ["one step ahead"] * (steps - bad_step)
        else:
            row[-1] = "waits for ever"
    return rows


def policy_explorer() -> Explorer:
    """Which rank is bad at which step → what each rank does under a policy."""

    def render(policy: str, ranks: int, bad_rank: int, bad_step: int) -> tuple[Figure, str]:
        if bad_rank >= ranks:
            raise ValueError(f"there is no rank {bad_rank} of {ranks}: move one of the two")
        rows = outcomes(policy, ranks, 8, bad_rank, bad_step)
        names = list(OUTCOMES)
        figure, axes = new_figure(8.0, 1.6 + 0.4 * ranks)
        shown = [[names.index(outcome) for outcome in row] for row in rows]
        axes.imshow(shown, cmap=ListedColormap(list(OUTCOMES.values())), vmin=0, vmax=len(names) - 1, aspect="auto")
        axes.set(title=f"{policy}: {rows[0].count('update')} updates of 8 on rank 0", xlabel="optimizer steps tried")
        axes.set_xticks(range(8), range(1, 9))
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        for name in dict.fromkeys(outcome for row in rows for outcome in row):
            axes.plot([], [], "s", color=OUTCOMES[name], label=name)
        add_legend(axes, "beside")
        told = [f"rank {rank}: {', '.join(row)}" for rank, row in enumerate(rows)]
        return figure, "\n".join(told)

    controls = {
        "policy": ipywidgets.Dropdown(options=POLICIES, value="the rank alone skips", description="policy"),
        "ranks": int_slider(2, 4, "ranks"),
        "bad_rank": int_slider(1, 3, "the bad rank", lowest=0),
        "bad_step": int_slider(3, 8, "its bad step"),
    }
    return Explorer(controls, render, title="which rank is bad at which step → what each policy does")


class Poisoned(NamedTuple):
    """Digits of which some samples are bad."""

    images: Tensor
    labels: Tensor
    known_bad: Tensor
    """Whether a look at the pixels tells: NaN or exploding. A wrong label looks like any other."""
    test_images: Tensor
    test_labels: Tensor


class Trained(NamedTuple):
    accuracy: float
    updates: int
    good_samples_lost: int
    """Good samples, over all epochs, whose gradient was not applied."""


def poisoned_digits(not_a_number: int = 8, exploding: int = 8, mislabelled: int = 120) -> Poisoned:
    """1,437 digits to train on, some of them bad, and 360 good ones to test with."""
    images, labels = load_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    poisoned, wrong, known_bad = images[train].clone(), labels[train].clone(), torch.zeros(1437, dtype=torch.bool)
    poisoned[:not_a_number, 0, 4, 4] = math.nan
    poisoned[not_a_number : not_a_number + exploding] *= 1e6
    known_bad[: not_a_number + exploding] = True
    mistaken = slice(not_a_number + exploding, not_a_number + exploding + mislabelled)
    wrong[mistaken] = (wrong[mistaken] + 1) % 10
    return Poisoned(poisoned, wrong, known_bad, images[test], labels[test])


def train(
    data: Poisoned, policy: str, *, epochs: int = 8, batch_size: int = 32, device: torch.device | str = "cpu"
) -> Trained:
    """Train a small network on poisoned digits under one policy.

    "nothing"; "clip" (gradient norm 1); "robust loss" (generalized cross-entropy, q = 0.7); "filter" (known bad
    samples are taken out before); "sampler" (batches with a known bad sample are left out); "skip" (a StepGuard that
    judges spikes, and clips what it accepts to norm 1).
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard = StepGuard(model, optimizer, spike_factor=50.0, min_history=8, max_norm=1.0) if policy == "skip" else None
    loss_of = _generalized_cross_entropy if policy == "robust loss" else F.cross_entropy
    updates = lost = 0
    for epoch in range(epochs):
        order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(epoch))
        if policy == "filter":
            order = order[~data.known_bad[order]]
        for indices in order.split(batch_size):
            good = int((~data.known_bad[indices]).sum())
            if policy == "sampler" and good < len(indices):
                lost += good
                continue
            optimizer.zero_grad()
            loss = loss_of(model(data.images[indices].to(device)), data.labels[indices].to(device))
            if guard is not None:
                guard.backward(loss)
                if not guard.step(epoch=epoch):
                    lost += good
                    continue
            else:
                loss.backward()
                if policy == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            updates += 1
    found = model(data.test_images.to(device)).argmax(1).cpu()
    return Trained((found == data.test_labels).float().mean().item(), updates, lost)


def _generalized_cross_entropy(logits: Tensor, labels: Tensor, q: float = 0.7) -> Tensor:
    """Between cross-entropy and the mean absolute error: a wrong label pulls less (Zhang and Sabuncu, 2018)."""
    likelihood = logits.softmax(1).gather(1, labels[:, None])
    return ((1 - likelihood**q) / q).mean()


def figure_of_policies(trained: dict[str, Trained]) -> Figure:
    """Accuracy of each policy, with its updates and the good samples that it lost."""
    figure, axes = new_figure(9.0, 3.4)
    ranked = sorted(trained.items(), key=lambda item: item[1].accuracy)
    for row, (_, run) in enumerate(ranked):
        axes.barh(row, run.accuracy, color=BLUE if run.accuracy > 0.5 else VERMILION)
        lost = f"{run.updates} updates, {run.good_samples_lost} good samples lost"
        axes.annotate(lost, (run.accuracy, row), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_title("One NaN that is applied costs everything; a skip costs its batch")
    axes.set(xlabel="accuracy on the test digits after 8 epochs", ylabel="policy", xlim=(0, 1.45))
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.set_yticks(range(len(ranked)), [name for name, _ in ranked])
    return figure


def _finite(values: list[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _wrong_updates(own_loss: float, reduced_gradient: list[float]) -> dict[str, bool]:
    own, reduced = math.isfinite(own_loss), _finite(reduced_gradient)
    no_nan = not any(math.isnan(value) for value in reduced_gradient)
    one_is_finite = any(math.isfinite(value) for value in reduced_gradient)
    return {
        "{got} lets this rank's own loss speak for the gradient. Here another rank's NaN is in it.": own,
        "{got} lets this rank skip for what the others cannot see: they update. (To make them see, the loss has to "
        "be marked before its backward pass.)": own and reduced,
        "{got} looks for NaN alone: an infinite gradient makes the weights infinite.": no_nan,
        "{got} looks at the first element alone: one bad element is enough.": math.isfinite(reduced_gradient[0]),
        "{got} is upside down: the question is whether to update, not whether to skip.": not reduced,
        "{got} is content with one finite element: the others would be applied too.": one_is_finite,
        "{got} updates whatever comes: the weights become NaN.": True,
    }


update_together = Exercise(
    "update",
    solution=lambda own_loss, reduced_gradient: _finite(reduced_gradient),
    cases=[
        dict(own_loss=0.5, reduced_gradient=[0.1, -0.2]),
        dict(own_loss=math.nan, reduced_gradient=[math.nan, math.nan]),
        dict(own_loss=math.nan, reduced_gradient=[math.nan, 0.2]),
        dict(own_loss=0.5, reduced_gradient=[math.nan, 0.2]),
        dict(own_loss=0.5, reduced_gradient=[0.2, math.nan]),
        dict(own_loss=0.5, reduced_gradient=[0.1, -math.inf]),
        dict(own_loss=math.inf, reduced_gradient=[0.1, -0.2]),
    ],
    misconceptions=_wrong_updates,
)


def _wrong_rates(finite: list[bool], horizon: int) -> dict[str, list[float]]:
    updates, attempts = range(sum(finite)), range(len(finite))
    of_attempts = [1 - attempt / horizon for attempt in attempts]
    of_attempts_that_updated = [rate for rate, updated in zip(of_attempts, finite, strict=True) if updated]
    one_ahead = [1 - (update + 1) / horizon for update in updates]
    at_attempts = [1 - sum(finite[:attempt]) / horizon for attempt in attempts]
    own_horizon = [1 - update / len(updates) for update in updates]
    return {
        "{got} moves the schedule with every attempt: after a skip it is too low.": of_attempts_that_updated,
        "{got} steps the schedule before the update: the first update has the full rate.": one_ahead,
        "{got} holds the schedule still, where it should follow the updates.": [1.0 for _ in updates],
        "{got} ends with the first update: is `return` inside the loop?": [1.0] if any(finite) else [],
        "{got} has an entry for each attempt: only updates use a rate.": at_attempts,
        "{got} has a rate for skipped attempts as well: there, no update uses one.": of_attempts,
        "{got} takes the number of updates for the horizon, which is given.": own_horizon,
    }


learning_rates = Exercise(
    "learning_rates",
    solution=lambda finite, horizon: [1 - update / horizon for update in range(sum(finite))],
    cases=[
        dict(finite=[True, True], horizon=4),
        dict(finite=[True, True, True], horizon=8),
        dict(finite=[True, False, True], horizon=4),
        dict(finite=[False, True, False, False, True, True], horizon=8),
    ],
    misconceptions=_wrong_rates,
)

batches_trained = Exercise(
    "batches trained",
    solution=3 * 2,
    misconceptions={
        "{got} takes -1 for 'skip this batch': it ends the epoch.": 27,
        "{got} lets the epochs after the first run through: their third batch is bad as well.": 22,
        "{got} counts the bad batch of each epoch as trained: the hook runs before training_step.": 9,
        "{got} loses one epoch's worth: every epoch ends at its third batch.": 20,
        "{got} is one batch an epoch: how many come before the bad one?": 3,
        "{got} skips one batch in all: the bad one comes again in every epoch.": 29,
        "{got} is one epoch. The next one starts, and ends at its third batch.": 2,
        "{got} is all of them: nothing would have been skipped.": 30,
    },
)

EXERCISES = (update_together, learning_rates, batches_trained)
