"""The largest batch that fits, predicted, then tried: once as a rule, and without running out of memory.

Doubling until it crashes finds a power of two by provoking errors, and some finders return a size that they never
tried. But a step is the same sequence of allocations whatever the batch, so each moment of it holds ``const + c · b``
bytes. The rule: *two small sizes give every moment's line; the largest size is where the first line meets the limit;
and an answer is a size that has run.*

    fitted = find_batch_size(model, make_batch, optimizer, limit_bytes=24 * 2**30)
    print(fitted)                                               # size, predicted, measured, limit, the trials
    loader = DataLoader(dataset, batch_size=fitted.batch_size)

Predictions run no kernel; a trial is two real steps, as the first one makes the optimizer's state. Afterwards model,
optimizer, gradients and random generators are as before, bit for bit. Chapter 03 counts what other finders do.

Sources: ``lightning.pytorch.tuner.batch_size_scaling`` and accelerate's ``find_executable_batch_size``, the two to
compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from course_lib._ranks import device_of, world_size_of
from course_lib.memory.lines import MultipleOf, Search, Trial
from course_lib.memory.restoring import undisturbed
from course_lib.memory.wording import readable

MAX_TRIALS = 3
MAX_PREDICTIONS = 8
"""After those of the small sizes; as a rule one is enough."""


@dataclass(frozen=True)
class FittedBatchSize:
    """A batch size that has run within the limit, on every rank."""

    batch_size: int
    predicted_bytes: int | None
    """What the lines say for this size. Where the step could not be predicted, they are those of
    earlier trials, and None where there was none."""
    measured_bytes: int
    limit_bytes: int
    """What this rank's step may hold."""
    trials: list[Trial]
    doubts: list[str] = field(default_factory=list)
    """Why the next run may need more than was measured, or why the prediction was off."""

    def __str__(self) -> str:
        lines = [
            f"batch size {self.batch_size}: measured {readable(self.measured_bytes)}, predicted "
            f"{'-' if self.predicted_bytes is None else readable(self.predicted_bytes)}, "
            f"limit {readable(self.limit_bytes)}"
        ]
        lines += [f"  tried {trial}" for trial in self.trials]
        return "\n".join(lines + [f"doubt: {doubt}" for doubt in self.doubts])


