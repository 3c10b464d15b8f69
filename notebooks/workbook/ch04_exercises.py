"""Chapter 04's exercises, and what each wrong answer is told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from course_lib.accumulation import windows
from workbook.exercises import Exercise


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _applied(micro_batches: list[list[float]], k: int) -> list[float]:
    return [_mean(list(itertools.chain(*window))) for window in windows(micro_batches, k)]


def _wrong_gradients(micro_batches: list[list[float]], k: int) -> dict[str, Any]:
    in_windows = list(windows(micro_batches, k))
    means = [[_mean(batch) for batch in window] for window in in_windows]
    means_by_k = [sum(window) / k for window in means]
    return {
        "{got} lacks the short window: after the loop, nothing steps for what is left.": (
            means_by_k[: len(micro_batches) // k]
        ),
        "{got} divides the short window by k as well, though it holds fewer micro-batches.": means_by_k,
        "{got} averages averages: a micro-batch of one weighs as much as one of three. Divide by the samples.": (
            [_mean(window) for window in means]
        ),
        "{got} is a sum over samples, divided by micro-batches: the units of numerator and denominator differ.": (
            [sum(sum(batch) for batch in window) / k for window in in_windows]
        ),
    }


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
)


def _wrong_factors(counts: list[int], rank: int) -> dict[str, float]:
    own, total, ranks = counts[rank], sum(counts), len(counts)
    return {
        "{got} is the rank's share of the samples. But DDP divides its gradient once more, by the ranks.": own / total,
        "{got} is the factor of a summed loss. Here the loss is a mean: it was divided by the rank's count.": (
            ranks / total
        ),
        "{got} is what DDP does by itself: ranks weigh equally, samples don't.": 1.0,
        "{got} is right for two ranks alone: W is the number of ranks, `len(counts)`.": own * 2 / total,
        "{got} compares the rank with the largest. That makes the ranks' weights proportional to their samples, but "
        "the whole is too small: they should add up to the number of ranks.": own / max(counts),
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
    total, updates = sum(losses), max(1, len(losses) // k)
    mean_of_tokens = _logged_loss(losses, tokens, k)
    return {
        "{got} adds k losses for each update: a sum over micro-batches, divided by updates.": total / updates,
        "{got} takes k losses for each update, also where a short window has fewer: count the micro-batches.": (
            total / updates / k
        ),
        "{got} averages averages: a micro-batch of 4 tokens weighs as much as one of 12.": _mean(losses),
        "{got} is a sum over tokens, divided by updates: divide by the tokens.": (
            mean_of_tokens * sum(tokens) / updates
        ),
        "{got} divides the mean over tokens by k as well: it is a mean already.": mean_of_tokens / k,
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
