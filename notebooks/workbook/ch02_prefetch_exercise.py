"""What chapter 02 asks second: to fetch ahead with threads."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakSet

from workbook.exercises import PropertyExercise


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
        fault = _fault_of_results(prefetched) or _fault_of_searched(prefetched) or _fault_of_errors(prefetched)
        return fault or _fault_of_waiting(prefetched)
    except RuntimeError as error:
        if "StopIteration" not in str(error):
            raise
        return f"raised RuntimeError: {error}.\n{BARE_NEXT}"


BARE_NEXT = (
    "After the last task, `next(tasks)` raises StopIteration, which inside of a generator becomes this error. "
    "`itertools.islice(tasks, 1)` gives one task, or none."
)


def _fault_of_results(prefetched: Any) -> str | None:
    for number, ahead in ((0, 2), (1, 2), (6, 2), (6, 1), (50, 4), (30, 12), (120, 40)):
        observed = _observed(prefetched, number, ahead)
        results, drawn_at = observed.results, observed.drawn_at
        setting = f"{number} tasks, {ahead} ahead: "
        if any(isinstance(result, Future) for result in results):
            return f"{setting}futures come.\nA future is a promise: `future.result()` waits for what was fetched."
        if sorted(results) != [10 * task for task in range(number)]:
            rest = "After the last task, what is still ahead must be given out."
            missing = min({10 * task for task in range(number)} - {*results}, default=number * 10)
            if missing < max(results, default=0):
                rest = "A task was drawn and not fetched: `zip(tasks, range(ahead))` draws one more than it gives."
            return f"{setting}{len(results)} results came: {results}.\n{rest}"
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
        try:
            for result in prefetched(fetch, iter(tasks), ahead):
                got.append(getattr(result, "task", result))
                most = max(most, len(alive))
                del result
        except KeyError as error:
            return f"the tasks {tasks}, {ahead} ahead: it raised KeyError: {error}.\n{EQUAL_TASKS}"
        if got != tasks:
            return f"the tasks {tasks}, {ahead} ahead: the results are those of {got}.\n{FALSE_TASKS}"
        if most > ahead + 3:
            return f"{number} tasks, {ahead} ahead: {most} results are alive at the same time.\n{KEPT}"
    fetched = [1, None, 0, None, 2]
    if (came := list(prefetched(lambda task: task, iter(fetched), 2))) != fetched:
        return f"`fetch` returns {fetched} by turns, and {came} came.\n{FALSE_RESULTS}"
    try:
        came = list(prefetched(lambda task: task, fetched, 2))
    except TypeError as error:
        return f"a list of tasks: it raised TypeError: {error}.\n{A_LIST}"
    if came != fetched:
        return f"the list of tasks {fetched}, 2 ahead: the results are those of {came}.\n{A_LIST}"
    return None


FALSE_TASKS = "A task may be 0, None or an empty text. Ask whether there is a task, not whether it is true."
EQUAL_TASKS = "Two tasks may be equal, and 0 equals False: a dict with tasks as its keys has one place for both."
A_LIST = (
    "`pool.map` takes any iterable. A list begins anew each time it is asked; `iter(tasks)` is asked once, and goes on."
)
FALSE_RESULTS = "A result may be None: the caller decides what it means, as a collate_fn's None."
KEPT = "What was given out is the caller's. A list that keeps all futures keeps all their results."


def _fault_of_errors(prefetched: Any) -> str | None:
    for ahead, kind in ((1, KeyError), (3, KeyError), (2, OSError), (2, ValueError), *SPECIAL_ERRORS):
        raised = kind("task 2")
        results, to_raise = [], {2: raised}

        def fetch(task: int, to_raise: dict[int, Any] = to_raise) -> int:
            if task in to_raise:
                raise to_raise.pop(task)  # a second try would succeed
            return task

        try:
            for result in prefetched(fetch, iter(range(6)), ahead):
                results.append(result)
        except kind as error:
            if error is not raised:
                return f"where `fetch` raises for the third of 6 tasks, another {kind.__name__} came.\n{MADE_ANEW}"
            if results == [0, 1]:
                continue
        return f"where `fetch` raises for the third of 6 tasks, {ahead} ahead, {results} came.\n{ERRORS}"

    def next_of_nothing(task: int) -> int:
        return next(iter(())) if task == 2 else task

    try:
        results = list(prefetched(next_of_nothing, iter(range(6)), 2))
    except (StopIteration, RuntimeError):
        return None
    return f"where `fetch` raises StopIteration for the third of 6 tasks, {results} came.\n{ERRORS}"


def _fault_of_waiting(prefetched: Any) -> str | None:
    """A fetch that takes longer than an answer waits for it, whose seconds are milliseconds here."""
    wait, caller = threading.Condition.wait, threading.get_ident()
    longest: list[float] = []

    def waited(condition: Any, timeout: float | None = None) -> bool:  # in it end `result`, `wait` and an event's
        if timeout is None or threading.get_ident() != caller:
            return wait(condition, timeout)
        longest.append(timeout)
        return wait(condition, min(timeout, 0.001))

    def fetch(task: int) -> int:
        time.sleep(0.02)
        return task

    with mock.patch.object(threading.Condition, "wait", waited):
        try:
            results = list(prefetched(fetch, iter(range(4)), 1))
        except (TimeoutError, multiprocessing.TimeoutError):
            results = []
    if results != [0, 1, 2, 3]:
        return f"a fetch that takes longer than {max(longest, default=0):g} s ends the epoch.\n{IMPATIENT}"
    return None


MADE_ANEW = "An error that is made anew has lost its traceback, its cause and its attributes: let it through as it is."
IMPATIENT = "`result()` without a timeout waits for as long as a fetch takes."
SPECIAL_ERRORS = (
    *((2, FileNotFoundError), (3, TimeoutError), (2, IndexError), (1, ConnectionError)),
    *((2, RuntimeError), (1, MemoryError), (3, ZeroDivisionError), (2, TypeError), (1, AttributeError)),
)
"""By how many are ahead: what somebody may take for no error."""
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


def _by_dict(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks, futures, order = iter(tasks), {}, deque()  # type: ignore[var-annotated]
    with ThreadPoolExecutor(4) as pool:
        while True:
            for task in itertools.islice(tasks, ahead + 1 - len(order)):
                futures[task] = pool.submit(fetch, task)
                order.append(task)
            if not order:
                return
            yield futures.pop(order.popleft()).result()


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


def _by_asking_twice(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    with ThreadPoolExecutor(4) as pool:
        pending = deque(pool.submit(fetch, task) for task in itertools.islice(tasks, ahead))
        for task in tasks:
            pending.append(pool.submit(fetch, task))
            yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _oldest_first(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    tasks = iter(tasks)
    with ThreadPoolExecutor(4) as pool:
        pending = deque(pool.submit(fetch, task) for task in itertools.islice(tasks, ahead))
        while pending:
            oldest = pending.popleft()
            pending.extend(pool.submit(fetch, task) for task in itertools.islice(tasks, 1))
            yield oldest


def _without_none(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    for future in _oldest_first(fetch, tasks, ahead):
        if (result := future.result()) is not None:
            yield result


def _impatient(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    for future in _oldest_first(fetch, tasks, ahead):
        yield future.result(timeout=5)


def _with_new_errors(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    for future in _oldest_first(fetch, tasks, ahead):
        if (error := future.exception()) is not None:
            raise type(error)(*error.args)
        yield future.result()


def _without_errors(fetch: Any, tasks: Any, ahead: int) -> Iterator[Any]:
    for future in _oldest_first(fetch, tasks, ahead):
        with contextlib.suppress(KeyError):
            yield future.result()


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
        EQUAL_TASKS: _by_dict,
        FALSE_TASKS: partial(_by_walrus, ask=bool),
        KEPT: _by_list,
        A_LIST: _by_asking_twice,
        FALSE_RESULTS: _without_none,
        ERRORS: _without_errors,
        MADE_ANEW: _with_new_errors,
        IMPATIENT: _impatient,
    },
)