def find_batch_size(
    model: nn.Module,
    batch_fn: Callable[[int], Any] | DataLoader[Any],
    optimizer: Optimizer,
    *,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    step_fn: Callable[[Any], Any] | None = None,
    limit_bytes: int | None = None,
    fraction: float = 0.9,
    max_batch_size: int | None = None,
    multiple_of: MultipleOf = 1,
    loader: Any = None,
    group: dist.ProcessGroup | None = None,
) -> FittedBatchSize:
    """Find the largest batch size whose training step stays within a limit, on all ranks the same.

    Two predictions at small sizes give the lines, a third checks them where they meet the limit. One real trial there
    verifies; if it was off, the lines are corrected, and tried again: at most three trials. Where a prediction has
    doubts (kernels that it cannot see into), the first trial takes half the size. The optimizer's hooks run in trials.

    Args:
        model: Where its parameters are, the trials run. Of a DDP model the module inside runs, so that no rank waits.
        batch_fn: ``batch_fn(size)`` -> a batch. Samples of many lengths: make it of the longest. Of a DataLoader the
            first sample of its dataset is taken, ``size`` times, through its ``collate_fn``: its position stays.
        loss_fn: ``loss_fn(model, batch)`` -> a 0-dim loss; see ``predict_peak`` for it and its default. An autocast
            belongs in it.
        step_fn: ``step_fn(batch)``, a whole step on ``model`` and ``optimizer``, instead of ``loss_fn``. It isn't
            predicted: two small trials give the lines. The same is done where a prediction is impossible. In DDP all
            ranks try the same sizes, but one that runs out of memory leaves the others waiting in its collectives.
        limit_bytes: What the step may hold, parameters included, taken as it is. Default: what the device's tensors
            hold now and ``fraction`` of what is free (on a GPU the allocator's cache too; on a CPU this needs psutil).
            On a GPU what the allocator reserves is held against it.
        fraction: Of the free memory; without a meaning beside ``limit_bytes``.
        max_batch_size: The largest size to consider; default 65,536, for a DataLoader the length of its dataset.
        multiple_of: Round down to a multiple, or to a ``"power of two"``, before trying.
        loader: What ``batch_fn`` reads from: put back to its place by ``state_dict`` and ``load_state_dict``.
        group: The ranks that must agree; default: all. Each may have its own limit, the smallest answer counts.

    Raises:
        ValueError: An argument out of range; batches that don't grow with the size.
        MemoryError: No size was found: not even one sample fits (the message has the table by category), or no
            multiple of ``multiple_of``, or none of the trials stayed within the limit.
        RuntimeError: Another rank raised; its own message says why.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    ranks = _Ranks(group)
    with undisturbed(loader):
        search = ranks.together(
            lambda: Search(
                model,
                batch_fn,
                optimizer,
                loss_fn=loss_fn,
                step_fn=step_fn,
                limit_bytes=limit_bytes,
                fraction=fraction,
                max_batch_size=max_batch_size,
                multiple_of=multiple_of,
            )
        )
        search.upper = ranks.least(lambda: search.upper)
        search.predicted = ranks.least(search.predict_small_sizes) == 1
        if search.predicted:
            _settle(search, ranks)
        else:
            search.lines.clear()  # where other ranks could not predict theirs
        while len(search.trials) < MAX_TRIALS:
            size = ranks.least(lambda: search.next_size(last=len(search.trials) == MAX_TRIALS - 1))
            if not size:
                break
            if search.predicted and size not in search.lines:  # rounded down, or corrected
                ranks.together(lambda size=size: search.predict(size))  # type: ignore[misc]
            search.conclude(size, ranks.least(lambda size=size: search.run(size)))  # type: ignore[misc]
        best = ranks.together(search.answer)
    trial = next(trial for trial in search.trials if trial.batch_size == best)
    assert trial.nbytes is not None
    return FittedBatchSize(
        batch_size=best,
        predicted_bytes=search.promised[best],
        measured_bytes=trial.nbytes,
        limit_bytes=search.limit,
        trials=search.trials,
        doubts=search.doubts + search.surprise(),
    )


def _settle(search: Search, ranks: _Ranks) -> None:
    """Predict where the lines meet the limit, until the lines that this gives meet it there again."""
    for _ in range(MAX_PREDICTIONS):
        size = ranks.least(lambda: max(1, search.largest()))
        if size in search.lines:
            return
        ranks.together(lambda size=size: search.predict(size))  # type: ignore[misc]
    # These are no lines; what has been predicted to fit is known all the same.
    search.upper = ranks.least(
        lambda: max((n for n, held in search.lines.items() if max(held) <= search.limit), default=1)
    )


def find_batch_sizes(
    shapes: Iterable[Any],
    model: nn.Module,
    batch_fn: Callable[[int, Any], Any],
    optimizer: Optimizer,
    **options: Any,
) -> dict[Any, FittedBatchSize]:
    """`find_batch_size` for each shape (a resolution, a length) of a schedule; `batch_fn(size, shape)` -> a batch.

    >>> table = find_batch_sizes([128, 160, 224], model, lambda n, side: images(n, side), optimizer)
    >>> {shape: fitted.batch_size for shape, fitted in table.items()}
    """
    return {
        shape: find_batch_size(model, lambda size, shape=shape: batch_fn(size, shape), optimizer, **options)  # type: ignore[misc]
        for shape in shapes
    }


# ---------------------------------------------------------------------------------------------------------- all ranks

_T = TypeVar("_T")


class _Ranks:
    """Lets every rank come to the same answer, and to an end when one of them raises. One collective a question."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.world_size = group, world_size_of(group)

    def together(self, fn: Callable[[], _T]) -> _T:
        """``fn()``, once all ranks have called theirs."""
        results: list[_T] = []
        self.least(lambda: results.append(fn()) or 0)  # type: ignore[func-returns-value]
        return results[0]

    def least(self, fn: Callable[[], float]) -> int:
        """The smallest of the ranks' ``fn()``; if any of them raises, all do."""
        refused: Exception | None = None
        value = math.nan
        try:
            value = float(fn())
        except Exception as error:
            refused = error
        gathered = [torch.tensor([value], dtype=torch.float64)]
        if self.world_size > 1:
            own = gathered[0].to(device_of(self.group))
            gathered = [torch.empty_like(own) for _ in range(self.world_size)]
            dist.all_gather(gathered, own, group=self.group)
        if refused is not None:
            raise refused
        values = torch.cat(gathered).tolist()
        if any(map(math.isnan, values)):
            where = ", ".join(f"rank {rank}" for rank, value in enumerate(values) if math.isnan(value))
            raise RuntimeError(f"no batch size was found, as {where} raised, whose own message says why")
        return int(min(values))
