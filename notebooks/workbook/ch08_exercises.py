"""What chapter 08 asks: batches within a budget, windows of one effective batch, and two runs at equal cost."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbook.exercises import Exercise


@dataclass(frozen=True)
class Float:
    """A float in an answer: it equals no int, so that 16.0 does not pass for 16."""

    value: float

    def __repr__(self) -> str:
        return repr(self.value)


def _floats_apart(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    def called(**case: Any) -> Any:
        got = answer(**case)
        if hasattr(got, "tolist"):  # of NumPy or torch
            got = got.tolist()
        if isinstance(got, list | tuple):
            return [Float(value) if isinstance(value, float) else value for value in got]
        return got

    return called


def _batch_sizes(sides: Sequence[int], budget: int, multiple_of: int) -> list[int]:
    return [budget // side**2 // multiple_of * multiple_of for side in sides]


def _wrong_sizes(sides: list[int], budget: int, multiple_of: int) -> dict[str, list[Any]]:
    right = _batch_sizes(sides, budget, multiple_of)
    of_first = budget // sides[0] ** 2
    exact = [budget / side**2 / multiple_of for side in sides]
    return {
        "{got} has floats, and a batch has whole samples: a `DataLoader` refuses a batch size of 16.0. Divide "
        "with `//`.": [float(size) for size in right],
        "{got} divides by the side: twice the side is four times the pixels.": [
            budget // side // multiple_of * multiple_of for side in sides
        ],
        "{got} halves the batch where the side doubles: the pixels are four times as many.": [
            of_first * sides[0] // side // multiple_of * multiple_of for side in sides
        ],
        "{got} rounds up, and so goes beyond the budget: a batch that does not fit is an out-of-memory error.": [
            math.ceil(multiples) * multiple_of for multiples in exact
        ],
        "{got} rounds up to the multiple, and so goes beyond the budget: a batch that does not fit is an "
        "out-of-memory error.": [-(-(budget // side**2) // multiple_of) * multiple_of for side in sides],
        "{got} rounds to the nearest, which may be beyond the budget.": [
            round(multiples) * multiple_of for multiples in exact
        ],
        "{got} is divided in single precision, which keeps about 7 digits of a number. Divide the whole numbers, with "
        "`//`.": [int(np.float32(budget) / side**2) // multiple_of * multiple_of for side in sides],
        "{got} has powers of two, as the widget has. Here any multiple of `multiple_of` will do, and a larger one may "
        "fit.": [_power_of_two(budget // side**2) for side in sides],
        "{got} goes from one stage's batch, already rounded down, to the next: divide the budget in each.": [
            right[0] * sides[0] ** 2 // side**2 // multiple_of * multiple_of for side in sides
        ],
        "{got} fits, and is no multiple of what was asked for.": [budget // side**2 for side in sides],
        "{got} counts multiples, not samples: multiply by `multiple_of` after the division.": [
            budget // side**2 // multiple_of for side in sides
        ],
        "{got} has a batch where the budget holds none: answer 0 there, so that it is noticed before the device "
        "runs out of memory.": [max(multiple_of, size) for size in right],
        "{got} has a batch of 1 where the budget holds no image: answer 0 there, so that it is noticed before the "
        "device runs out of memory.": [max(1, size) for size in right],
        "{got} has a batch of 1 where the budget does not hold one image: `max(1, …)` hides that nothing fits. "
        "Answer 0.": [max(1, budget // side**2) // multiple_of * multiple_of for side in sides],
    }


def _power_of_two(size: int) -> int:
    return 1 << (size.bit_length() - 1) if size else 0


def _draw_budget(generator: random.Random) -> dict[str, Any]:
    """Budgets that a size fills exactly, or misses by one pixel; and those that hold nothing."""
    sides = [generator.choice([1, 2, 3, 7, 8, 16, 24, 32, 47]) for _ in range(generator.randint(1, 4))]
    multiple_of = generator.choice([1, 1, 2, 3, 4, 8])
    filled = generator.choice(sides) ** 2 * multiple_of * generator.randint(0, 9)
    large = filled * 4099  # more digits than single precision has
    budget = generator.choice([filled, filled - 1, filled + 1, large, large - 1, generator.randint(0, 20_000)])
    return dict(sides=sides, budget=max(0, budget), multiple_of=multiple_of)


batch_sizes = Exercise(
    "batch_sizes",
    solution=_batch_sizes,
    cases=[
        dict(sides=[1], budget=8, multiple_of=1),
        dict(sides=[8, 16], budget=16_384, multiple_of=1),
        dict(sides=[8, 16, 24], budget=16_384, multiple_of=1),
        dict(sides=[24, 8], budget=15_000, multiple_of=8),
        dict(sides=[8, 24, 32], budget=16_384, multiple_of=8),
        dict(sides=[24, 8], budget=1000, multiple_of=1),
        dict(sides=[64, 96], budget=32_768, multiple_of=4),
        dict(sides=[8, 32], budget=1000, multiple_of=1),
        dict(sides=[224], budget=224**2 * 20_000 - 1, multiple_of=1),
    ],
    misconceptions=_wrong_sizes,
    judge=_floats_apart,
    search=_draw_budget,
)


def _windows(batch_sizes: Sequence[int], effective_batch_size: int, world_size: int) -> list[int]:
    return [effective_batch_size // (batch * world_size) for batch in batch_sizes]


def _wrong_windows(batch_sizes: list[int], effective_batch_size: int, world_size: int) -> dict[str, list[Any]]:
    first, last = batch_sizes[0], batch_sizes[-1]
    of_first, of_last = (effective_batch_size // (batch * world_size) for batch in (first, last))
    return {
        "{got} has floats, and a window has whole micro-batches. Divide with `//`.": [
            float(k) for k in _windows(batch_sizes, effective_batch_size, world_size)
        ],
        "{got} counts samples: divide by those that all ranks have in one micro-batch.": [
            effective_batch_size // world_size for _ in batch_sizes
        ],
        "{got} is one number for all stages: the batch shrinks, so the window has to grow.": [
            of_first for _ in batch_sizes
        ],
        "{got} is the last stage's window for all stages: a larger batch needs a shorter window.": [
            of_last for _ in batch_sizes
        ],
        "{got} is upside down: the largest batch needs the shortest window.": [batch // last for batch in batch_sizes],
        "{got} is upside down: divide the effective batch by the samples of a micro-batch.": [
            batch * world_size // effective_batch_size for batch in batch_sizes
        ],
        "{got} holds the first stage's batch, whatever was asked for (or divides by the ranks twice).": [
            first // batch for batch in batch_sizes
        ],
        "{got} forgets the ranks: each of them adds its batch to every update.": [
            effective_batch_size // batch for batch in batch_sizes
        ],
        "{got} multiplies by the ranks: more ranks need fewer micro-batches, not more.": [
            effective_batch_size * world_size // batch for batch in batch_sizes
        ],
    }


def _draw_effective_batch(generator: random.Random) -> dict[str, Any]:
    """Batches that shrink, grow or stay; an effective batch that all divide."""
    sizes = [generator.choice([1, 2, 3, 4, 6, 8, 12]) for _ in range(generator.randint(1, 4))]
    world_size = generator.choice([1, 2, 3, 4, 8])
    effective = math.lcm(*sizes) * world_size * generator.choice([1, 1, 2, 5])
    return dict(batch_sizes=sizes, effective_batch_size=effective, world_size=world_size)


windows = Exercise(
    "windows",
    solution=_windows,
    cases=[
        dict(batch_sizes=[64], effective_batch_size=64, world_size=1),
        dict(batch_sizes=[64, 16, 4], effective_batch_size=64, world_size=1),
        dict(batch_sizes=[64, 16, 4], effective_batch_size=256, world_size=2),
        dict(batch_sizes=[32, 8], effective_batch_size=384, world_size=4),
        dict(batch_sizes=[49, 7], effective_batch_size=49, world_size=1),  # 49 * (1 / 49) is less than 1
    ],
    misconceptions=_wrong_windows,
    judge=_floats_apart,
    search=_draw_effective_batch,
)

Run = Sequence[tuple[int, float]]
"""``(side, accuracy)`` of each epoch."""


def _pixels(side: int) -> float:
    return side**2


def _total(run: Run, cost: Callable[[int], float] = _pixels) -> float:
    return sum(cost(side) for side, _ in run)


def _within(run: Run, budget: float, cost: Callable[[int], float] = _pixels) -> float:
    """Accuracy after the last epoch that ends within a budget."""
    spent, accuracy = 0.0, 0.0
    for side, after in run:
        spent += cost(side)
        if spent <= budget:
            accuracy = after
    return accuracy


def _before_the_end(run: Run, budget: float) -> float:
    """The same with ``<`` for ``<=``."""
    return _within(run, budget - 0.5)


def _beyond(run: Run, budget: float) -> float:
    """Accuracy after the epoch in which a budget is used up."""
    spent, accuracy = 0.0, 0.0
    for side, after in run:
        if spent < budget:
            accuracy = after
        spent += _pixels(side)
    return accuracy


def _gain(baseline: Run, resized: Run, cost: Callable[[int], float] = _pixels) -> float:
    budget = min(_total(baseline, cost), _total(resized, cost))
    return round(_within(resized, budget, cost) - _within(baseline, budget, cost), 4)


def _nearest(run: Run, budget: float) -> float:
    """Accuracy after the epoch whose end is nearest the budget."""
    totals = [_total(run[: number + 1]) for number in range(len(run))]
    return run[min(range(len(run)), key=lambda number: abs(totals[number] - budget))][1]


def _without_dear_epochs(run: Run, budget: float) -> float:
    """Accuracy after the last epoch, where those that do not fit any more are passed over."""
    spent, accuracy = 0.0, 0.0
    for side, after in run:
        if spent + _pixels(side) <= budget:
            spent, accuracy = spent + _pixels(side), after
    return accuracy


def _first_at_least(run: Run, budget: float) -> float:
    """The same as ``_within``, and where no epoch ends within the budget the first one's."""
    return run[0][1] if _pixels(run[0][0]) > budget else _within(run, budget)


