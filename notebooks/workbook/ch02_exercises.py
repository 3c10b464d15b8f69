"""What chapter 02 asks first: to pad a batch, and to batch by length. The other two: `ch02_stream_exercises`."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from course_lib.datasets import load_words
from workbook.exercises import PropertyExercise


def _padded(samples: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(sample) for sample in samples)
    rows = [sample + [pad] * (width - len(sample)) for sample in samples]
    return torch.tensor(rows), torch.tensor([len(sample) for sample in samples])


def _fault_of_pad_collate(pad_collate: Any) -> str | None:
    cases: list[tuple[list[list[int]], int]] = [
        ([[1, 2], [3, 4]], 0),
        ([[1, 2], [3]], 0),
        ([[5], [6, 7, 8], [9, 1]], 0),
        ([[1, 0], [3, 0, 5]], 0),
        ([[], [4]], 0),
        ([[1], [2, 3]], -100),
    ]
    for samples, pad in cases:
        given = [list(sample) for sample in samples]
        called = f"samples={samples}, pad={pad}"
        try:
            got = pad_collate(samples=given, pad=pad)
        except ValueError as error:
            told = "A tensor has rows of one length: fill the short ones up first."
            return f"{called} raised ValueError: {error}.\n{told}"
        fault = _fault_of_padded(got, samples, pad) or _fault_of_samples(given, samples)
        if fault:
            return f"{called}: {fault}"
    return None


def _fault_of_samples(left: list[list[int]], samples: list[list[int]]) -> str | None:
    if left == samples:
        return None
    return (
        f"afterwards the samples are {left}.\nThe answer changes its samples: a dataset that keeps them would "
        "return them padded in the next epoch. Make new rows."
    )


def _fault_of_padded(got: Any, samples: list[list[int]], pad: int) -> str | None:
    rows, lengths = _padded(samples, pad)
    if isinstance(got, Tensor):
        return "one tensor came.\nThere are no lengths: whoever gets the batch cannot tell padding from data."
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        return f"two tensors are asked for, rows and lengths, got {got!r}."
    for name, part in zip(("rows", "lengths"), got, strict=True):
        if not isinstance(part, Tensor):
            told = f"the {name} are of type {type(part).__name__}."
            return f"{told}\nMake the {name} a tensor: the model works on tensors."
        if part.dtype.is_floating_point:
            told = f"the {name} are {part.dtype}.\nThe {name} must be whole numbers: nn.Embedding refuses floats. "
            return told + "(torch.tensor([]) and torch.zeros are floats, unless a dtype is given.)"
    if got[0].tolist() != rows.tolist():
        told = f"the rows should be {rows.tolist()}, got {got[0].tolist()}."
        return f"{told}\n{_reason_of_rows(got[0].tolist(), samples, pad)}".rstrip()
    if got[1].tolist() != lengths.tolist():
        told = f"the lengths should be {lengths.tolist()}, got {got[1].tolist()}."
        return f"{told}\n{_reason_of_lengths(got[1].tolist(), rows, pad)}".rstrip()
    return None


def _reason_of_rows(got: list[list[int]], samples: list[list[int]], pad: int) -> str:
    rows = _padded(samples, pad)[0]
    width, shortest = rows.shape[1], min(len(sample) for sample in samples)
    mirrored = _padded([sample[::-1] for sample in samples], pad)[0]
    widths = {len(row) for row in got if isinstance(row, list)}
    if got == rows.T.tolist():
        return "The result is transposed: one row for each sample. pad_sequence needs batch_first=True."
    if got == [sample[:shortest] for sample in samples]:
        return "All are cut to the shortest: data are lost."
    if got == mirrored.flip(1).tolist():
        return "This pads on the left. The data come first here, so that row[:length] is the sample."
    if got == _padded(samples, 0)[0].tolist():
        return "This fills up with 0, whatever `pad` says."
    if widths and min(widths) > width:
        return "This pads to a fixed width: the longest sample *of the batch* is wide enough, and costs less."
    return ""


def _reason_of_lengths(got: list[int], rows: Tensor, pad: int) -> str:
    if got == [rows.shape[1]] * len(rows):
        return "Each sample got the length of the longest: that is the batch's width, not the sample's length."
    if got == (rows != pad).sum(1).tolist():
        return "The lengths count what is not `pad`: a sample may hold that value as data. Take its own length."
    if got == [rows.shape[1] - int((row == pad).sum()) for row in rows]:
        return "The lengths count what is not `pad`: a sample may hold that value as data. Take its own length."
    return ""


def _padded_in_place(samples: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    lengths = [len(sample) for sample in samples]
    for sample in samples:
        sample.extend([pad] * (max(lengths) - len(sample)))
    return torch.tensor(samples), torch.tensor(lengths)


def _changed(change: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """A wrong answer: the right one, changed."""
    return lambda samples, pad: change(*_padded(samples, pad))


def _cut(samples: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    shortest = min(len(sample) for sample in samples)
    return _padded([sample[:shortest] for sample in samples], pad)


def _padded_left(samples: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    rows, lengths = _padded([sample[::-1] for sample in samples], pad)
    return rows.flip(1), lengths


def _padded_wide(samples: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    rows, lengths = _padded([*samples, [0] * 8], pad)
    return rows[:-1], lengths[:-1]


def _sequence_first(samples: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    rows = pad_sequence([torch.tensor(sample) for sample in samples], padding_value=pad)
    return rows, torch.tensor([len(sample) for sample in samples])


pad_collate = PropertyExercise(
    "pad_collate",
    _fault_of_pad_collate,
    {
        "A tensor has rows of one length: fill the short ones up first.": lambda samples, pad: (
            torch.tensor(samples),
            torch.tensor([len(sample) for sample in samples]),
        ),
        "There are no lengths: whoever gets the batch cannot tell padding from data.": _changed(lambda rows, _: rows),
        "Make the rows a tensor: the model works on tensors.": _changed(lambda rows, n: (rows.tolist(), n)),
        "Make the lengths a tensor: the model works on tensors.": _changed(lambda rows, n: (rows, n.tolist())),
        "The rows must be whole numbers: nn.Embedding refuses floats.": _changed(lambda rows, n: (rows.float(), n)),
        "The lengths must be whole numbers": _changed(lambda rows, n: (rows, n.float())),
        "The answer changes its samples": _padded_in_place,
        "The result is transposed: one row for each sample. pad_sequence needs batch_first=True.": _sequence_first,
        "All are cut to the shortest: data are lost.": _cut,
        "Each sample got the length of the longest: that is the batch's width, not the sample's length.": _changed(
            lambda rows, n: (rows, torch.full_like(n, rows.shape[1]))
        ),
        "This pads on the left. The data come first here, so that row[:length] is the sample.": _padded_left,
        "This pads to a fixed width: the longest sample *of the batch* is wide enough, and costs less.": _padded_wide,
        "The lengths count what is not `pad`: a sample may hold that value as data. Take its own length.": (
            lambda samples, pad: (_padded(samples, pad)[0], (_padded(samples, pad)[0] != pad).sum(1))
        ),
        "This fills up with 0, whatever `pad` says.": lambda samples, pad: _padded(samples, 0),
    },
)


def missing_and_twice(seen: Iterable[Any], expected: Iterable[Any]) -> str | None:
    uses, wanted = Counter(seen), Counter(expected)
    missing, extra = (wanted - uses).total(), (uses - wanted).total()
    return f"of {wanted.total()} samples, {missing} are missing and {extra} come again" if missing or extra else None


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
    for lengths, batch_size in (([1, 2, 3, 4], 2), ([5, 1, 4, 1, 3], 2), (words, 32)):
        batches = made(lengths, batch_size, 0, 0)
        if lost := missing_and_twice(itertools.chain(*batches), range(len(lengths))):
            return f"{lost}.\nEach index belongs in exactly one batch, also those of a short last batch."
        if max(map(len, batches)) > batch_size:
            return f"a batch has {max(map(len, batches))} indices, and at most {batch_size} are allowed."
    batches, shuffled = made(words, 32, 0, 0), _shuffled_batches(words, 32, 0, 0)
    if padding(batches, words) * 2 > padding(shuffled, words):
        return (
            f"2,000 words in batches of 32 are padded by {padding(batches, words):,} positions; batches of a plain "
            f"shuffle by {padding(shuffled, words):,}.\nWords of one length belong together: that is the bucket."
        )
    if made(words, 32, 0, 0) != batches:
        return "two calls with the same (seed, epoch) differ.\nDraw from a generator made of the two, not a global one."
    generators = _global_generators()
    made([1, 1, 2], 2, 3, 7)
    if _global_generators() != generators:
        return (
            "the call changed a global generator.\nEverything that draws from it later now depends on your order. "
            "Make a generator of your own: np.random.default_rng(...)."
        )
    if made(words, 32, 0, 1) == batches:
        if made(words, 32, 1, 1) != made(words, 32, 1, 0):
            told = "A product is 0 for all of them. Make the generator of the pair."
            return f"all epochs of seed 0 have one order.\n{told}"
        return "epoch 1 comes in the order of epoch 0.\nThe epoch belongs in the generator's seed."
    if collision := _collision(made):
        return collision
    longest = [max(words[index] for index in batch) for batch in batches]
    if longest == sorted(longest) or longest == sorted(longest, reverse=True):
        return "the batches come sorted by length: the net sees only short words, then only long.\nShuffle the batches."
    if sorted(map(sorted, made(words, 32, 0, 1))) == sorted(map(sorted, batches)):
        return (
            "every epoch has the same batches, in another order.\n"
            "Shuffle the indices before they are sorted: a stable sort keeps that order among equal lengths."
        )
    return None


def _global_generators() -> list[Any]:
    numpys = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]  # noqa: NPY002
    return [numpys, random.getstate(), torch.get_rng_state().tolist()]


def _collision(made: Callable[..., list[list[int]]]) -> str | None:
    """Two pairs (seed, epoch) that give one order, and why."""

    def order(seed: int, epoch: int) -> list[list[int]]:
        return made([1] * 30, 1, seed, epoch)  # one of 30! orders: that two are equal is no accident

    def told(one: tuple[int, int], other: tuple[int, int], reason: str) -> str:
        return f"(seed, epoch) = {one} and {other} give one order.\n{reason} Make the generator of the pair."

    if order(1, 1) == order(0, 0):
        return told((1, 1), (0, 0), "A number such as seed ^ epoch is 0 wherever the two are equal.")
    if order(1, 0) == order(1, 1):
        return told((1, 0), (1, 1), "The epoch is lost where it is combined with this seed.")
    if order(1, 0) == order(0, 1):
        return told((1, 0), (0, 1), "Their sum is one number for many pairs.")
    first, factors = order(1, 0), {*range(2, 1100), *(10**k for k in range(4, 8)), *(2**k for k in range(11, 21))}
    for factor in sorted(factors):
        if order(0, factor) == first:
            reason = f"seed * {factor} + epoch is one number for both: longer runs reach the next seed's orders."
            return told((1, 0), (0, factor), reason)
    return None


def _of_seed(combine: Callable[[int, int], int]) -> Callable[..., list[list[int]]]:
    """A wrong answer: one number made of the seed and the epoch, from which everything is drawn."""
    return lambda lengths, batch_size, seed, epoch: _buckets(lengths, batch_size, combine(seed, epoch))


def _with_global_generator(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    np.random.seed([seed, epoch])  # noqa: NPY002 - it is the mistake
    return _buckets(lengths, batch_size, seed, epoch)


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
        "Their sum is one number for many pairs. Make the generator of the pair.": _of_seed(
            lambda seed, epoch: seed + epoch
        ),
        "A product is 0 for all of them. Make the generator of the pair.": _of_seed(lambda seed, epoch: seed * epoch),
        "A number such as seed ^ epoch is 0 wherever the two are equal. Make the generator of the pair.": _of_seed(
            lambda seed, epoch: seed ^ epoch
        ),
        "seed * 1000 + epoch is one number for both": _of_seed(lambda seed, epoch: 1000 * seed + epoch),
        "Shuffle the batches.": partial(_buckets, shuffle_batches=False),
        "Shuffle the indices before they are sorted: a stable sort keeps that order among equal lengths.": partial(
            _buckets, shuffle_samples=False
        ),
    },
)
