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
    finite = [math.isfinite(value) for value in reduced_gradient]
    no_nan = not any(math.isnan(value) for value in reduced_gradient)
    one_is_finite = any(math.isfinite(value) for value in reduced_gradient)
    return {
        "{got} comes from this rank's own loss. Here another rank's NaN is in the reduced gradient.": own,
        "{got} makes this rank skip for a reason that the other ranks cannot see: they update. (For them to see it, "
        "the loss must be marked before its backward pass.)": own and reduced,
        "{got} comes from looking for NaN alone: an infinite gradient makes the weights infinite.": no_nan,
        "{got} comes from the smallest element, and min() of a list with an infinity can be finite.": math.isfinite(
            min(reduced_gradient)
        ),
        "{got} comes from the first element alone: one bad element anywhere is enough.": math.isfinite(
            reduced_gradient[0]
        ),
        "{got} comes from max(), which passes over a NaN that is not the first element: every comparison with NaN "
        "is false.": math.isfinite(max(reduced_gradient)),
        "{got} judges how large the gradient is. A large finite gradient keeps every weight finite; clip it, if "
        "you like, but do not skip it here.": math.sqrt(sum(value**2 for value in reduced_gradient)) < 1,
        "{got} is upside down: the question is whether to update, not whether to skip.": not reduced,
        "{got} is satisfied with one finite element, such as the last one that a loop has looked at: the others would "
        "be applied too.": one_is_finite,
        "{got} updates with a NaN, and the weights become NaN. Ask math.isfinite of each element. (A NaN is equal to "
        "nothing, not even to itself, so a comparison with `==` or `!=` does not find it; nor does math.isinf.)": True,
        "{got} skips for this rank's own NaN, which the other ranks cannot see in the gradient: they update.": (
            reduced and not math.isnan(own_loss)
        ),
        "{got} comes from the first and the last element: one bad element anywhere is enough.": finite[0]
        and finite[-1],
        "{got} goes by the majority of the elements: one bad element is enough.": 2 * sum(finite) > len(finite),
        "{got} takes a large number for an infinite one. (65,504 is the largest in half precision only.)": all(
            abs(value) < 65_504 for value in reduced_gradient
        ),
        "{got} takes a large number for an infinite one: the largest in single precision is 3.4 · 10³⁸.": all(
            abs(value) < 1e19 for value in reduced_gradient
        ),
        "{got} comes from a number made of all elements, as a product: it overflows where each of them is finite.": (
            math.isfinite(math.prod(reduced_gradient))
        ),
        "{got} looks for the one object math.nan, by `in`: another NaN is not found. Ask math.isfinite of each "
        "element.": not any(bad in reduced_gradient for bad in (math.nan, math.inf, -math.inf)),
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
    # Each case tells one misconception from all that are still alive.
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
    updates, attempts = range(sum(finite)), range(len(finite))
    skips = len(finite) - len(updates)
    of_attempts = [1 - attempt / horizon for attempt in attempts]
    of_attempts_that_updated = [rate for rate, updated in zip(of_attempts, finite, strict=True) if updated]
    one_ahead = [1 - (update + 1) / horizon for update in updates]
    at_attempts = [1 - sum(finite[:attempt]) / horizon for attempt in attempts]
    own_horizon = [1 - update / len(updates) for update in updates]
    return {
        "{got} moves the schedule with every attempt: after a skip it is too low.": of_attempts_that_updated,
        "{got} steps the schedule before the update: the first update has the full rate.": one_ahead,
        "{got} holds the schedule still, and it should follow the updates. (Does `//` round down to 0?)": [
            1.0 for _ in updates
        ],
        "{got} ends with the first update: is `return` inside the loop?": [1.0] if any(finite) else [],
        "{got} has an entry for each attempt: only updates use a rate.": at_attempts,
        "{got} has a rate for skipped attempts as well: there, no update uses one.": of_attempts,
        "{got} takes the number of updates, or of attempts, for the horizon, which is given.": own_horizon,
        "{got} has None for each skipped attempt: leave it out, the list holds one rate per update.": [
            at_attempts[attempt] if finite[attempt] else None for attempt in attempts
        ],
        "{got} has 0.0 for each skipped attempt: leave it out, the list holds one rate per update.": [
            at_attempts[attempt] if finite[attempt] else 0.0 for attempt in attempts
        ],
        "{got} stretches the horizon by the skips: it is given in updates, and skips do not change it.": [
            1 - update / (horizon + skips) for update in updates
        ],
        "{got} shortens the horizon by the skips: it is given in updates, and skips do not change it.": [
            1 - update / max(horizon - skips, 1) for update in updates
        ],
        "{got} ends at 0 with the last update: the schedule falls to 0 over `horizon` updates, so divide by it.": [
            1 - update / max(horizon - 1, 1) for update in updates
        ],
        "{got} follows a cosine: this schedule falls linearly.": [
            0.5 + 0.5 * math.cos(math.pi * update / horizon) for update in updates
        ],
        "{got} starts the schedule from the beginning after a skip. It should go on where it was.": _restarted(
            finite, horizon
        ),
    }


def _restarted(finite: list[bool], horizon: int) -> list[float]:
    rates, schedule_steps = [], 0
    for ok in finite:
        if ok:
            rates.append(1 - schedule_steps / horizon)
            schedule_steps += 1
        else:
            schedule_steps = 0
    return rates


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
        "{got} is one bad batch less per epoch: -1 does not skip a batch, it ends the epoch.": 33,
        "{got} counts the bad batches that end the epochs as trained: the hook runs before training_step.": 14,
        "{got} counts the bad batches of the first two epochs as trained: the hook runs before training_step.": 13,
        "{got} counts the last epoch's bad batch 0 as trained: the hook runs before training_step.": 12,
        "{got} lets the first epoch go on to its second bad batch: the first one has ended it.": 15,
        "{got} ends the whole training at the first bad batch: the next epoch starts as usual.": 5,
        "{got} ends the first epoch, and skips one batch in the others: there -1 means the same.": 27,
        "{got} lets the last epoch run through: its very first batch is bad.": 23,
        "{got} skips only the first batch of the last epoch: -1 ends that epoch too, before anything is trained.": 22,
        "{got} reads the positions as counted from 1: before batch 5, five batches were trained (0 to 4).": 9,
        "{got} is what is left out, not what is trained.": 25,
        "{got} is all of them: nothing would have been left out.": 36,
    },
)

EXERCISES = (update_together, learning_rates, batches_trained)
