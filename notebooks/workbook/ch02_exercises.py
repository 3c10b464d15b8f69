"""What chapter 02 asks: to pad a batch, to batch by length, to fetch ahead, and to share out a stream."""

from __future__ import annotations

import itertools
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib.datasets import load_words
from workbook.exercises import Exercise, PropertyExercise


def _padded(samples: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(sample) for sample in samples)
    rows = [sample + [pad] * (width - len(sample)) for sample in samples]
    return torch.tensor(rows), torch.tensor([len(sample) for sample in samples])


def _wrong_pads(samples: list[list[int]], pad: int) -> dict[str, Any]:
    rows, lengths = _padded(samples, pad)
    shortest = min(len(sample) for sample in samples)
    mirrored, _ = _padded([sample[::-1] for sample in samples], pad)
    wide, _ = _padded([*samples, [0] * 8], pad)
    same_lengths = torch.full_like(lengths, rows.shape[1])
    return {
        "There are no lengths: whoever gets the batch cannot tell padding from data.": rows,
        "All are cut to the shortest: data are lost.": _padded([sample[:shortest] for sample in samples], pad),
        "Each sample got the length of the longest: that is the batch's width, not the sample's length.": (
            rows,
            same_lengths,
        ),
        "This pads on the left. The data come first here, so that row[:length] is the sample.": (
            mirrored.flip(1),
            lengths,
        ),
        "This pads to a fixed width: the longest sample *of the batch* is wide enough, and costs less.": (
            wide[:-1],
            lengths,
        ),
        "The lengths count what is not `pad`: a sample may hold that value as data. Take its own length.": (
            (rows, (rows != pad).sum(1))
        ),
        "This fills up with 0, whatever `pad` says.": _padded(samples, pad=0),
    }


pad_collate = Exercise(
    "pad_collate",
    solution=_padded,
    cases=[
        dict(samples=[[1, 2], [3, 4]], pad=0),
        dict(samples=[[1, 2], [3]], pad=0),
        dict(samples=[[5], [6, 7, 8], [9, 1]], pad=0),
        dict(samples=[[1, 0], [3, 0, 5]], pad=0),
        dict(samples=[[], [4]], pad=0),
        dict(samples=[[1], [2, 3]], pad=-100),
    ],
    misconceptions=_wrong_pads,
)


def _missing_and_twice(seen: Iterable[Any], expected: Iterable[Any]) -> str | None:
    uses, wanted = Counter(seen), Counter(expected)
    missing, extra = (wanted - uses).total(), (uses - wanted).total()
    return f"of {wanted.total()} samples, {missing} are missing and {extra} come again" if missing or extra else None


def padding(batches: Iterable[Sequence[int]], lengths: Sequence[int]) -> int:
    """The positions that are filled up when each batch is padded to its longest sample."""
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
        if lost := _missing_and_twice(itertools.chain(*batches), range(len(lengths))):
            return f"{lost}.\nEach index belongs into exactly one batch, those of a short last batch too."
        if max(map(len, batches)) > batch_size:
            return f"a batch has {max(map(len, batches))} indices, asked for are at most {batch_size}."
    batches, shuffled = made(words, 32, 0, 0), _shuffled_batches(words, 32, 0, 0)
    if padding(batches, words) * 2 > padding(shuffled, words):
        return (
            f"2,000 words in batches of 32 are padded by {padding(batches, words):,} positions; batches of a plain "
            f"shuffle by {padding(shuffled, words):,}.\nWords of one length belong together: that is the bucket."
        )
    if made(words, 32, 0, 0) != batches:
        return "two calls with the same (seed, epoch) differ.\nDraw from a generator made of the two, not a global one."
    if made(words, 32, 0, 1) == batches:
        return "epoch 1 comes in the order of epoch 0.\nThe epoch belongs into the generator's seed."
    if made(words, 32, 1, 0) == made(words, 32, 0, 1):
        return "(seed 1, epoch 0) and (seed 0, epoch 1) have one order: their sum is no seed.\nGive the pair."
    longest = [max(words[index] for index in batch) for batch in batches]
    if longest == sorted(longest) or longest == sorted(longest, reverse=True):
        return "the batches come sorted by length: the net sees only short words, then only long.\nShuffle the batches."
    if sorted(map(sorted, made(words, 32, 0, 1))) == sorted(map(sorted, batches)):
        return (
            "every epoch has the same batches, in another order.\n"
            "Shuffle the indices before they are sorted: a stable sort keeps that order among equal lengths."
        )
    return None


bucket_batches = PropertyExercise(
    "bucket_batches",
    _fault_of_buckets,
    {
        "Each index belongs into exactly one batch, those of a short last batch too.": _only_full_buckets,
        "a batch has 4 indices, asked for are at most 2.": lambda lengths, size, *draw: _buckets(
            lengths, 2 * size, *draw
        ),
        "Words of one length belong together: that is the bucket.": _shuffled_batches,
        "Draw from a generator made of the two, not a global one.": lambda lengths, size, *_: _buckets(lengths, size),
        "The epoch belongs into the generator's seed.": lambda lengths, size, seed, _: _buckets(lengths, size, seed),
        "their sum is no seed.\nGive the pair.": lambda lengths, size, *draw: _buckets(lengths, size, sum(draw)),
        "Shuffle the batches.": partial(_buckets, shuffle_batches=False),
        "Shuffle the indices before they are sorted: a stable sort keeps that order among equal lengths.": partial(
            _buckets, shuffle_samples=False
        ),
    },
)


