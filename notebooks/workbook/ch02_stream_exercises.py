"""What chapter 02 asks last: to fetch ahead with threads, and to share out a stream among workers."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
import types
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

from workbook.ch02_exercises import missing_and_twice
from workbook.exercises import SEARCHED, PropertyExercise


class _Observed(NamedTuple):
    results: list[Any]
    drawn_at: list[int]
    """How many tasks had been drawn when each result came."""
    fetched_by: set[int]
    """Threads."""
    side_by_side: bool
    """Whether tasks 0 and 1 were being fetched at the same time."""


def _observed(prefetched: Any, number: int, ahead: int) -> _Observed:
    drawn: list[int] = []
    fetched_by: set[int] = set()
    both = threading.Barrier(2)

    def tasks() -> Iterator[int]:
        for task in range(number):
            drawn.append(task)
            yield task

    def fetch(task: int) -> int:
        fetched_by.add(threading.get_ident())
        if task < 2 <= min(ahead, number) and threading.get_ident() != caller:
            with contextlib.suppress(threading.BrokenBarrierError):  # the other did not come
                both.wait(timeout=1)
        if task == 0:
            time.sleep(0.05)  # the slowest comes first
        return 10 * task

    caller = threading.get_ident()
    results, drawn_at = [], []
    for result in prefetched(fetch, tasks(), ahead):
        results.append(result)
        drawn_at.append(len(drawn))
    return _Observed(results, drawn_at, fetched_by, not both.broken)


def _fault_of_prefetched(prefetched: Any) -> str | None:
    try:
        return _fault_of_results(prefetched) or _fault_of_searched(prefetched) or _fault_of_errors(prefetched)
    except RuntimeError as error:
        if "StopIteration" not in str(error):
            raise
        return f"raised RuntimeError: {error}.\n{BARE_NEXT}"


BARE_NEXT = (
    "After the last task, `next(tasks)` raises StopIteration, which inside of a generator becomes this error. "
    "`itertools.islice(tasks, 1)` gives one task, or none."
)


def _fault_of_results(prefetched: Any) -> str | None:
    for number, ahead in ((0, 2), (1, 2), (6, 2), (6, 1), (50, 4)):
        observed = _observed(prefetched, number, ahead)
        results, drawn_at = observed.results, observed.drawn_at
        setting = f"{number} tasks, {ahead} ahead: "
        if any(isinstance(result, Future) for result in results):
            return f"{setting}futures come.\nA future is a promise: `future.result()` waits for what was fetched."
        if sorted(results) != [10 * task for task in range(number)]:
            rest = "After the last task, what is still ahead must be given out."
            return f"{setting}{len(results)} results came.\n{rest}"
        if results != sorted(results):
            oldest = "Wait for the oldest, not for the first that is ready."
            return f"{setting}the results begin with {results[:4]}.\n{oldest}"
        if threading.get_ident() in observed.fetched_by:
            return f"{setting}the thread that asks fetches.\nHand the tasks to a pool, or nothing runs meanwhile."
        if fault := _fault_of_drawing(drawn_at, number, ahead):
            return setting + fault
        if not observed.side_by_side:
            told = "One thread fetches one task at a time: give the pool more."
            return f"{setting}the second fetch waits for the first.\n{told}"
    return None


class _Result:
    """What a fetch makes; its life can be followed."""

    def __init__(self, task: Any) -> None:
        self.task = task


def _fault_of_searched(prefetched: Any) -> str | None:
    """Tasks of any kind, the false ones too, and what is kept of results that were given out."""
    draw = random.Random(0)
    for _ in range(60):
        number, ahead = draw.randrange(12), draw.randint(1, 4)
        tasks = [draw.choice([0, None, False, "", position]) for position in range(number)]
        alive: WeakSet[_Result] = WeakSet()

        def fetch(task: Any, alive: WeakSet[_Result] = alive) -> _Result:
            result = _Result(task)
            alive.add(result)
            return result

        most, got = 0, []
        for result in prefetched(fetch, iter(tasks), ahead):
            got.append(getattr(result, "task", result))
            most = max(most, len(alive))
            del result
        if got != tasks:
            return f"the tasks {tasks}, {ahead} ahead: the results are those of {got}.\n{FALSE_TASKS}"
        if most > ahead + 3:
            return f"{number} tasks, {ahead} ahead: {most} results are alive at the same time.\n{KEPT}"
    return None


FALSE_TASKS = "A task may be 0, None or an empty text. Ask whether there is a task, not whether it is true."
KEPT = "What was given out is the caller's. A list that keeps all futures keeps all their results."


def _fault_of_errors(prefetched: Any) -> str | None:
    for ahead in (1, 3):
        results, to_raise = [], [2]

        def fetch(task: int, to_raise: list[int] = to_raise) -> int:
            if task in to_raise:
                to_raise.remove(task)  # a second try would succeed
                raise KeyError(f"task {task}")
            return task

        try:
            for result in prefetched(fetch, iter(range(6)), ahead):
                results.append(result)
        except KeyError:
            if results == [0, 1]:
                continue
        return f"where `fetch` raises for the third of 6 tasks, {ahead} ahead, {results} came.\n{ERRORS}"
    return None


ERRORS = "The results before it come first, then its error is raised: whoever swallows it trains on fewer samples."


def _fault_of_drawing(drawn_at: list[int], number: int, ahead: int) -> str | None:
    wanted = [min(number, position + 1 + ahead) for position in range(number)]
    if drawn_at == wanted:
        return None
    position = next(i for i in range(number) if drawn_at[i] != wanted[i])
    told = f"when result {position} came, {drawn_at[position]} tasks had been drawn, not {wanted[position]}.\n"
    if drawn_at[position] > wanted[position]:
        return f"{told}At most `ahead` may be under way behind the one that is given out."
    if drawn_at == [min(number, position + ahead) for position in range(number)]:
        return (
            f"{told}The next task is submitted after `yield`, so only when the caller comes back: while it works on a "
            "result, one task fewer is under way, and with ahead = 1 none. Submit before you yield."
        )
    return f"{told}As many as `ahead` should be under way, all the time."


def _by_map(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    with ThreadPoolExecutor(4) as pool:
        yield from pool.map(fetch, tasks)


def _by_window(fetch: Any, tasks: Any, ahead: int, give_rest: bool = True, threads: int = 4) -> Iterator[Any]:
    pending: deque[Any] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task in tasks:
            pending.append(pool.submit(fetch, task))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while give_rest and pending:
            yield pending.popleft().result()


def _by_futures(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    with ThreadPoolExecutor(4) as pool:
        for task in tasks:
            yield pool.submit(fetch, task)


def _refilled_after_yield(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks = iter(tasks)
    with ThreadPoolExecutor(4) as pool:
        pending = deque(pool.submit(fetch, task) for task in itertools.islice(tasks, ahead))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(fetch, task) for task in itertools.islice(tasks, 1))


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


def _by_walrus(fetch: Any, tasks: Any, ahead: int, ask: Any = None) -> Iterator[Any]:
    tasks = iter(tasks)
    with ThreadPoolExecutor(4) as pool:
        pending = deque(pool.submit(fetch, task) for task in itertools.islice(tasks, ahead))
        while pending:
            oldest = pending.popleft()
            if ask(task := next(tasks, None)):
                pending.append(pool.submit(fetch, task))
            yield oldest.result()


def _by_bare_next(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks = iter(tasks)
    with ThreadPoolExecutor(4) as pool:
        pending = deque(pool.submit(fetch, next(tasks)) for _ in range(ahead))
        while pending:
            oldest = pending.popleft()
            pending.append(pool.submit(fetch, next(tasks)))
            yield oldest.result()


def _by_list(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks, given = iter(tasks), 0
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(fetch, task) for task in itertools.islice(tasks, ahead)]
        while given < len(futures):
            futures.extend(pool.submit(fetch, task) for task in itertools.islice(tasks, 1))
            yield futures[given].result()
            given += 1


def _without_errors(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks = iter(tasks)
    with ThreadPoolExecutor(4) as pool:
        pending = deque(pool.submit(fetch, task) for task in itertools.islice(tasks, ahead))
        while pending:
            oldest = pending.popleft()
            pending.extend(pool.submit(fetch, task) for task in itertools.islice(tasks, 1))
            with contextlib.suppress(KeyError):
                yield oldest.result()


prefetched = PropertyExercise(
    "prefetched",
    _fault_of_prefetched,
    {
        "At most `ahead` may be under way behind the one that is given out.": _by_map,
        "After the last task, what is still ahead must be given out.": partial(_by_window, give_rest=False),
        "Wait for the oldest, not for the first that is ready.": _by_first_ready,
        "As many as `ahead` should be under way, all the time.": _by_blocks,
        "Hand the tasks to a pool, or nothing runs meanwhile.": _ahead_in_this_thread,
        "and with ahead = 1 none. Submit before you yield.": _refilled_after_yield,
        "One thread fetches one task at a time: give the pool more.": partial(_by_window, threads=1),
        "A future is a promise: `future.result()` waits for what was fetched.": _by_futures,
        BARE_NEXT: _by_bare_next,
        FALSE_TASKS: partial(_by_walrus, ask=bool),
        KEPT: _by_list,
        ERRORS: _without_errors,
    },
)


ENDLESS = 1000
"""So many lines stand for a stream without end."""


def _fault_of_share(share: Any) -> str | None:
    for number, workers in ((6, 0), (6, 1), (6, 2), (10, 3), (2, 5)):
        infos: list[Any] = [types.SimpleNamespace(id=i, num_workers=workers) for i in range(workers)] or [None]
        lines = [f"line {i}" for i in range(number)]
        setting = f"{number} lines, {workers} workers: "
        read = []
        for info in infos:
            try:
                read.append([str(line) for line in share(iter(lines), info)])
            except (TypeError, AttributeError, IndexError, RuntimeError) as error:
                return f"{setting}raised {type(error).__name__}: {error}{_reason_of_error(error, info)}"
        setting += str([[line.removeprefix("line ") for line in of_one] for of_one in read])
        if _content_decides(share, infos, number):
            return (
                f"{setting}\nOther lines are shared out in another way: the content decides here. Then equal lines all "
                "go to one worker, and hash() of a text differs between processes. Go by the number of the line."
            )
        if lost := missing_and_twice(itertools.chain(*read), lines):
            told = "Without workers, one process reads all." if not workers else "Each line belongs to one worker."
            return f"{setting}\n{lost}. {told}"
        if not _is_even(read):
            return f"{setting}\n{UNEVEN}"
    return _fault_of_content(share) or _fault_of_reading(share)


def _fault_of_content(share: Any) -> str | None:
    draw = random.Random(0)
    for _ in range(SEARCHED):
        workers = draw.choice([0, 1, draw.randint(2, 6)])
        infos: list[Any] = [types.SimpleNamespace(id=i, num_workers=workers) for i in range(workers)] or [None]
        lines = [draw.choice(["", "\n", " a \n", "a", "b\n", 0, None]) for _ in range(draw.randrange(14))]
        read = [list(share(iter(lines), info)) for info in infos]
        if missing_and_twice(map(repr, itertools.chain(*read)), map(repr, lines)):
            return f"of the lines {lines}, {workers} workers read {read}.\n{AS_IT_IS}"
        if not _is_even(read):
            return f"of the lines {lines}, {workers} workers read {read}.\n{UNEVEN}"
    return None


AS_IT_IS = "A line is handed on as it is: blank ones count, and nothing is stripped."
PAST_THE_END = (
    "After the last line `next(lines)` raises StopIteration, which inside of a generator becomes this error. A `for` "
    "loop, or itertools.islice, ends there by itself."
)
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
    if info is None and "NoneType" in str(error) and "attribute" in str(error):
        return ".\nWithout workers `info` is None, and one process reads all lines."
    if "NoneType" in str(error):
        return ".\nNothing was returned: `return` what this worker reads."
    if "subscriptable" in str(error):
        return ".\nAn iterator has no [start::step]: itertools.islice does the same for it."
    if "StopIteration" in str(error):
        return f".\n{PAST_THE_END}"
    if isinstance(error, IndexError):
        return ".\nThe last lines are fewer than the workers: for some of these none is left."
    if "len()" in str(error):
        return ".\nNobody knows how many lines will come: deal them as they come."
    return ""


def _fault_of_reading(share: Any) -> str | None:
    drawn: list[int] = []

    def stream() -> Iterator[str]:
        for i in range(ENDLESS):
            drawn.append(i)
            yield f"line {i}"

    for worker, workers in ((0, 0), (0, 1), (1, 2)):
        drawn.clear()
        info: Any = types.SimpleNamespace(id=worker, num_workers=workers) if workers else None
        for given, _ in enumerate(itertools.islice(share(stream(), info), 50), start=1):
            if len(drawn) > given * max(1, workers) + 100:
                who = f"worker {worker} of {workers}" if workers else "without workers, one process"
                return (
                    f"{who} had read {len(drawn):,} lines of a stream when it gave out line {given} of its own.\n"
                    "A list holds the whole stream, which need not fit into memory. Pass the lines on as they come."
                )
    return None


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


def _by_rows(lines: Any, info: Any) -> Any:
    if info is None:
        yield from lines
        return
    while row := list(itertools.islice(lines, info.num_workers)):
        yield row[info.id]


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
        "The last lines are fewer than the workers: for some of these none is left.": _by_rows,
        "Go by the number of the line.": _by_content,
        AS_IT_IS: lambda lines, info: (
            (line.strip() if isinstance(line, str) else line for line in lines)
            if info is None
            else _dealt((line for line in lines if line), info.num_workers, info.id)
        ),
        "A list holds the whole stream, which need not fit into memory. Pass the lines on as they come.": (
            lambda lines, info: lines if info is None else list(lines)[info.id :: info.num_workers]
        ),
    },
)
