"""What chapter 02 asks last: to share out a stream among workers."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

from workbook.ch02_exercises import missing_and_twice
from workbook.exercises import SEARCHED, PropertyExercise

ENDLESS = 1000
"""So many lines stand for a stream without end."""


@dataclass(frozen=True)
class _WorkerInfo:
    """What `get_worker_info()` returns in a worker: no attribute of it can be set, as in torch."""

    id: int
    num_workers: int


def _infos(workers: int) -> list[Any]:
    """What each process is given that reads; without workers it is one, and its info None."""
    return [_WorkerInfo(worker, workers) for worker in range(workers)] or [None]


def _fault_of_share(share: Any) -> str | None:
    for number, workers in ((6, 0), (6, 1), (6, 2), (10, 3), (2, 5)):
        infos = _infos(workers)
        lines = [f"line {i}" for i in range(number)]
        setting = f"{number} lines, {workers} workers: "
        read = []
        for info in infos:
            try:
                read.append([str(line) for line in share(iter(lines), info)])
            except (TypeError, AttributeError, IndexError, RuntimeError, StopIteration) as error:
                return f"{setting}raised {type(error).__name__}: {error}{_reason_of_error(error, info)}"
        setting += str([[line.removeprefix("line ") for line in of_one] for of_one in read])
        if _content_decides(share, infos, number):
            return (
                f"{setting}\nOther lines are shared out in another way: the content decides here. Then equal lines all "
                "go to one worker, and hash() of a text differs between processes. Go by the number of the line."
            )
        if lost := missing_and_twice(itertools.chain(*read), lines, "lines"):
            told = "Without workers, one process reads all." if not workers else "Each line belongs to one worker."
            return f"{setting}\n{lost}. {told}"
        if not _is_even(read):
            return f"{setting}\n{UNEVEN}"
    return _fault_of_content(share) or _fault_of_many(share) or _fault_of_reading(share)


def _fault_of_many(share: Any) -> str | None:
    """What is shared out by blocks of lines is uneven behind the first of them alone."""
    for number, workers in ((1000, 3), (777, 5), (120_000, 2)):
        infos = _infos(workers)
        read = [list(share(iter(range(number)), info)) for info in infos]
        if lost := missing_and_twice(map(str, itertools.chain(*read)), map(str, range(number)), "lines"):
            return f"{number:,} lines, {workers} workers: {lost}. Each line belongs to one worker."
        if not _is_even(read):
            return f"of {number:,} lines, {workers} workers read {[*map(len, read)]}.\n{UNEVEN}"
    return None


def _fault_of_content(share: Any) -> str | None:
    draw = random.Random(0)
    for _ in range(SEARCHED):
        workers = draw.choice([0, 1, draw.randint(2, 6)])
        infos = _infos(workers)
        lines = [draw.choice(["", "\n", " a \n", "a", "b\n", "0", "# c\n", "é\n"]) for _ in range(draw.randrange(14))]
        read = [list(share(iter(lines), info)) for info in infos]
        if missing_and_twice(map(repr, itertools.chain(*read)), map(repr, lines)):
            told = EQUAL if set(itertools.chain(*read)) == set(lines) else AS_IT_IS
            return f"of the lines {lines}, {workers} workers read {read}.\n{told}"
        if not _is_even(read):
            return f"of the lines {lines}, {workers} workers read {read}.\n{UNEVEN}"
    return None


EQUAL = "Lines that are equal count each by itself: a set or a dict keeps one of them."
AS_IT_IS = "A line is handed on as it is: blank ones count, and nothing is stripped."
PAST_THE_END = (
    "After the last line `next(lines)` raises StopIteration, which inside of a generator becomes a RuntimeError. A "
    "`for` loop, or itertools.islice, ends there by itself."
)
NOT_KEPT_THERE = "No attribute of torch's `info` can be set. Count in a name of your own, or use itertools.islice."
UNEVEN = "Shares may differ by one line: here some still read while others have nothing left."


def _content_decides(share: Any, infos: list[Any], number: int) -> bool:
    sizes = set()
    for length in range(1, 27):
        lines = ["a" * length] * number
        sizes.add(tuple(len(list(share(iter(lines), info))) for info in infos))
    return len(sizes) > 1


def _is_even(read: list[list[Any]]) -> bool:
    return max(map(len, read)) - min(map(len, read)) <= 1


def _reason_of_error(error: Exception, info: Any) -> str:
    if isinstance(error, FrozenInstanceError):
        return f".\n{NOT_KEPT_THERE}"
    if info is None and "NoneType" in str(error) and "attribute" in str(error):
        return ".\nWithout workers `info` is None, and one process reads all lines."
    if "NoneType" in str(error):
        return ".\nNothing was returned: `return` what this worker reads."
    if "subscriptable" in str(error):
        return ".\nAn iterator has no [start::step]: itertools.islice does the same for it."
    if isinstance(error, StopIteration) or "StopIteration" in str(error):
        return f".\n{PAST_THE_END}"
    if isinstance(error, IndexError):
        return ".\nThe last lines are fewer than the workers: for some of these none is left."
    if "len()" in str(error):
        return ".\nNobody knows how many lines will come: deal them as they come."
    return ""


def _fault_of_reading(share: Any) -> str | None:
    drawn: list[int] = []
    kept = weakref.WeakSet[Line]()

    def stream() -> Iterator[str]:
        for i in range(ENDLESS):
            drawn.append(i)
            line = Line(f"line {i}")
            kept.add(line)
            yield line
            del line

    for worker, workers in ((0, 0), (0, 1), (1, 2)):
        drawn.clear()
        info: Any = _WorkerInfo(id=worker, num_workers=workers) if workers else None
        for given, _ in enumerate(itertools.islice(share(stream(), info), 200), start=1):
            if len(drawn) > given * max(1, workers) + 100:
                who = f"worker {worker} of {workers}" if workers else "without workers, one process"
                return (
                    f"{who} had read {len(drawn):,} lines of a stream when it gave out line {given} of its own.\n"
                    "A list holds the whole stream, which need not fit into memory. Pass the lines on as they come."
                )
            if len(kept) > 100:
                return f"{len(kept)} lines that were read are in memory when {given} have been given out.\n{KEPT}"
    return None


class Line(str):
    """A text of which it can be seen whether anything still holds it."""


KEPT = "A list of what was read holds the whole stream in the end. Let a line go when it is passed on."


def _dealt(lines: Iterable[Any], workers: int, remainder: int) -> Iterator[Any]:
    return (line for number, line in enumerate(lines) if number % workers == remainder)


def _by_next(lines: Any, info: Any) -> Any:
    if info is None:
        yield from lines
        return
    for _ in range(info.id):
        next(lines)
    while True:
        yield next(lines)
        for _ in range(info.num_workers - 1):
            next(lines)


def _counting_there(lines: Any, info: Any) -> Any:
    if info is None:
        yield from lines
        return
    info.number = 0
    for line in lines:
        if info.number % info.num_workers == info.id:
            yield line
        info.number += 1


def _by_rows(lines: Any, info: Any) -> Any:
    if info is None:
        yield from lines
        return
    while row := list(itertools.islice(lines, info.num_workers)):
        yield row[info.id]


def _keeping_them(lines: Any, info: Any) -> Any:
    kept = []
    for number, line in enumerate(lines):
        kept.append(line)
        if info is None or number % info.num_workers == info.id:
            yield kept[number]


def _by_content(lines: Any, info: Any) -> Any:
    if info is None:
        return lines
    return (line for line in lines if sum(line.encode()) % info.num_workers == info.id)


share = PropertyExercise(
    "share",
    _fault_of_share,
    {
        "0 are missing and 6 come again. Each line belongs to one worker.": lambda lines, info: lines,
        "0 are missing and 5 come again. Each line belongs to one worker.": lambda lines, info: (
            lines if info is None else itertools.islice(lines, info.id, None)
        ),
        "Without workers, one process reads all.": lambda lines, info: (
            itertools.islice(lines, 1, None) if info is None else _dealt(lines, info.num_workers, info.id)
        ),
        UNEVEN: lambda lines, info: lines if info is None or info.id == 0 else [],
        "6 are missing and 0 come again. Each line belongs to one worker.": lambda lines, info: (
            lines if info is None else _dealt(lines, info.num_workers, info.id + 1)
        ),
        "Without workers `info` is None, and one process reads all lines.": lambda lines, info: _dealt(
            lines, info.num_workers, info.id
        ),
        "An iterator has no [start::step]: itertools.islice does the same for it.": lambda lines, info: (
            lines if info is None else lines[info.id :: info.num_workers]
        ),
        "Nobody knows how many lines will come: deal them as they come.": lambda lines, info: (
            lines if info is None else itertools.islice(lines, len(lines) // info.num_workers)
        ),
        PAST_THE_END: _by_next,
        NOT_KEPT_THERE: _counting_there,
        "The last lines are fewer than the workers: for some of these none is left.": _by_rows,
        "Go by the number of the line.": _by_content,
        AS_IT_IS: lambda lines, info: (
            (line.strip() if isinstance(line, str) else line for line in lines)
            if info is None
            else _dealt((line for line in lines if line), info.num_workers, info.id)
        ),
        EQUAL: lambda lines, info: lines if info is None else dict.fromkeys(_dealt(lines, info.num_workers, info.id)),
        "A list holds the whole stream, which need not fit into memory. Pass the lines on as they come.": (
            lambda lines, info: lines if info is None else list(lines)[info.id :: info.num_workers]
        ),
        KEPT: _keeping_them,
    },
)
