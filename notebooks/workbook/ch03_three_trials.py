"""What chapter 03 asks last: the largest batch that fits, in three trials of which none may run out of memory."""

from __future__ import annotations

import numbers
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from workbook.exercises import SEARCHED, PropertyExercise

Run = Callable[[int], int]


@dataclass
class Device:
    """Holds the higher of two lines, the optimizer's step and the backward pass, and has a limit."""

    step: tuple[int, int]
    """Bytes without samples, and bytes for each sample."""
    backward: tuple[int, int]
    limit: int
    usual: int
    tried: list[int] = field(default_factory=list)

    def held(self, batch_size: int) -> int:
        return max(const + per_sample * batch_size for const, per_sample in (self.step, self.backward))

    def run(self, batch_size: int) -> int:
        if not isinstance(batch_size, numbers.Integral) or batch_size < 1:
            raise _NoBatchSize(batch_size)
        batch_size = int(batch_size)
        self.tried.append(batch_size)
        if len(self.tried) > 1000:
            raise RuntimeError("run was called 1,000 times: does the search come to an end?")
        if self.held(batch_size) > self.limit:
            raise MemoryError(f"a batch of {batch_size} holds {self.held(batch_size)} bytes, the limit is {self.limit}")
        return self.held(batch_size)

    def errors(self) -> list[int]:
        return [size for size in self.tried if self.held(size) > self.limit]

    def largest(self) -> int:
        return (self.limit - self.backward[0]) // self.backward[1]


def _only_runs(device: Device) -> Run:
    """What may be asked of a device: a method would hand over the device, too."""
    return lambda batch_size: device.run(batch_size)


class _NoBatchSize(ValueError):
    pass


DEVICES: tuple[dict[str, Any], ...] = (
    dict(step=(0, 0), backward=(0, 10), limit=1000, usual=20),
    dict(step=(0, 0), backward=(300, 10), limit=1000, usual=20),
    dict(step=(0, 0), backward=(300, 7), limit=1009, usual=20),
    dict(step=(0, 0), backward=(100, 10), limit=1600, usual=100),
    dict(step=(33_152, 392), backward=(24_704, 904), limit=5_448_704, usual=256),
    dict(step=(50_000, 0), backward=(20_000, 900), limit=5_420_000, usual=256),
    dict(step=(0, 0), backward=(0, 10), limit=1_000_000, usual=20),
    # The bend is at the half itself; an odd size; and a device that has no room for one sample more.
    dict(step=(128_000, 0), backward=(0, 1000), limit=1_000_000, usual=256),
    dict(step=(0, 0), backward=(100, 10), limit=1605, usual=51),
    dict(step=(0, 0), backward=(100, 10), limit=1109, usual=100),
)


