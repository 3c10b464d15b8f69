"""What chapter 07 asks: to skip unanimously, to let a schedule follow the updates, and to read what -1 means."""

from __future__ import annotations

import math
import random
from typing import Any

from workbook.exercises import Exercise


def _finite(values: list[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _wrong_updates(own_loss: float, reduced_gradient: list[float]) -> dict[str, bool]:
    own, reduced = math.isfinite(own_loss), _finite(reduced_gradient)
    return {
        "{got} comes from this rank's own loss. Here another rank's NaN is in the reduced gradient.": own,
        "{got} makes this rank skip for a reason that the other ranks cannot see: they update. (For them to see it, "
        "the loss must be marked before its backward pass.)": own and reduced,
        "{got} comes from looking for NaN alone: an infinite gradient makes the weights infinite.": not any(
            math.isnan(value) for value in reduced_gradient
        ),
        "{got} judges how large the gradient is. A large finite gradient keeps every weight finite; clip it, if "
        "you like, but do not skip it here.": math.sqrt(sum(value**2 for value in reduced_gradient)) < 1,
        "{got} updates with a NaN, and the weights become NaN. Ask math.isfinite of each element: a NaN is equal to "
        "nothing, and max() passes over it.": True,
    }


def _draw_update(generator: random.Random) -> dict[str, Any]:
    """Most elements are good, small and large ones; what is bad is in any place, and is no constant of ``math``."""
    good = [0.0, -0.0, 1e-30, 65_505.0, -1e6, 1e18, generator.uniform(-1, 1), generator.gauss(0, 100)]
    gradient = [generator.choice(good) for _ in range(generator.randint(1, 7))]
    bad = [float("nan"), float("inf"), float("-inf")]
    for _ in range(generator.choice([0, 0, 1, 1, 2])):
        gradient[generator.randrange(len(gradient))] = generator.choice(bad)
    return dict(own_loss=generator.choice([0.0, 0.5, -3.0, 1e6, *bad]), reduced_gradient=gradient)


update_together = Exercise(
    "update",
    solution=lambda own_loss, reduced_gradient: _finite(reduced_gradient),
    cases=[
        dict(own_loss=0.5, reduced_gradient=[0.1, -0.2]),
        dict(own_loss=math.nan, reduced_gradient=[math.nan, math.nan]),
        dict(own_loss=math.nan, reduced_gradient=[math.nan, 0.2]),
        dict(own_loss=0.5, reduced_gradient=[math.nan, 0.2]),
        dict(own_loss=0.5, reduced_gradient=[math.inf, math.inf]),
        dict(own_loss=0.5, reduced_gradient=[math.inf, 0.1]),
        dict(own_loss=0.5, reduced_gradient=[0.1, math.inf]),
        dict(own_loss=0.5, reduced_gradient=[0.2, math.nan]),
        dict(own_loss=0.5, reduced_gradient=[0.1, -math.inf]),
        dict(own_loss=0.5, reduced_gradient=[30_000.0, -2.0]),
        dict(own_loss=math.inf, reduced_gradient=[0.1, -0.2]),
        dict(own_loss=math.nan, reduced_gradient=[0.1, -0.2]),
        dict(own_loss=0.5, reduced_gradient=[1e5, 1e4]),
        dict(own_loss=0.5, reduced_gradient=[1e18] * 20),
        dict(own_loss=0.5, reduced_gradient=[1.8e19]),  # whose square is finite in float32, too
    ],
    misconceptions=_wrong_updates,
    search=_draw_update,
)


def _wrong_rates(finite: list[bool], horizon: int) -> dict[str, list[Any]]:
    of_attempts = [1 - attempt / horizon for attempt in range(len(finite))]
    return {
        "{got} moves the schedule with every attempt: after a skip it is too low.": [
            rate for rate, updated in zip(of_attempts, finite, strict=True) if updated
        ],
        "{got} steps the schedule before the update: the first update has the full rate.": [
            1 - (update + 1) / horizon for update in range(sum(finite))
        ],
        "{got} has an entry for each attempt: only updates use a rate.": [
            1 - sum(finite[:attempt]) / horizon for attempt in range(len(finite))
        ],
        "{got} ends with the first update: is `return` inside the loop?": [1.0] if any(finite) else [],
    }


def _draw_rates(generator: random.Random) -> dict[str, Any]:
    """Attempts of any kind, also none; a horizon that the updates reach at most."""
    finite = [generator.random() < 0.6 for _ in range(generator.randint(0, 16))]
    return dict(finite=finite, horizon=max(1, sum(finite)) + generator.choice([0, 0, 1, 2, 7]))


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
    search=_draw_rates,
)

BATCHES, BAD_BATCHES = 12, ([5, 9], [6], [0])
"""Of an epoch; and the bad ones of each of three epochs, counted from 0."""

batches_trained = Exercise(
    "batches trained",
    solution=5 + 6 + 0,
    misconceptions={
        "{got} takes -1 for 'skip this batch': it ends the epoch.": 32,
        "{got} counts the bad batches that end the epochs as trained: the hook runs before training_step.": 14,
        "{got} ends the whole training at the first bad batch: the next epoch starts as usual.": 5,
        "{got} reads the positions as counted from 1: before batch 5, five batches were trained (0 to 4).": 9,
    },
)

EXERCISES = (update_together, learning_rates, batches_trained)
