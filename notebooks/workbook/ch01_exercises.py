"""What chapter 01 asks: to batch by hand, to pad words, and to average over samples."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from workbook.exercises import MANY, SEARCHED, Exercise, PropertyExercise, Returned


def _cut(samples: Sequence[Any], batch_size: int) -> list[list[Any]]:
    return [list(samples[start : start + batch_size]) for start in range(0, len(samples), batch_size)]


def _batches(samples: Sequence[Any], batch_size: int, order: Sequence[int], drop_last: bool) -> list[list[Any]]:
    batches = _cut([samples[i] for i in order], batch_size)
    if drop_last and len(order) % batch_size:
        batches.pop()
    return batches


@dataclass(frozen=True)
class _Pair:
    """A sample of an input and its label: it equals no list of the two."""

    of: tuple[Any, ...]

    def __repr__(self) -> str:
        return repr(self.of)


def _pairs_apart(answer: Callable[..., Any]) -> Callable[..., Any]:
    def batch_of_pairs(batch: Any) -> Any:
        if hasattr(batch, "tolist"):  # of NumPy or torch
            batch = batch.tolist()
        if not isinstance(batch, list | tuple):
            return batch
        return [_Pair(sample) if isinstance(sample, tuple) else sample for sample in batch]

    @functools.wraps(answer)
    def called(**case: Any) -> Any:
        got = answer(**case)
        if not any(isinstance(sample, tuple) for sample in case["samples"]):
            return got
        if isinstance(got, Iterator):
            got = list(itertools.islice(got, MANY))
        return [batch_of_pairs(batch) for batch in got] if isinstance(got, list | tuple) else got

    return called


def _wrong_batches(samples: list[Any], batch_size: int, order: list[int], drop_last: bool) -> dict[str, Any]:
    ordered = [samples[i] for i in order]
    every, full = _cut(ordered, batch_size), _batches(samples, batch_size, order, drop_last=True)
    right = full if drop_last else every
    stored = _cut(samples, batch_size)
    lacking = -len(samples) % batch_size
    with_empty = right if lacking or drop_last else [*right, []]
    filled_up = _cut(ordered + ordered[:lacking], batch_size)
    number = -(-len(ordered) // batch_size)
    strided = [ordered[first::number] for first in range(number)]
    evened = [part.tolist() for part in np.array_split(np.arange(len(ordered)), number)] if number else []
    return {
        "{got} evens out the sizes: each batch is full, up to the last.": [[ordered[i] for i in p] for p in evened],
        "{got} deals the samples out in turn: a batch holds those that follow each other in `order`.": strided,
        "{got} has lists where the samples are pairs, as NumPy makes them: a batch holds the samples themselves.": [
            [list(sample) if isinstance(sample, tuple) else sample for sample in batch] for batch in right
        ],
        "This is one flat list of samples: each batch is a list of its own.": ordered,
        "{got} ends with an empty batch: where the batch size divides the samples, there is no short one.": with_empty,
        "{got} are positions. A batch holds the samples that stand there.": _cut(order, batch_size),
        "{got} shuffles whole batches: `order` is an order of samples.": [stored[i] for i in order if i < len(stored)],
        "{got} has the samples in the order in which they are stored: use `order`.": stored,
        "{got} loses the short last batch, which holds len(samples) % batch_size samples.": full,
        "{got} fills up the last batch with samples that have been used: some come twice.": filled_up,
        "{got} keeps the short last batch, though drop_last is set.": every,
        "{got} lacks a batch that was full: drop_last drops only a short one.": every[:-1] if drop_last else every,
    }


def _draw_batches(draw: random.Random) -> dict[str, Any]:
    number = draw.choice([0, 1, 2, draw.randrange(3, 14), draw.randrange(3, 14)])
    samples: list[Any] = [draw.choice([f"sample {i}", i, 0, "", None]) for i in range(number)]
    if draw.random() < 0.2:
        samples = [(i, draw.randrange(3)) for i in range(number)]
    batch_size = draw.choice([1, max(1, number), number + 1, draw.randint(1, 6)])
    order = draw.sample(range(number), number)
    return dict(samples=samples, batch_size=batch_size, order=order, drop_last=draw.random() < 0.5)


by_hand = Exercise(
    "by_hand",
    solution=_batches,
    cases=[
        dict(samples=list("abcd"), batch_size=2, order=[0, 1, 2, 3], drop_last=False),
        dict(samples=list("abcd"), batch_size=2, order=[3, 1, 2, 0], drop_last=False),
        dict(samples=list("abcde"), batch_size=2, order=[2, 0, 4, 1, 3], drop_last=False),
        dict(samples=list("abcdefg"), batch_size=3, order=[2, 0, 6, 4, 1, 5, 3], drop_last=False),
        dict(samples=list("abcde"), batch_size=2, order=[2, 0, 4, 1, 3], drop_last=True),
        dict(samples=list("abcdef"), batch_size=3, order=[5, 3, 1, 0, 2, 4], drop_last=True),
        dict(samples=list("abc"), batch_size=8, order=[1, 2, 0], drop_last=False),
        dict(samples=list("abc"), batch_size=8, order=[1, 2, 0], drop_last=True),
        dict(samples=[("a", 1), ("b", 0), ("c", 1)], batch_size=2, order=[1, 2, 0], drop_last=False),
        dict(samples=[], batch_size=2, order=[], drop_last=True),
    ],
    misconceptions=_wrong_batches,
    judge=_pairs_apart,
    search=_draw_batches,
)


PAIR = "Return a pair of tensors, the letters and the mask: without it a model takes padding for letters."
NO_DICT = "A dict has keys, which were not asked for: return a pair of tensors, the letters and the mask."
TENSORS = "Both have to be tensors: that is what a model computes with."
SWAPPED = "The mask comes first: the letters were asked for first."
TRANSPOSED = "There is one column for each word: one row is asked for. `pad_sequence` needs batch_first=True."
WHOLE = "The letters are floats: `nn.Embedding` looks up whole numbers only. Make them torch.long."
LONG = "Whole numbers, but not torch.long, which was asked for: it is what losses and indexing expect."
TOO_WIDE = "The longest word of this batch is wide enough: more columns cost memory and time."
CUT = "Letters are lost: the longest word of the batch decides the width."
UNSHIFTED = "These are the codes of `ord`: subtract those of the letter before a, so that a is 1."
FROM_ZERO = "The letter a has the number 0, which is that of the padding: begin with 1."
PAD_VALUE = "The padding has to be 0: an embedding cannot look up a negative number, and 1 to 26 are letters."
LEFT = "The padding comes before the letters: it was asked for after them."
SORTED = "The words were sorted: keep the order in which they came, as their labels do."
LENGTHS = "The second tensor holds the words' lengths: a mask has an entry for each letter, in the letters' shape."
NOT_BOOL = "The mask is not of type torch.bool: as an index, whole numbers (but for uint8) pick rows and do not mask."
FLIPPED = "The mask is True where padding is: here True means a letter."
ALL_TRUE = "The mask is True everywhere: padding has to be False."
ONE_BUFFER = "Each batch needs memory of its own: a loader makes the next ones while this one is in use."


def _numbered(word: str, first: int = 1) -> list[int]:
    return [ord(letter) - ord("a") + first for letter in word]


def _padded(
    words: Sequence[str], *, width: int | None = None, first: int = 1, left: bool = False, pad: int = 0
) -> tuple[Tensor, Tensor]:
    if width is None:
        width = max(len(word) for word in words)
    letters = torch.full((len(words), width), pad, dtype=torch.long)
    mask = torch.zeros(len(words), width, dtype=torch.bool)
    for row, word in enumerate(words):
        numbers = torch.tensor(_numbered(word, first)[:width])
        start = width - len(numbers) if left else 0
        letters[row, start : start + len(numbers)] = numbers
        mask[row, start : start + len(numbers)] = True
    return letters, mask


def _fault_of_collate(collate: Any) -> str | None:
    cases = [["c"], ["ab", "cd"], ["ab", "c"], ["a", "hat", "up"], ["alice", "i", "am"], ["is"]]
    draw = random.Random(0)
    for _ in range(SEARCHED):
        lengths = [draw.choice([1, draw.randint(1, 9), draw.randint(10, 100)]) for _ in range(draw.randint(1, 6))]
        cases.append(["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=length)) for length in lengths])
    cases.append(["up"] * 300)
    returned = Returned()
    for words in cases:
        got = collate(copy.copy(words))
        if returned.has_changed():
            return f"for {words} it changed a batch that it had returned before.\n{ONE_BUFFER}"
        if got is None:
            return f"for {words} it returned nothing. Does it end with `return`?"
        told = f"for {words} it returned {got!r}.\n"
        if isinstance(got, Mapping):
            return f"{told}{NO_DICT}"
        if not (isinstance(got, (tuple, list)) and len(got) == 2):
            return f"{told}{PAIR}"
        letters, mask = got
        if not (isinstance(letters, Tensor) and isinstance(mask, Tensor)):
            return f"{told}{TENSORS}"
        if letters.dtype == torch.bool and mask.dtype != torch.bool:
            return f"{told}{SWAPPED}"
        if fault := _fault_of_letters(words, letters) or _fault_of_mask(words, letters, mask):
            return f"{told}{fault}"
        returned.add((letters, mask))
    return None


def _fault_of_letters(words: list[str], letters: Tensor) -> str | None:
    expected, _ = _padded(words)
    rows, width = expected.shape
    transposed = letters.ndim == 2 and letters.shape != expected.shape and letters.shape == expected.T.shape
    if letters.dtype.is_floating_point:
        return WHOLE
    if letters.dtype != torch.int64:
        return LONG
    if transposed or (torch.equal(letters, expected.T) and not torch.equal(letters, expected)):
        return TRANSPOSED
    if letters.ndim != 2 or len(letters) != rows:
        return f"The letters have the shape {list(letters.shape)}: one row for each of the {rows} words is asked for."
    if letters.shape[1] > width:
        return TOO_WIDE
    if letters.shape[1] < width:
        return CUT
    if torch.equal(letters, expected):
        return None
    return _fault_of_values(words, letters)


def _fault_of_values(words: list[str], letters: Tensor) -> str:
    expected, real = _padded(words)
    if torch.equal(letters[real], expected[real]):
        return PAD_VALUE
    if torch.equal(letters[real], expected[real] + ord("a") - 1):
        return UNSHIFTED
    if torch.equal(letters[real], expected[real] - 1):
        return FROM_ZERO
    if torch.equal(letters, _padded(words, left=True)[0]):
        return LEFT
    if sorted(letters.tolist()) == sorted(expected.tolist()):
        return SORTED
    return f"Expected are the letters {expected.tolist()}."


def _fault_of_mask(words: list[str], letters: Tensor, mask: Tensor) -> str | None:
    _, expected = _padded(words)
    if mask.tolist() == [len(word) for word in words]:
        return LENGTHS
    if mask.shape != letters.shape:
        return f"The mask has the shape {list(mask.shape)}, the letters {list(letters.shape)}: both need the same."
    if mask.dtype != torch.bool:
        return NOT_BOOL
    if torch.equal(mask, expected):
        return None
    if torch.equal(mask, ~expected):
        return FLIPPED
    if mask.all():
        return ALL_TRUE
    return f"Expected is the mask {expected.tolist()}."


def _by_pad_sequence(words: list[str], *, first: int = 1, pad: float = 0) -> tuple[Tensor, Tensor]:
    rows = [torch.tensor(_numbered(word, first)) for word in words]
    letters = pad_sequence(rows, batch_first=True, padding_value=pad)
    return letters, letters != pad


def _without_batch_first(words: list[str]) -> tuple[Tensor, Tensor]:
    letters = pad_sequence([torch.tensor(_numbered(word)) for word in words])
    return letters, letters > 0


def _as_floats(words: list[str]) -> tuple[Tensor, Tensor]:
    letters = torch.zeros(len(words), max(map(len, words)))
    for row, word in enumerate(words):
        letters[row, : len(word)] = torch.tensor(_numbered(word))
    return letters, letters > 0


def _lists(words: list[str]) -> tuple[Any, Any]:
    letters, mask = _padded(words)
    return letters.tolist(), mask.tolist()


def _sorted_first(words: list[str]) -> tuple[Tensor, Tensor]:
    return _padded(sorted(words, key=len, reverse=True))


class _OneBuffer:
    """Hands out views of the same memory for all batches."""

    def __init__(self) -> None:
        self.memory = torch.zeros(100, 100, dtype=torch.long)

    def __call__(self, words: list[str]) -> tuple[Tensor, Tensor]:
        letters, mask = _padded(words)
        view = self.memory[: letters.shape[0], : letters.shape[1]]
        return view.copy_(letters), mask


padded = PropertyExercise(
    "collate",
    _fault_of_collate,
    {
        PAIR: lambda words: _padded(words)[0],
        NO_DICT: lambda words: dict(zip(("letters", "mask"), _padded(words), strict=True)),
        TENSORS: _lists,
        SWAPPED: lambda words: _padded(words)[::-1],
        TRANSPOSED: _without_batch_first,
        WHOLE: _as_floats,
        LONG: lambda words: (_padded(words)[0].int(), _padded(words)[1]),
        TOO_WIDE: lambda words: _padded(words, width=20),
        CUT: lambda words: _padded(words, width=min(map(len, words))),
        UNSHIFTED: lambda words: _by_pad_sequence(words, first=ord("a")),
        FROM_ZERO: lambda words: _by_pad_sequence(words, first=0, pad=-1),
        PAD_VALUE: lambda words: _by_pad_sequence(words, pad=-1),
        LEFT: lambda words: _padded(words, left=True),
        SORTED: _sorted_first,
        LENGTHS: lambda words: (_padded(words)[0], torch.tensor([len(word) for word in words])),
        NOT_BOOL: lambda words: (_padded(words)[0], _padded(words)[1].long()),
        FLIPPED: lambda words: (_padded(words)[0], ~_padded(words)[1]),
        ALL_TRUE: lambda words: (_padded(words)[0], torch.ones_like(_padded(words)[1])),
        ONE_BUFFER: _OneBuffer(),
    },
)


def _wrong_accuracies(correct: list[int], sizes: list[int]) -> dict[str, float]:
    shares = [right / size for right, size in zip(correct, sizes, strict=True)]
    averaged, as_if_full = sum(shares) / len(sizes), sum(correct) / (len(sizes) * sizes[0])
    without_last = sum(correct[:-1]) / max(1, sum(sizes[:-1]))
    only_last_short = sum(correct) / (sizes[0] * (len(sizes) - 1) + sizes[-1])
    weighted = sum(itertools.starmap(lambda share, size: share * size, zip(shares, sizes, strict=True)))
    return {
        "{got} averages the batches: a sample of the short last batch weighs more than one of the others.": averaged,
        "{got} counts every batch as a full one: divide by the number of samples.": as_if_full,
        "{got} is a sum over samples, divided by batches: an accuracy is at most 1.": sum(correct) / len(sizes),
        "{got} is the accuracy of the last batch: the others were forgotten on the way.": shares[-1],
        "{got} leaves out the last batch, whose samples belong to the test set, too. (Is `return` inside the loop?)": (
            without_last
        ),
        "{got} takes it that all batches but the last are as large as the first.": only_last_short,
        "{got} is in percent: a share from 0 to 1 is asked for.": 100 * sum(correct) / sum(sizes),
        "{got} adds up the batches' accuracies and divides by nothing.": sum(shares),
        "{got} is the number of right answers: divide it by the number of samples.": weighted,
        "{got} comes from `//`, which rounds down to a whole number: use `/`.": sum(correct) // sum(sizes),
    }


def _as_float(accuracy: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor or an array of one number counts as that number, and may be rounded as float32 is."""

    def judged(correct: list[int], sizes: list[int]) -> Any:
        right = sum(correct) / sum(sizes)
        got = accuracy(correct=correct, sizes=sizes)
        if isinstance(got, str):
            return got  # which float() would read
        try:
            got = float(got)
        except (TypeError, ValueError, RuntimeError):
            return got
        return right if math.isclose(got, right, rel_tol=1e-6) else float(f"{got:.6g}")

    return judged


def _draw_accuracies(draw: random.Random) -> dict[str, Any]:
    sizes = [draw.choice([1, 128, draw.randint(1, 200), 40_000]) for _ in range(draw.randint(1, 7))]
    return dict(correct=[draw.choice([0, size, draw.randint(0, size)]) for size in sizes], sizes=sizes)


mean_accuracy = Exercise(
    "accuracy",
    solution=lambda correct, sizes: sum(correct) / sum(sizes),
    cases=[
        dict(correct=[3, 1], sizes=[4, 4]),
        dict(correct=[96, 96, 4], sizes=[128, 128, 4]),
        dict(correct=[109] * 195 + [40], sizes=[128] * 195 + [40]),
        dict(correct=[2], sizes=[5]),
    ],
    misconceptions=_wrong_accuracies,
    judge=_as_float,
    search=_draw_accuracies,
)

EXERCISES = (by_hand, padded, mean_accuracy)