def _draw_device(draw: random.Random) -> dict[str, Any]:
    usual = draw.choice([2, 3, draw.randint(4, 300)])
    const, slope = draw.choice([0, draw.randrange(5000)]), draw.randint(1, 60)
    at_half = const + slope * (usual // 2)
    step = draw.choice([0, at_half, draw.randint(0, at_half)])
    room = draw.choice([0, slope - 1, slope, draw.randrange(100 * slope)])
    return dict(step=(step, 0), backward=(const, slope), limit=const + slope * usual + room, usual=usual)


def fault_of_search(find: Callable[[Callable[[int], int], int, int], Any]) -> str | None:
    """What is wrong with a ``find(run, limit, usual)``, on the simplest device on which it fails; or None."""
    draw = random.Random(0)
    for settings in (*DEVICES, *(_draw_device(draw) for _ in range(SEARCHED))):
        device = Device(**settings)
        answer: Any = None
        raised: Exception | None = None
        try:
            answer = find(_only_runs(device), device.limit, device.usual)
        except (_NoBatchSize, MemoryError, ZeroDivisionError) as error:
            raised = error
        fault = _fault_of_trials(device, answer, raised) or _fault_of_answer(device, answer)
        if fault:
            return f"on a device of {device.limit:,} bytes, where {device.usual} is the usual size: {fault}"
    return None


def _fault_of_trials(device: Device, answer: Any, raised: Exception | None) -> str | None:
    tried, errors = device.tried, device.errors()
    small = sorted({size for size in tried if size < device.usual // 2})
    if isinstance(raised, _NoBatchSize):
        return f"run({raised.args[0]!r}): a batch size is a whole number of at least 1. `//` rounds down."
    if isinstance(raised, ZeroDivisionError):
        return (
            f"division by zero: the sizes {tried} all held {device.held(tried[0]):,} bytes. There the optimizer's step "
            "is the worst moment, and it says nothing about a sample. Measure at larger sizes."
        )
    if device.usual + 1 in errors and device.usual + 1 in tried[:2]:
        return (
            f"a batch of {device.usual + 1} ran out of memory: nothing says that one more than the usual size fits. "
            "One less does."
        )
    if len(tried) > 3 and errors:
        return (
            f"{len(tried)} trials, {len(errors)} of which ran out of memory. Doubling, halving and binary search find "
            "the limit by errors. Two trials tell the line: compute where it meets the limit."
        )
    if len(tried) > 3:
        return f"{len(tried)} trials. Right, perhaps, but slow: two trials tell the line, so jump to the limit."
    if errors and errors[0] == device.largest() + 1:
        return f"a batch of {errors[0]} ran out of memory: it is one too many. Round down."
    if errors and errors[0] == 2 * device.usual:
        return (
            f"a batch of {errors[0]} ran out of memory: nothing says that twice the usual size fits. Half of it does."
        )
    if (errors or small) and small and len(tried) > 2 and device.largest() not in tried:
        return (
            f"the line through {tried[0]} and {tried[1]} promised {tried[2]}. At a batch of {small[0]} another moment "
            "is the worst, so that point lies on another line."
        )
    if errors:
        return f"a batch of {errors[0]} ran out of memory: nothing that was measured said that it would fit."
    return None


def _fault_of_answer(device: Device, answer: Any) -> str | None:
    largest = device.largest()
    if answer is None:
        return "it returned nothing. Does it end with `return`?"
    if not isinstance(answer, numbers.Integral):
        return f"the answer is {answer!r}, and a batch size is a whole number. `//` rounds down."
    answer = int(answer)
    if answer not in device.tried and answer == largest:
        return f"the answer {answer} was never run. So far it is a prediction."
    if answer not in device.tried:
        return f"the answer {answer} was never run, and {largest} is the largest that fits."
    if answer == largest:
        return None
    others = [size for size in device.tried if size != answer]
    if any(answer == device.limit * size // device.held(size) for size in others):
        return (
            f"the answer {answer} comes from a proportion, and a step holds const + slope · b: that counts const once "
            "for each sample. A larger batch fits."
        )
    if answer == largest - 1:
        return f"the answer {answer} is one too few: {largest} holds no more than the limit."
    if answer > 0.8 * largest:
        return (
            f"the answer {answer} leaves {device.limit - device.held(answer):,} bytes free, and {largest} fits. Does "
            "the line go through both of the points that were run? (A margin is wise on a real device; here `limit` is "
            "what may be used.)"
        )
    return f"the answer {answer} holds {device.held(answer):,} bytes, and a larger batch fits."


def _by_line(
    run: Run, limit: int, usual: int, *, points: Callable[[int], tuple[int, int]] = lambda usual: (usual // 2, usual)
) -> int:
    largest = _untried(run, limit, usual, points=points)
    run(largest)
    return largest


def _untried(
    run: Run, limit: int, usual: int, *, points: Callable[[int], tuple[int, int]] = lambda usual: (usual // 2, usual)
) -> int:
    low, high = points(usual)
    at_low, at_high = run(low), run(high)
    return high + (limit - at_high) * (high - low) // (at_high - at_low)


def _shifted(run: Run, limit: int, usual: int, *, change: Callable[[int], Any]) -> Any:
    largest = change(_untried(run, limit, usual))
    run(largest)
    return largest


def _by_doubling(run: Run, limit: int, usual: int) -> int:
    size = usual
    while True:
        try:
            run(size)
        except MemoryError:
            return size // 2
        size *= 2


def _in_proportion(run: Run, limit: int, usual: int) -> int:
    size = limit * usual // run(usual)
    run(size)
    return size


def _one_by_one(run: Run, limit: int, usual: int) -> int:
    size, step = usual, run(usual) - run(usual - 1)
    while run(size) + step <= limit:
        size += 1
    return size


three_trials = PropertyExercise(
    "find",
    find_fault=fault_of_search,
    misconceptions={
        "was never run. So far it is a prediction.": _untried,
        "find the limit by errors": _by_doubling,
        "comes from a proportion": _in_proportion,
        "slow: two trials tell the line": _one_by_one,
        "so that point lies on another line": partial(_by_line, points=lambda usual: (1, 2)),
        "nothing says that twice the usual size fits": partial(_by_line, points=lambda usual: (usual, 2 * usual)),
        "nothing that was measured said that it would fit": partial(_by_line, points=lambda usual: (1, 200)),
        "it is one too many": partial(_shifted, change=lambda size: size + 1),
        "is one too few": partial(_shifted, change=lambda size: size - 1),
        "a whole number of at least 1": partial(_shifted, change=float),
        "A margin is wise on a real device": partial(_shifted, change=lambda size: int(0.9 * size)),
    },
)
