"""What chapter 02 asks first: to batch by length. The other two: `ch02_prefetch_exercise`, `ch02_stream_exercises`."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from course_lib.datasets import load_words
from workbook.exercises import SEARCHED, PropertyExercise
from workbook.seeds_and_epochs import (
    EPOCHS,
    FACTORS,
    HASH,
    WRITTEN_ALIKE,
    another_hash,
    global_states,
    numbers_of_generators,
    pairs_of_one_number,
)


def missing_and_twice(seen: Iterable[Any], expected: Iterable[Any], what: str = "samples") -> str | None:
    uses, wanted = Counter(seen), Counter(expected)
    missing, extra = (wanted - uses).total(), (uses - wanted).total()
    if not missing and not extra:
        return None
    is_missing = f"{missing} {'is' if missing == 1 else 'are'} missing"
    return f"of {wanted.total()} {what}, {is_missing} and {extra} {'comes' if extra == 1 else 'come'} again"


def padding(batches: Iterable[Sequence[int]], lengths: Sequence[int]) -> int:
    """How many positions are filled up when each batch is padded to its longest sample."""
    filled_up = 0
    for batch in batches:
        own = [lengths[index] for index in batch]
        filled_up += max(own) * len(own) - sum(own)
    return filled_up


def _shuffled_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist()
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def _buckets(
    lengths: Sequence[int], batch_size: int, *draw: int, shuffle_samples: bool = True, shuffle_batches: bool = True
) -> list[list[int]]:
    """A right answer where ``draw`` is the seed and the epoch, and both are shuffled."""
    rng = np.random.default_rng(draw if draw else None)
    order = rng.permutation(len(lengths)).tolist() if shuffle_samples else list(range(len(lengths)))
    order.sort(key=lambda index: lengths[index])
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))] if shuffle_batches else batches


def _only_full_buckets(lengths: Sequence[int], batch_size: int, *draw: int) -> list[list[int]]:
    return [batch for batch in _buckets(lengths, batch_size, *draw) if len(batch) == batch_size]


def _fault_of_buckets(bucket_batches: Any) -> str | None:
    def made(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
        batches = bucket_batches(list(lengths), batch_size, seed, epoch)
        return [[int(index) for index in batch] for batch in batches]

    words = [len(word) for word in load_words()]
    if fault := _fault_of_dealing(made, words):
        return fault
    for what, lengths in {"words": words, "texts": [64 * length for length in reversed(words)]}.items():
        batches, shuffled = (deal(lengths, 32, 0, 0) for deal in (made, _shuffled_batches))
        if padding(batches, lengths) * 2 > padding(shuffled, lengths):
            return (
                f"2,000 {what} in batches of 32 are padded by {padding(batches, lengths):,} positions; batches of a "
                f"plain shuffle by {padding(shuffled, lengths):,}.\n{what.capitalize()} of one length belong together: "
                "that is the bucket."
            )
    batches = made(words, 32, 0, 0)
    if made(words, 32, 0, 0) != batches:
        return "two calls with the same (seed, epoch) differ.\nDraw from a generator made of the two, not a global one."
    with another_hash():
        if made(words, 32, 0, 0) != batches:
            return f"another process would give other tasks for the same (seed, epoch).\n{HASH}"
    generators = global_states()
    made([1, 1, 2], 2, 3, 7)
    if global_states() != generators:
        return (
            "the call changed a global generator.\nEverything that draws from it later now depends on your order. "
            "Make a generator of your own: np.random.default_rng(...)."
        )
    return _fault_of_pairs(made, words, bucket_batches) or _fault_of_order(made, words)


def _fault_of_dealing(made: Callable[..., list[list[int]]], words: list[int]) -> str | None:
    draw = random.Random(0)
    cases = [([1, 2, 3, 4], 2), ([5, 1, 4, 1, 3], 2), (words, 32), ([], 3), ([2], 1)]
    for _ in range(SEARCHED):
        number = draw.choice([1, 2, draw.randint(3, 20)])
        lengths = [draw.choice([0, 1, draw.randint(0, 9)]) for _ in range(number)]
        cases.append((lengths, draw.choice([1, number, number + 1, draw.randint(1, 6)])))
    for number, (lengths, batch_size) in enumerate(cases):
        batches = made(lengths, batch_size, number % 5, number % 3)
        if lost := missing_and_twice(itertools.chain(*batches), range(len(lengths))):
            return f"{lost}.\nEach index belongs in exactly one batch, also those of a short last batch."
        longest = max(map(len, batches), default=0)
        if longest > batch_size:
            return f"a batch has {longest} indices, and at most {batch_size} are allowed."
        if not all(batches):
            return "a batch is empty.\nA loader would ask `collate_fn` to make a batch of nothing."
        needed = math.ceil(len(lengths) / batch_size)
        if len(batches) > needed + len(set(lengths)):  # where no batch holds two lengths, each length has a short one
            told = f"{len(lengths)} indices are {len(batches)} batches, and {needed} of {batch_size} hold them."
            return f"{told}\n{TOO_SMALL}"
    return None


def _fault_of_pairs(made: Callable[..., list[list[int]]], words: list[int], answer: Any) -> str | None:
    batches = made(words, 32, 0, 0)
    if made(words, 32, 0, 1) == batches:
        if made(words, 32, 1, 1) != made(words, 32, 1, 0):
            told = "A product or a power of the two is one number for all of them. Make the generator of the pair."
            return f"all epochs of seed 0 have one order.\n{told}"
        return "epoch 1 comes in the order of epoch 0.\nThe epoch belongs in the generator's seed."
    if made(words, 32, 1, 0) == batches and made(words, 32, 1, 1) == made(words, 32, 0, 1):
        numbers_given = []
        for seed in (0, 1):
            with numbers_of_generators(getattr(inspect.unwrap(answer), "__globals__", {})) as given:
                made(words, 32, seed, 0)
            numbers_given.append(given[:1])
        if numbers_given[0] != numbers_given[1]:
            return f"seed 1 comes in the orders of seed 0.\n{LOW_BITS}"
        return "seed 1 comes in the orders of seed 0.\nThe seed belongs in the generator, too, not the epoch alone."
    return _collision(made, answer)


def _fault_of_order(made: Callable[..., list[list[int]]], words: list[int]) -> str | None:
    sequences, places = set(), set()
    for epoch in range(4):
        batches = made(words, 32, 0, epoch)
        places |= {place for place, batch in enumerate(batches) if len(batch) < 32}
        longest = _longest_words(batches, words)
        sequences.add(tuple(longest))
        rises = sum(before < after for before, after in itertools.pairwise(longest))
        falls = sum(before > after for before, after in itertools.pairwise(longest))
        if min(rises, falls) == 0:
            return (
                "the batches come sorted by length: the net sees only short words, then only long.\n"
                "Shuffle the batches."
            )
        if min(rises, falls) < 5:
            return (
                f"the longest words of the batches rise {rises} times and fall {falls} times.\n"
                "The batches still follow the lengths, from another one on, or by turns. Permute them."
            )
        agreement = float(np.corrcoef(longest, range(len(longest)))[0, 1])
        if abs(agreement) > 0.6:  # of a permutation of some 60 batches it is about 0.13
            return f"the place of a batch and its longest word have a correlation of {agreement:.2f}.\n{IN_PARTS}"
    in_one_direction, turning = _shares_of_steps(made, words)
    if in_one_direction > 0.2:
        told = f"of two batches that follow each other, {50 + 50 * in_one_direction:.0f} % go in one direction."
        return f"{told}\n{IN_GROUPS}"
    if turning > 0.8:
        return (
            f"{100 * turning:.0f} % of the batches are longer than both neighbours, or shorter than both.\n{BY_TURNS}"
        )
    if len(sequences) == 1:
        return f"the longest words of the batches are {list(longest[:9])}, … in every epoch.\n{ONE_SEQUENCE}"
    if len(places) == 1:
        return f"the short batch has the place {min(places)} in every epoch.\n{ONE_PLACE}"
    first = sorted(map(sorted, made(words, 32, 0, 0)))
    for pair, told in {(0, 1): "every epoch has the same batches", (1, 0): "seed 1 has the batches of seed 0"}.items():
        if sorted(map(sorted, made(words, 32, *pair))) == first:
            return (
                f"{told}, in another order.\n"
                "Shuffle the indices before they are sorted: a stable sort keeps that order among equal lengths."
            )
    return None


def _longest_words(batches: list[list[int]], words: list[int]) -> list[int]:
    return [max(words[index] for index in batch) for batch in batches]


def _shares_of_steps(made: Callable[..., list[list[int]]], words: list[int]) -> tuple[float, float]:
    """How the longest words go on from batch to batch; means over 24 epochs.

    By how much more steps go in one direction than in the other, of a permutation of 63 batches about 0.06; and how
    often the next step turns round, of a permutation about 0.7.
    """
    shares = []
    for epoch in range(24):
        steps = np.sign(np.diff(_longest_words(made(words, 32, 0, epoch), words)))
        turns = steps[1:] * steps[:-1]
        shares.append((abs(steps.sum()) / max(1, np.abs(steps).sum()), (turns < 0).sum() / max(1, np.abs(turns).sum())))
    in_one_direction, turning = np.mean(shares, axis=0).tolist()
    return in_one_direction, turning


TOO_SMALL = "Fill a batch up before the next one begins: more batches are more updates, each of fewer samples."
BY_TURNS = "Short and long batches come by turns. Permute all batches at once."
IN_GROUPS = "Within each of many groups the batches follow the lengths. Permute all batches at once."
LOW_BITS = "The generator keeps the low 32 bits of its number, and the seed is above them. Make it of the pair."
ONE_SEQUENCE = "Short and long batches come in one sequence, whatever the epoch. Permute the batches, too."
ONE_PLACE = "What it holds, the longest words or the shortest, always comes there. Permute it with the others."
IN_PARTS = "The short words come in one part of the epoch, the long ones in another. Permute all batches at once."


def _collision(made: Callable[..., list[list[int]]], answer: Any) -> str | None:
    """Two pairs (seed, epoch) that give one order, and why."""

    def order(seed: int, epoch: int) -> list[list[int]]:
        return made([1] * 15, 1, seed, epoch)  # one of 15! orders: that two are equal is no accident

    def told(one: tuple[int, int], other: tuple[int, int], reason: str) -> str:
        return f"(seed, epoch) = {one} and {other} give one order.\n{reason} Make the generator of the pair."

    if order(1, 1) == order(0, 0):
        return told((1, 1), (0, 0), "A number such as seed ^ epoch is 0 wherever the two are equal.")
    if order(1, 0) == order(1, 1):
        return told((1, 0), (1, 1), "The epoch is lost where it is combined with this seed.")
    if order(1, 0) == order(0, 1) and order(1, 1) == order(0, 3):
        return told((1, 0), (0, 1), "Their product, also of seed + 1 and epoch + 1, is one number for many pairs.")
    if order(1, 0) == order(0, 1):
        return told((1, 0), (0, 1), "Their sum, or what else treats the two alike, is one for many pairs.")
    for epoch in (2**bits + 1 for bits in range(16)):  # seed * 2**(32 + bits) + epoch
        if order(1, epoch) == order(0, epoch):
            return told((1, epoch), (0, epoch), PIECES)
    next_seed, next_epoch = order(1, 0), order(0, 1)
    made_of: dict[tuple[int, int], str] = {}
    for factor in FACTORS:
        if factor in EPOCHS:
            in_epoch = order(0, factor)
            if in_epoch == next_seed:
                reason = f"seed * {factor} + epoch is one number for both: longer runs reach the next seed's orders."
                return told((1, 0), (0, factor), reason)
            made_of[0, factor] = str(in_epoch)
        of_seed = order(factor, 0)
        if of_seed == next_epoch:
            reason = f"seed + {factor} * epoch is one number for both: another seed begins in this run's next epoch."
            return told((0, 1), (factor, 0), reason)
        made_of[factor, 0] = str(of_seed)
    for pair in (*itertools.product(range(12), range(12)), *WRITTEN_ALIKE):
        made_of[pair] = str(order(*pair))
    of_order: dict[str, tuple[int, int]] = {}
    for pair, made_order in made_of.items():
        if (other := of_order.setdefault(made_order, pair)) != pair:
            return told(pair, other, "Sums, products, bits, and texts without a separator are one for many pairs.")
    for one, other in pairs_of_one_number(order, answer):
        if order(*one) == order(*other):
            return told(one, other, "A number made of the two by sums, products or bits is one for many pairs.")
    return None


PIECES = "The numbers differ, but the generator takes in 32 bits at a time, and comes to one state."


def _of_seed(combine: Callable[[int, int], int]) -> Callable[..., list[list[int]]]:
    """A wrong answer: one number made of the seed and the epoch, from which everything is drawn."""
    return lambda lengths, batch_size, seed, epoch: _buckets(lengths, batch_size, combine(seed, epoch))


def _of_generator(lengths: Sequence[int], batch_size: int, generator: Any) -> list[list[int]]:
    """The buckets, by a generator of torch's or of Python's."""
    if isinstance(generator, random.Random):
        return _buckets(lengths, batch_size, generator.getrandbits(64))
    return _buckets(lengths, batch_size, int(torch.randint(2**62, (), generator=generator)))


def _with_global_generator(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    np.random.seed([seed, epoch])  # noqa: NPY002 - it is the mistake
    return _buckets(lengths, batch_size, seed, epoch)


def _turned(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    batches = _buckets(lengths, batch_size, seed, epoch, shuffle_batches=False)
    first = int(np.random.default_rng([seed, epoch]).integers(len(batches))) if batches else 0
    return batches[first:] + batches[:first]


def _short_one_last(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    return sorted(_buckets(lengths, batch_size, seed, epoch), key=lambda batch: len(batch) < batch_size)


def _in_halves(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    batches = _buckets(lengths, batch_size, seed, epoch, shuffle_batches=False)
    rng, middle = np.random.default_rng([seed, epoch]), len(batches) // 2
    return [part[i] for part in (batches[:middle], batches[middle:]) for i in rng.permutation(len(part))]


def _in_groups(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    batches = _buckets(lengths, batch_size, seed, epoch, shuffle_batches=False)
    step = max(1, len(batches) // 8)
    order = np.random.default_rng([seed, epoch]).permutation(step)
    return [batch for first in order for batch in batches[first::step]]


def _by_turns(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    batches = _buckets(lengths, batch_size, seed, epoch, shuffle_batches=False)
    rng, middle = np.random.default_rng([seed, epoch]), len(batches) // 2
    halves = [[part[i] for i in rng.permutation(len(part))] for part in (batches[:middle], batches[middle:])]
    return [batch for pair in itertools.zip_longest(*halves) for batch in pair if batch is not None]


def _up_and_down(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    batches = _buckets(lengths, batch_size, seed, epoch, shuffle_batches=False)
    return batches[::2] + batches[1::2][::-1]


bucket_batches = PropertyExercise(
    "bucket_batches",
    _fault_of_buckets,
    {
        "Each index belongs in exactly one batch, also those of a short last batch.": _only_full_buckets,
        "a batch has 4 indices, and at most 2 are allowed.": lambda lengths, batch_size, seed, epoch: _buckets(
            lengths, 2 * batch_size, seed, epoch
        ),
        "Words of one length belong together: that is the bucket.": _shuffled_batches,
        "Draw from a generator made of the two, not a global one.": lambda lengths, batch_size, seed, epoch: _buckets(
            lengths, batch_size
        ),
        "Make a generator of your own: np.random.default_rng(...).": _with_global_generator,
        "The epoch belongs in the generator's seed.": _of_seed(lambda seed, epoch: seed),
        "The seed belongs in the generator, too, not the epoch alone.": _of_seed(lambda seed, epoch: epoch),
        HASH: _of_seed(lambda seed, epoch: abs(hash(f"{seed}-{epoch}"))),
        "Their product, also of seed + 1 and epoch + 1, is one number": _of_seed(
            lambda seed, epoch: (seed + 1) * (epoch + 1)
        ),
        "Their sum, or what else treats the two alike, is one for many pairs. Make the generator": _of_seed(
            lambda seed, epoch: seed + epoch
        ),
        "A product or a power of the two is one number for all of them. Make the generator of the pair.": _of_seed(
            lambda seed, epoch: seed * epoch
        ),
        "A number such as seed ^ epoch is 0 wherever the two are equal. Make the generator of the pair.": _of_seed(
            lambda seed, epoch: seed ^ epoch
        ),
        "seed * 1000 + epoch is one number for both": _of_seed(lambda seed, epoch: 1000 * seed + epoch),
        "seed + 1000 * epoch is one number for both": _of_seed(lambda seed, epoch: seed + 1000 * epoch),
        LOW_BITS: lambda lengths, batch_size, seed, epoch: _of_generator(
            lengths, batch_size, torch.Generator().manual_seed((seed << 32) + epoch)
        ),
        PIECES: lambda lengths, batch_size, seed, epoch: _of_generator(
            lengths, batch_size, random.Random(seed * 2**40 + epoch)
        ),
        "Sums, products, bits, and texts without a separator": _of_seed(lambda seed, epoch: 2 * seed + 3 * epoch),
        "Shuffle the batches.": partial(_buckets, shuffle_batches=False),
        ONE_SEQUENCE: _up_and_down,
        IN_GROUPS: _in_groups,
        BY_TURNS: _by_turns,
        IN_PARTS: _in_halves,
        ONE_PLACE: _short_one_last,
        TOO_SMALL: lambda lengths, batch_size, *draw: _buckets(lengths, math.ceil(batch_size / 2), *draw),
        "The batches still follow the lengths, from another one on": _turned,
        "Shuffle the indices before they are sorted: a stable sort keeps that order among equal lengths.": partial(
            _buckets, shuffle_samples=False
        ),
    },
)