def _observed(prefetched: Any, number: int, ahead: int) -> tuple[list[int], list[int], set[int]]:
    """The results; how many tasks had been drawn when each came; and the threads that fetched."""
    drawn: list[int] = []
    fetched_by: set[int] = set()

    def tasks() -> Iterator[int]:
        for task in range(number):
            drawn.append(task)
            yield task

    def fetch(task: int) -> int:
        fetched_by.add(threading.get_ident())
        if task == 0:
            time.sleep(0.05)  # the slowest comes first
        return 10 * task

    results, drawn_at = [], []
    for result in prefetched(fetch, tasks(), ahead):
        results.append(result)
        drawn_at.append(len(drawn))
    return results, drawn_at, fetched_by


def _fault_of_prefetched(prefetched: Any) -> str | None:
    for number, ahead in ((1, 2), (6, 2), (50, 4)):
        results, drawn_at, fetched_by = _observed(prefetched, number, ahead)
        setting = f"{number} tasks, {ahead} ahead: "
        if sorted(results) != [10 * task for task in range(number)]:
            rest = "After the last task, what is still ahead has to be given out."
            return f"{setting}{len(results)} results came.\n{rest}"
        if results != sorted(results):
            oldest = "Wait for the oldest, not for the first that is ready."
            return f"{setting}the results begin with {results[:4]}.\n{oldest}"
        for position, count in enumerate(drawn_at):
            told = f"{setting}when result {position} came, {count} tasks had been drawn.\n"
            if count > position + 1 + ahead:
                return f"{told}At most `ahead` may be under way behind the one that is given out."
            if count < min(number, position + ahead):
                return f"{told}As many as `ahead` should be under way, all the time."
        if threading.get_ident() in fetched_by:
            return f"{setting}the thread that asks fetches.\nHand the tasks to a pool, or nothing runs meanwhile."
    return None


def _by_map(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    with ThreadPoolExecutor(4) as pool:
        yield from pool.map(fetch, tasks)


def _by_window(fetch: Any, tasks: Any, ahead: int, give_rest: bool = True) -> Iterator[Any]:
    pending: deque[Any] = deque()
    with ThreadPoolExecutor(4) as pool:
        for task in tasks:
            pending.append(pool.submit(fetch, task))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while give_rest and pending:
            yield pending.popleft().result()


def _by_first_ready(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks, pending = iter(tasks), []
    with ThreadPoolExecutor(4) as pool:
        for task in itertools.islice(tasks, ahead):
            pending.append(pool.submit(fetch, task))
        while pending:
            ready = next((future for future in pending if future.done()), None)
            if ready is not None:
                pending.remove(ready)
                pending.extend(pool.submit(fetch, task) for task in itertools.islice(tasks, 1))
                yield ready.result()


def _by_blocks(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks = iter(tasks)
    with ThreadPoolExecutor(4) as pool:
        while block := list(itertools.islice(tasks, ahead)):
            yield from pool.map(fetch, block)


def _ahead_in_this_thread(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks, pending = iter(tasks), deque()  # type: ignore[var-annotated]
    pending.extend(itertools.islice(tasks, ahead))
    while pending:
        result = fetch(pending.popleft())
        pending.extend(itertools.islice(tasks, 1))
        yield result


prefetched = PropertyExercise(
    "prefetched",
    _fault_of_prefetched,
    {
        "At most `ahead` may be under way behind the one that is given out.": _by_map,
        "After the last task, what is still ahead has to be given out.": partial(_by_window, give_rest=False),
        "Wait for the oldest, not for the first that is ready.": _by_first_ready,
        "As many as `ahead` should be under way, all the time.": _by_blocks,
        "Hand the tasks to a pool, or nothing runs meanwhile.": _ahead_in_this_thread,
    },
)


def _fault_of_share(share: Any) -> str | None:
    for number, workers in ((6, 0), (6, 1), (6, 2), (10, 3), (2, 5)):
        infos: list[Any] = [types.SimpleNamespace(id=i, num_workers=workers) for i in range(workers)] or [None]
        read = [list(share(iter(range(number)), info)) for info in infos]
        setting = f"{number} lines, {workers} workers: {read}"
        if lost := _missing_and_twice(itertools.chain(*read), range(number)):
            told = "Without workers, one process reads all." if not workers else "Each line belongs to one worker."
            return f"{setting}\n{lost}. {told}"
        if max(map(len, read)) - min(map(len, read)) > 1:
            return f"{setting}\nShares may differ by one line: here some still read while others have nothing left."
    return None


def _dealt(lines: Iterable[Any], workers: int, remainder: int) -> list[Any]:
    return [line for number, line in enumerate(lines) if number % workers == remainder]


share = PropertyExercise(
    "share",
    _fault_of_share,
    {
        "0 are missing and 6 come again. Each line belongs to one worker.": lambda lines, info: lines,
        "0 are missing and 5 come again. Each line belongs to one worker.": lambda lines, info: (
            lines if info is None else [*lines][info.id :]
        ),
        "Without workers, one process reads all.": lambda lines, info: (
            [*lines][1:] if info is None else _dealt(lines, info.num_workers, info.id)
        ),
        "Shares may differ by one line: here some still read while others have nothing left.": lambda lines, info: (
            lines if info is None or info.id == 0 else []
        ),
        "6 are missing and 0 come again. Each line belongs to one worker.": lambda lines, info: (
            lines if info is None else _dealt(lines, info.num_workers, info.id + 1)
        ),
    },
)

EXERCISES = (pad_collate, bucket_batches, prefetched, share)