def _wrong_gains(baseline: Run, resized: Run) -> dict[str, float]:
    budget = min(_total(baseline), _total(resized))
    of_baseline = _total(baseline)
    best = max(accuracy for _, accuracy in resized) - max(accuracy for _, accuracy in baseline)
    differences = {
        "{got} lets the longer run go on past the cheaper one's pixels: it has trained more.": (
            resized[-1][1] - baseline[-1][1]
        ),
        "{got} has the wrong sign: what resizing gains is the resized run's accuracy minus the baseline's.": (
            -_gain(baseline, resized)
        ),
        "{got} leaves out an epoch that uses the budget up exactly: it is still within it, so compare with "
        "`<=`.": _before_the_end(resized, budget) - _before_the_end(baseline, budget),
        "{got} compares the best epochs, wherever they are: picked afterwards, by the accuracy itself.": best,
        "{got} compares after as many epochs. An epoch of small images costs less: count pixels.": (
            _gain(baseline, resized, cost=lambda side: 1)
        ),
        "{got} counts sides, not pixels: an epoch at 16 costs a quarter of one at 32.": (
            _gain(baseline, resized, cost=lambda side: side)
        ),
        "{got} takes the baseline's pixels as the budget. Here the resized run is the cheaper one, and the baseline "
        "has trained more.": _within(resized, of_baseline) - _within(baseline, of_baseline),
        "{got} counts the epoch in which the budget runs out: it ends beyond the budget.": (
            _beyond(resized, budget) - _beyond(baseline, budget)
        ),
    }
    differences |= {
        "{got} takes the epoch whose end is nearest the budget: it may end beyond it.": (
            _nearest(resized, budget) - _nearest(baseline, budget)
        ),
        "{got} passes over an epoch that is too dear and counts a later one: the later one was trained on top of it.": (
            _without_dear_epochs(resized, budget) - _without_dear_epochs(baseline, budget)
        ),
        "{got} has the first epoch of a run that completes none within the budget: its accuracy is 0.0 there.": (
            _first_at_least(resized, budget) - _first_at_least(baseline, budget)
        ),
    }
    rounded = {message: round(difference, 4) for message, difference in differences.items()}
    exact = _within(resized, budget) - _within(baseline, budget)
    return rounded | {"{got} is not rounded to 4 digits.": exact}


