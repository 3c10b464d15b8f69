"""What grows from step to step, and who holds it.

A loop that runs out of memory after an hour has kept a little of every step: a graph behind `total += loss`, a list
of outputs, a hook registered again, a worker's copy of the dataset. The memory curve shows how much, never whose.
The rule: *what is alive after a step must be the same after every step; what isn't has a name.*

    report = watch_growth(lambda: train_step(next(batches)))
    print(report)           # graph: tensor `total` (global of __main__) has 14 more graph nodes a step ...
    assert report.ok

The verdict rests on what is counted after `gc.collect()`, so it is the same in each run: the lengths of lists, dicts,
sets and deques; the graph behind the tensors that a closure, an attribute or a module's global holds; live tensors,
their bytes and the nodes of autograd's graphs in all. The workers' bytes are noisy: they are counted when every child
process waits for something, and only above a threshold.

`del` and `gc.collect()` don't cure what this reports: they drop a name and a cycle, and it is held by neither.

Sources: pytorch's FAQ, "My model reports CUDA out of memory"; pytorch/pytorch #13246 (workers copy what they read).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_lib._words import counted, int_of_at_least
from course_lib.leaks.census import Census, series_of
from course_lib.leaks.culprits import Culprit, find_culprits


@dataclass(frozen=True)
class GrowthReport:
    """What `watch_growth` saw. It holds only names and numbers."""

    steps: int
    culprits: list[Culprit]
    series: dict[str, list[int]]
    """After each step: tensors, tensor_bytes, graph_nodes, worker_bytes."""

    @property
    def ok(self) -> bool:
        return not self.culprits

    def __str__(self) -> str:
        if self.ok:
            last = {name: values[-1] for name, values in self.series.items()}
            return (
                f"nothing grew in {self.steps} steps: {last['tensors']} tensors of {last['tensor_bytes']} B and "
                f"{last['graph_nodes']} graph nodes are alive after the last"
            )
        lines = [f"{counted(len(self.culprits), 'thing')} grew in {self.steps} steps"]
        return "\n".join(lines + [str(culprit) for culprit in self.culprits])


def watch_growth(
    step: Callable[[], Any],
    steps: int = 12,
    *,
    warmup: int = 3,
) -> GrowthReport:
    """Call `step()` again and again, and name what grows.

    A series grows if all of its last third lies above its first third, and the rise does not slow down to under half.
    So a cache that fills up, a buffer that is emptied every few steps and a bounded deque are not reported. `steps`
    must cover at least three of the loop's own periods (a window of accumulation, a log that is written out every n
    steps), and more where the growth is small against the swing within a period.

    It leaves nothing behind: no hook, no reference, no number drawn from a generator. A look takes tenths of a second,
    so watch tens of steps, not an epoch. What was put aside with `gc.freeze` before is not watched. In a process that
    has called it, everything alive is frozen at the end, so call `gc.unfreeze()` before you watch again.

    Bounds: tensors in tuples, in place of others in a list or a variable, or in a list that each step makes anew, are
    told without a name, and only where nothing else grows. A log of numbers, texts or small objects counts from 1,024
    bytes a step. What is no container, tensor or graph node is not seen to grow: one string, one array, one
    `bytearray`, what a library holds by itself; nor is a dict of numbers, texts or arrays that is held by lists or
    tuples alone. A child process that never rests is waited for once, for half a minute.

    Args:
        step: One training step, or whatever is repeated; called without arguments, `warmup + steps` times.
        steps: How many steps are watched; at least 6.
        warmup: Steps before these, for what is made only once: the optimizer's state, workers, torch's own caches.

    Raises:
        TypeError: `step` is not callable.
        ValueError: `steps` is below 6, or `warmup` below 0.
        Whatever `step` raises, unchanged.
    """
    if not callable(step):
        raise TypeError(
            f"step must be callable without arguments, got {step!r}: give the function, not what it returns, "
            "as in watch_growth(lambda: train_step(next(batches)))"
        )
    steps = int_of_at_least(6, "steps", steps)
    warmup = int_of_at_least(0, "warmup", warmup)
    with Census() as census:
        for _ in range(warmup):
            step()
        census.begin()
        counts = []
        for _ in range(steps):
            step()
            counts.append(census.count())
        return GrowthReport(steps, find_culprits(census, counts), series_of(counts))
