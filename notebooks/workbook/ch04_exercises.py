"""Chapter 04's exercises, and what each wrong answer is told."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.accumulation import windows
from workbook.exercises import Exercise

DIVIDED_BY_ZERO = "ZeroDivisionError"


def _zero_division_told(answer: Callable[..., Any]) -> Callable[..., Any]:
    """An answer that divides by 0 returns that as its result, so that it can be told why."""

    @functools.wraps(answer)
    def told(**case: Any) -> Any:
        try:
            return answer(**case)
        except ZeroDivisionError:
            return DIVIDED_BY_ZERO

    return told


def _applied(micro_batches: list[list[float]], k: int) -> list[float]:
    return [_mean(list(itertools.chain(*window))) for window in windows(micro_batches, k)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _wrong_gradients(micro_batches: list[list[float]], k: int) -> dict[str, Any]:
    right = _applied(micro_batches, k)
    in_windows = list(windows(micro_batches, k))
    sums = [sum(sum(batch) for batch in window) for window in in_windows]
    samples = [sum(len(batch) for batch in window) for window in in_windows]
    means = [[_mean(batch) for batch in window] for window in in_windows]
    never_reset = [total / seen for total, seen in zip(sums, itertools.accumulate(samples), strict=True)]
    means_by_samples = [sum(window) / count for window, count in zip(means, samples, strict=True)]
    means_by_k = [sum(window) / k for window in means]
    full_windows = len(micro_batches) // k
    last_is_full = len(right) == full_windows
    return {
        "Your function divides by a count of 0. Either the step after the loop is made although the last window was "
        "full and nothing is left, or the count was reset before the division.": (
            DIVIDED_BY_ZERO if last_is_full else right
        ),
        "{got} has one update too many: where the last window is full, nothing is left to step for.": (
            [*right, 0.0] if last_is_full else right
        ),
        "{got} rounds down: `//` counts whole parts, and a mean of gradients is not a whole number.": (
            [total // count for total, count in zip(sums, samples, strict=True)]
        ),
        "{got} lacks the update whose gradient is 0: the optimizer steps all the same.": [g for g in right if g],
        "{got} takes a batch for the last one because it holds the same numbers: ask for its place, not its content.": (
            _stepping_on_equals(micro_batches, k)
        ),
        "{got} goes on adding the gradients of earlier windows: reset both numbers after a step.": (
            [total / count for total, count in zip(itertools.accumulate(sums), samples, strict=True)]
        ),
        "{got} is a running mean of all windows so far: reset both numbers after a step.": [
            total / count
            for total, count in zip(itertools.accumulate(sums), itertools.accumulate(samples), strict=True)
        ],
        "{got} goes on counting what earlier windows held: reset both numbers after a step.": never_reset,
        "{got} is a sum of means, divided by samples: add up the samples' gradients, not the means.": means_by_samples,
        "{got} lacks the short window: after the loop, nothing steps for what is left.": means_by_k[:full_windows],
        "{got} divides the short window by k as well, though it holds fewer micro-batches.": means_by_k,
        "{got} averages averages: a micro-batch of one weighs as much as one of three. Divide by the samples.": (
            [_mean(window) for window in means]
        ),
        "{got} adds what is left over to the last full window: it is a window of its own, and a step.": (
            _joined_to_the_last(micro_batches, k)
        ),
        "{got} grows with k: it only adds up means, or divides by the samples of the last micro-batch alone. Divide by "
        "those of the whole window.": [sum(window) for window in means],
        "{got} is a sum over samples, divided by micro-batches: the units of numerator and denominator differ.": (
            [total / k for total in sums]
        ),
        "{got} steps after every micro-batch: wait until the window is full.": (
            [_mean(batch) for batch in micro_batches]
        ),
    }


def _joined_to_the_last(micro_batches: list[list[float]], k: int) -> list[float]:
    in_windows = [list(window) for window in windows(micro_batches, k)]
    if len(in_windows) > 1 and len(in_windows[-1]) < k:
        in_windows[-2:] = [in_windows[-2] + in_windows[-1]]
    return [_mean(list(itertools.chain(*window))) for window in in_windows]


def _stepping_on_equals(micro_batches: list[list[float]], k: int) -> list[float]:
    applied, taken = [], list[float]()
    for number, batch in enumerate(micro_batches, start=1):
        taken += batch
        if number % k == 0 or batch == micro_batches[-1]:
            applied.append(_mean(taken))
            taken = []
    return applied


def _any_epoch(drawn: random.Random) -> dict[str, Any]:
    values = drawn.choice([[0.0, 1.0, -1.0], [2.0, 3.0], [round(drawn.uniform(-9, 9), 2) for _ in range(8)]])
    batches = drawn.randint(0, 9)
    micro_batches = [[drawn.choice(values) for _ in range(drawn.randint(1, 4))] for _ in range(batches)]
    if drawn.random() < 0.2:  # one list, which comes again as the same object
        micro_batches = micro_batches[:1] * batches
    return dict(micro_batches=micro_batches, k=drawn.randint(1, 6))


applied_gradients = Exercise(
    "applied_gradients",
    solution=_applied,
    cases=[
        dict(micro_batches=[[1.0], [3.0], [5.0], [9.0]], k=2),
        dict(micro_batches=[[1.0, 3.0], [5.0, 7.0], [9.0, 11.0], [13.0, 15.0]], k=2),
        dict(micro_batches=[[2.0], [4.0], [6.0], [8.0], [10.0]], k=4),
        dict(micro_batches=[[8.0, 8.0, 8.0], [4.0], [6.0, 6.0], [2.0, 2.0]], k=2),
        dict(micro_batches=[[8.0, 8.0, 8.0], [4.0], [6.0, 6.0, 6.0], [2.0], [3.0, 5.0]], k=2),
        dict(micro_batches=[[5.0, 7.0], [9.0]], k=8),
        dict(micro_batches=[[1.0], [2.0], [2.0], [5.0]], k=2),
        dict(micro_batches=[[1.0], [-1.0], [4.0], [2.0]], k=2),
        dict(micro_batches=[[2.0], [6.0], [1.0], [2.0], [6.0]], k=3),
    ],
    misconceptions=_wrong_gradients,
    search=_any_epoch,
    judge=_zero_division_told,
)


def _wrong_factors(counts: list[int], rank: int) -> dict[str, float]:
    own, total, ranks = counts[rank], sum(counts), len(counts)
    return {
        "{got} is the rank's share of the samples. But DDP divides its gradient once more, by the ranks.": own / total,
        "{got} is the factor of a summed loss. Here the loss is a mean: it was divided by the rank's count.": (
            ranks / total
        ),
        "{got} counts the ranks that have samples. DDP divides by all ranks, also by those that have none.": (
            own * sum(count > 0 for count in counts) / total
        ),
        "{got} compares the rank with rank 0, which is a rank like any other: compare with all.": own
        / (counts[0] or 1),
        "{got} divides all samples by those of rank 0: upside down, and rank 0 is a rank like any other.": (
            total / (counts[0] or 1)
        ),
        "{got} leaves the rank's own samples out of the total: they belong to it.": (
            own * ranks / (total - own) if total > own else 0.0
        ),
        "{got} is what DDP does by itself: ranks weigh equally, samples don't.": 1.0,
        "{got} divides by the ranks, which DDP does already; and ranks would still weigh equally.": 1 / ranks,
        "{got} compares the rank with the largest. That makes the ranks' weights proportional to their samples, but "
        "the whole is too small: they should add up to the number of ranks.": own / max(counts),
        "{got} compares the rank with the smallest. The proportions are right, but the whole is too large: the "
        "factors should add up to the number of ranks.": own / (min(counts) or 1),
        "{got} comes from `//`, which rounds down: a factor is a number like 2.1.": own * ranks // total,
        "{got} rounds the mean of the counts down before it divides by it: keep its fraction.": (
            own / (total // ranks or 1)
        ),
        "{got} turns the mean into the rank's sum. Now say what should divide it, and what DDP divides it by.": own,
        "{got} undoes both divisions that were made. The one that is wanted, by all samples, is missing.": own * ranks,
        "{got} turns the mean into a sum and divides by the ranks. DDP divides by them too, and nothing divides by "
        "the samples.": own / ranks,
        "{got} divides the mean by the rank's count once more: the mean has been divided by it already.": (
            1 / own if own else 0.0
        ),
        "{got} is upside down: the rank with more samples must weigh more. And DDP's division is still there.": (
            total / own if own else 0.0
        ),
        "{got} is upside down: the rank with more samples must weigh more.": total / (ranks * own) if own else 0.0,
    }


def _any_ranks(drawn: random.Random) -> dict[str, Any]:
    counts = [drawn.choice([0, 1, drawn.randint(1, 40)]) for _ in range(drawn.randint(1, 6))]
    counts[drawn.randrange(len(counts))] += 1  # somebody has a sample
    return dict(counts=counts, rank=drawn.randrange(len(counts)))


rank_factor = Exercise(
    "factor",
    solution=lambda counts, rank: counts[rank] * len(counts) / sum(counts),
    cases=[
        dict(counts=[3, 9, 11, 2, 2, 2, 2], rank=1),  # where all that is told below is another number
        dict(counts=[5, 8, 2, 9], rank=1),
        dict(counts=[4, 8, 2], rank=0),
        dict(counts=[6, 2], rank=0),
        dict(counts=[6, 2], rank=1),
        dict(counts=[8, 8], rank=0),
        dict(counts=[5, 0, 10, 5], rank=2),
        dict(counts=[5, 0, 10, 5], rank=1),
    ],
    misconceptions=_wrong_factors,
    search=_any_ranks,
)


def _logged_loss(losses: list[float], tokens: list[int], k: int) -> float:
    return sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)


def _wrong_losses(losses: list[float], tokens: list[int], k: int) -> dict[str, float]:
    total, micro_batches = sum(losses), len(losses)
    updates = max(1, micro_batches // k)
    mean_of_tokens = _logged_loss(losses, tokens, k)
    of_tokens = mean_of_tokens * sum(tokens)
    by_window = _mean([_mean(window) for window in windows(losses, k)])
    return {
        "{got} rounds down: `//` counts whole parts, and a mean loss is not a whole number.": of_tokens // sum(tokens),
        "{got} adds k losses for each update: a sum over micro-batches, divided by updates.": total / updates,
        "{got} takes k losses for each update, also where a short window has fewer: count the micro-batches.": (
            total / updates / k
        ),
        "{got} divides by k once, however many windows the losses come from.": total / k,
        "{got} is a sum over tokens, divided by updates: divide by the tokens.": of_tokens / updates,
        "{got} is a sum over tokens, divided by micro-batches: divide by the tokens.": of_tokens / micro_batches,
        "{got} is a sum over tokens that nothing divides: a mean over tokens is divided by their number.": of_tokens,
        "{got} divides the mean over tokens by k as well: it is a mean already.": mean_of_tokens / k,
        "{got} is the sum of all losses, which nothing divides. The longer the interval between logs, the larger it "
        "gets.": total,
        "{got} averages the windows' averages: a short window weighs as much as a full one.": by_window,
        "{got} takes the short window for a full one: k times the windows is not the number of micro-batches.": (
            total / (k * math.ceil(micro_batches / k))
        ),
        "{got} averages averages: a micro-batch of 4 tokens weighs as much as one of 12.": total / micro_batches,
        "{got} is the first micro-batch's loss: is `return` inside the loop?": losses[0],
        "{got} divides means by tokens: multiply each mean by its tokens first.": total / sum(tokens),
    }


def _any_log(drawn: random.Random) -> dict[str, Any]:
    number = drawn.randint(1, 9)
    losses = [round(drawn.uniform(0, 6), drawn.choice([0, 2])) for _ in range(number)]
    tokens = [drawn.choice([1, drawn.randint(1, 30)]) for _ in range(number)]
    return dict(losses=losses, tokens=tokens, k=drawn.randint(1, 5))


logged_loss = Exercise(
    "logged_loss",
    solution=_logged_loss,
    cases=[
        dict(losses=[2.0, 4.0, 3.0, 3.0, 8.0, 7.0], tokens=[8, 8, 8, 8, 8, 8], k=2),
        dict(losses=[2.0, 4.0, 3.0, 3.0, 8.0], tokens=[8, 8, 8, 8, 8], k=2),
        dict(losses=[2.0, 4.0, 6.0, 8.0], tokens=[12, 4, 4, 4], k=2),
        dict(losses=[2.5, 1.0], tokens=[3, 4], k=2),
    ],
    misconceptions=_wrong_losses,
    search=_any_log,
)

EXERCISES = (applied_gradients, rank_factor, logged_loss)