def _draw_runs(generator: random.Random) -> dict[str, Any]:
    """Runs of all lengths and prices; a difference rounds down, and that of two rounded accuracies does not."""

    def run(digits: float) -> list[tuple[int, float]]:
        sides = [generator.choice([1, 8, 16, 16, 24, 32]) for _ in range(generator.randint(1, 6))]
        return [(side, generator.randrange(1000) / 1000 + digits) for side in sides]

    return dict(baseline=run(0.00004), resized=run(0.00008))


gain = Exercise(
    "gain",
    solution=_gain,
    cases=[
        dict(baseline=[(32, 0.5), (32, 0.75)], resized=[(32, 0.875), (32, 0.6875)]),
        dict(baseline=[(32, 0.5), (32, 0.75)], resized=[(32, 0.5), (32, 0.625), (32, 0.875)]),
        dict(
            baseline=[(32, 0.5), (32, 0.75)],
            resized=[(16, 0.125), (16, 0.25), (16, 0.375), (16, 0.5), (32, 0.75), (32, 0.875)],
        ),
        dict(
            baseline=[(32, 0.25), (32, 0.5), (32, 0.625), (32, 0.75)],
            resized=[(16, 0.25), (16, 0.375), (16, 0.5), (16, 0.5625), (32, 0.9375)],
        ),
        dict(
            baseline=[(32, 0.25), (32, 0.5), (32, 0.625), (32, 0.875), (32, 0.75)],
            resized=[(16, 0.25), (16, 0.375), (32, 0.75), (32, 0.9375), (32, 0.625)],
        ),
        dict(baseline=[(16, 0.25), (32, 0.5)], resized=[(32, 0.75)]),
        dict(baseline=[(32, 0.5)], resized=[(16, 0.25), (16, 0.375)]),
    ],
    misconceptions=_wrong_gains,
    search=_draw_runs,
)

EXERCISES = (batch_sizes, windows, gain)
