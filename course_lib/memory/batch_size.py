"""The largest batch that fits: predicted, then tried, as a rule once and without running out of memory.

Doubling until it crashes finds a power of two by provoking errors, and some finders return a size that they never
tried. But a step is the same sequence of allocations whatever the batch, so each moment of it holds ``const + c · b``
bytes. The rule: *two small sizes give every moment's line; the largest size is where the first line meets the limit;
and an answer is a size that has run.* `batch_size_search` holds what one rank knows and tries.

    fitted = find_batch_size(model, make_batch, optimizer, limit_bytes=24 * 2**30)
    print(fitted)                                               # size, predicted, measured, limit, the trials
    loader = DataLoader(dataset, batch_size=fitted.batch_size)

Predictions run no kernel; a trial is two real steps, as the first one makes the optimizer's state. Afterwards weights,
buffers, optimizer, gradients, random generators and modules' attributes are as before, bit for bit. Chapter 03 counts
what other finders do.

Sources: ``lightning.pytorch.tuner.batch_size_scaling`` and accelerate's ``find_executable_batch_size``, the two to
compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from course_lib._generators import generators_put_back
from course_lib._ranks import gathered, those_with_nan
from course_lib._words import readable_bytes
from course_lib.memory.batch_size_search import BatchSizeTrial, MultipleOf, Search

MAX_TRIALS = 3


@dataclass(frozen=True)
class FittedBatchSize:
    """A batch size that has run within the limit, on every rank."""

    batch_size: int
    predicted_bytes: int
    measured_bytes: int
    limit_bytes: int
    """What this rank's step may hold."""
    trials: list[BatchSizeTrial]

    def __str__(self) -> str:
        measured, predicted = readable_bytes(self.measured_bytes), readable_bytes(self.predicted_bytes)
        head = f"batch size {self.batch_size}: measured {measured}, predicted {predicted}"
        tried = [f"  tried {trial}" for trial in self.trials]
        return "\n".join([f"{head}, limit {readable_bytes(self.limit_bytes)}", *tried])


def find_batch_size(
    model: nn.Module,
    batch_fn: Callable[[int], Any],
    optimizer: Optimizer,
    *,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    limit_bytes: int | None = None,
    fraction: float = 0.9,
    max_batch_size: int = 2**16,
    multiple_of: MultipleOf = 1,
) -> FittedBatchSize:
    """Find the largest batch size whose training step stays within a limit: the same one on all ranks.

    It is the largest where each moment's bytes are linear in the batch. Else (a loss of all pairs, a net that pads) it
    is one that has run within the limit, as a rule at most some 4 % below the largest.

    Two predictions at small sizes give the lines, and a third checks them where they meet the limit. One real trial
    there verifies them. If they were off, they are corrected and tried again: at most three trials. On a GPU the first
    trial takes half the size, as kernels' workspaces are not predicted. Each rank may have a limit of its own; the
    smallest answer counts. The optimizer's hooks run in trials.

    Args:
        model: The trials run where its parameters are. Of a DDP model the module inside runs, so that no rank waits.
        batch_fn: ``batch_fn(size)`` -> a batch, of the same shapes whenever it is asked for a size. Where samples have
            many lengths, make it of the longest: ``lambda size: loader.collate_fn([longest] * size)``.
        loss_fn: ``loss_fn(model, batch)`` -> a 0-dim loss; see ``predict_peak`` for it and its default. An autocast
            belongs in it.
        limit_bytes: What the step may hold, parameters included. Default: what the device's tensors hold now, and
            ``fraction`` of what is free (on a GPU, the allocator's cache too). On a GPU it is compared with what the
            allocator reserves.
        fraction: Of the free memory; it has no meaning beside ``limit_bytes``.
        max_batch_size: The largest size to consider.
        multiple_of: Round down to a multiple, or to a ``"power of two"``, before trying.

    Raises:
        ValueError: An argument out of range; an optimizer that needs a closure; batches that don't grow with the size,
            or differ in shape at one size.
        MemoryError: No size was found: not even one sample fits (the message has the table by category), or no
            multiple of ``multiple_of``, or none of the trials stayed within the limit.
        RuntimeError: The step cannot be predicted (see ``predict_peak``), or another rank raised; the message says why.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be the nn.Module itself, as real steps are tried on it, got {type(model).__name__}: give "
            "model where predict_peak takes a function that makes one"
        )
    own = model.module if isinstance(model, DistributedDataParallel) else model
    search: Search

    def largest_predicted() -> int:
        nonlocal search
        search = Search(
            own,
            batch_fn,
            optimizer,
            loss_fn=loss_fn,
            limit_bytes=limit_bytes,
            fraction=fraction,
            max_batch_size=max_batch_size,
            multiple_of=multiple_of,
        )
        return search.largest_predicted()

    with generators_put_back():
        search.beyond = _least(largest_predicted) + 1
        for number in range(MAX_TRIALS):
            size = _least(partial(search.next_trial, last=number == MAX_TRIALS - 1))
            if not size:
                break
            search.narrow(size, _least(partial(search.run, size)))
    best = search.answer()
    measured = next(trial.nbytes for trial in search.trials if trial.batch_size == best)
    assert measured is not None
    return FittedBatchSize(best, search.predict(best), measured, search.limit, search.trials)


def find_batch_sizes(
    shapes: Iterable[Any],
    model: nn.Module,
    batch_fn: Callable[[int, Any], Any],
    optimizer: Optimizer,
    **options: Any,
) -> dict[Any, FittedBatchSize]:
    """`find_batch_size` for each shape (a resolution, a length) of a schedule; `batch_fn(size, shape)` -> a batch.

    table = find_batch_sizes([128, 160, 224], model, lambda n, side: images(n, side), optimizer)
    {shape: fitted.batch_size for shape, fitted in table.items()}

    A shape that is a list is a tuple in what is returned.
    """

    def fit(shape: Any) -> FittedBatchSize:
        return find_batch_size(model, lambda size: batch_fn(size, shape), optimizer, **options)

    return {tuple(shape) if isinstance(shape, list) else shape: fit(shape) for shape in shapes}


# ---------------------------------------------------------------------------------------------------------- all ranks


def _least(fn: Callable[[], float]) -> int:
    """The smallest of the ranks' ``fn()``; if any of them raises, all do. One collective."""
    refused: Exception | None = None
    value = math.nan
    try:
        value = float(fn())
    except Exception as error:
        refused = error
    values = [row[0] for row in gathered([value])]
    if refused is not None:
        raise refused
    if where := those_with_nan(values):
        raise RuntimeError(f"no batch size was found, as {where} raised, whose own message says why")
    return int(min(values))
