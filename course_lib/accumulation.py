"""Gradient accumulation whose gradient is the one big batch's, where the loss is a sum over samples.

The usual loop divides each mean loss by `k`. That weighs *micro-batches* equally; a big batch weighs *samples*
(or tokens) equally. The two part where a window is short, micro-batches are ragged, tokens are masked, or ranks
hold different numbers of samples.
The rule: *the batch counter decides when to step; the sample counter decides how to average.*

    for window in windows(loader, k):                       # the short last window included
        optimizer.zero_grad()
        accumulate(model, window, loss_sum_fn=summed_loss, count_fn=lambda batch: len(batch[0]))
        optimizer.step()                                    # summed_loss(model, batch) -> 0-dim loss

What no weighting can make equal, because the forward itself differs: BatchNorm normalises with each micro-batch's
statistics instead of the window's, and dropout draws other masks (chapter 04 measures both); and a layer whose state
each forward moves, such as spectral norm, is another one in the window's second micro-batch. And what is no sum over
samples (a penalty on the weights) must be multiplied by its micro-batch's count.

Sources: huggingface/transformers #34191 and #34198 (token-level means, found in many trainers in October 2024);
Lightning-AI/pytorch-lightning #19987 (the short window is divided by k); torch's `DistributedDataParallel.no_sync`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_lib._loss_graph import is_mean
from course_lib._ranks import (
    Reduction,
    gathered,
    reduction_of,
    refuse_what_ddp_never_reduces,
    refuse_what_is_outside_ddp,
    those_with_nan,
    world_size_of,
)
from course_lib._words import counted, int_of_at_least

__all__ = ["Accumulated", "accumulate", "windows"]


def windows(batches: Iterable[Any], k: int) -> Iterator[MicroBatchWindow]:
    """Group micro-batches into windows of `k`, the short last one included: none is lost, none waits for an epoch.

    Each window is a list, with its `number` and, where `batches` has a length, the `number_of_windows`. Nothing is
    fetched ahead: between two windows a loader's `state_dict` is that of the windows before.

    Bounds: where streams without a length give the ranks different numbers of windows, the ranks find it when they meet
    in windows of different numbers, or wait in `accumulate` until the process group's limit of time.

    Raises:
        ValueError: `k` is not a positive int; or `batches` has the length 0, and this is one of several ranks.
    """
    k = int_of_at_least(1, "k", k)
    try:
        number_of_windows = math.ceil(len(batches) / k) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset
        number_of_windows = None
    if number_of_windows == 0 and world_size_of() > 1:
        raise ValueError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} has no batch: ranks that have one would wait for it in "
            "accumulate. Give all ranks as many batches (course_lib.samplers deals them so)"
        )
    return _windows(batches, k, number_of_windows)


class MicroBatchWindow(list[Any]):
    """The micro-batches behind one update: a list that knows its place in the iteration."""

    number: int
    """1 for the iteration's first window: of an epoch that a resumed loader goes on with, the first of the rest."""
    number_of_windows: int | None
    """How many this rank's epoch has, by ``len``, which counts what a resumed loader has done before; else None."""


def accumulate(
    model: nn.Module,
    window: Sequence[Any],
    loss_sum_fn: Callable[..., Tensor],
    count_fn: Callable[[Any], float | Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    backward: Callable[[Tensor], Any] = torch.Tensor.backward,
) -> Accumulated:
    """Run a window's backward passes so that `.grad` is that of one mean loss over all its samples on all ranks.

    One small collective a window (the count, before the first forward) and one gradient reduction, in the last
    micro-batch's backward. Ranks may hold different numbers of samples and of micro-batches, but equal numbers
    of windows. Gradients are added to those that are there: zero them before, step after. A layer that an early
    micro-batch uses and the last one doesn't needs DDP's `find_unused_parameters=True`.

    Args:
        model: A plain module, one that is or holds a `DistributedDataParallel` (Fabric's wrapper does), or one sharded
            by `fully_shard`, whose ranks need as many micro-batches in a window. A plain module's gradients are
            averaged over several ranks in one all-reduce.
        window: This rank's micro-batches, at least one; from `windows`, which lets ranks find unequal numbers of them.
            Let `loss_sum_fn` move each to the GPU.
        loss_sum_fn: `loss_sum_fn(model, micro_batch)` -> the *summed* loss, 0-dim. Where one argument at most has no
            default, it is called as `loss_sum_fn(micro_batch)`; it too must run the forward through `model`, once.
        count_fn: `count_fn(micro_batch)` -> how many samples, tokens or weights that sum runs over. 0 is allowed: over
            nothing, the gradient is taken as 0, be the loss a sum or a mean. Count what the *loss* sees: a causal
            language model doesn't predict the first token of a row, so `(batch["labels"] != -100).sum()` counts too
            many. In transformers the pair is `loss_sum_fn=lambda model, batch: model(**batch,
            num_items_in_batch=1).loss` and `count_fn=lambda batch: (batch["labels"][:, 1:] != -100).sum()`.
        group: The ranks to count over; default: those of DDP or the shards, else the default group, else this process.
        backward: What runs a backward pass: `fabric.backward`, or `lambda loss: scaler.scale(loss).backward()`.

    Raises:
        ValueError: On every rank alike: an empty window, a total count of 0, a count below 0, different numbers of
            windows (of shards: of micro-batches, too), what `reduction_of` refuses, parameters outside DDP or frozen
            when it was made, `static_graph=True`. On the rank it concerns: a loss that is not 0-dim or is a mean over
            more than one, as far as its graph tells (see `checked_loss_sum`), or of shards a NaN over a count of 0.
        RuntimeError: A rank did not answer, or the forward went past DDP, which would leave the ranks unequal.
    """
    reduction = reduction_of(model)
    _check_reduction(model, reduction, group)

    # Count over all ranks ahead of the first forward: in it DDP may wait for a rank that has raised here.
    micro_batches = list(window)
    counts, refused = _counts(count_fn, micro_batches)
    group = group or reduction.group
    global_count = count_window(
        sum(counts),
        micro_batches=len(micro_batches),
        equally_many=bool(reduction.shards),
        number=getattr(window, "number", None),
        number_of_windows=getattr(window, "number_of_windows", None),
        group=group,
        refused=refused,
    )

    # The gradient of the mean over all ranks' samples: DDP, fully_shard and, for a plain module, what is below average
    # over the ranks, which is undone here.
    scale = world_size_of(group) / global_count
    loss_of = loss_sum_fn if _takes_one(loss_sum_fn) else functools.partial(loss_sum_fn, model)
    loss_sums: list[Tensor] = []
    for position, (batch, count) in enumerate(zip(micro_batches, counts, strict=True), start=1):
        # The ranks reduce in the last backward alone, and there what all of them have added up. So the last forward
        # must go through DDP; one that went past it would be reduced by nobody.
        last = position == len(micro_batches)
        with nullcontext() if last else _no_reduction(reduction):
            with _forward_through(reduction.replicas if last else []):
                loss = checked_loss_sum(loss_of(batch), count)
            if not count:  # a mean over nothing is NaN, and so are its gradients
                if reduction.shards and bool(loss.isnan()):  # these can't be made zeros on their way
                    raise ValueError("the loss over a count of 0 must be 0, got NaN: sum it, no mean times the count")
                loss = loss.nan_to_num()
            with nullcontext() if count else gradients_as_zeros(model):
                backward(loss * scale)
        loss_sums.append(loss.detach().to(torch.promote_types(loss.dtype, torch.float32)))
    if world_size_of(group) > 1 and not (reduction.replicas or reduction.shards):
        _average_gradients(model, group)
    return Accumulated(torch.stack(loss_sums).sum(), sum(counts), global_count)


@dataclass(frozen=True)
class Accumulated:
    """What one window held. The global mean loss is the sum over ranks of `loss_sum`, over `global_count`."""

    loss_sum: Tensor
    """This rank's loss, summed over the window; 0-dim, detached."""
    count: float
    """This rank's samples (or tokens: what `count_fn` counts) in the window."""
    global_count: float
    """The same over all ranks: what the gradient was divided by."""


def _windows(batches: Iterable[Any], k: int, number_of_windows: int | None) -> Iterator[MicroBatchWindow]:
    iterator = iter(batches)
    for number in itertools.count(1):
        window = MicroBatchWindow(itertools.islice(iterator, k))
        if not window:
            return
        window.number, window.number_of_windows = number, number_of_windows
        yield window


# ------------------------------------------------------------------------------------- the count over all ranks


class NothingToAverage(ValueError):
    """The count of a window is 0 over all ranks: no sample of it has a label. All ranks raise it."""


def count_window(
    count: float,
    *,
    micro_batches: int = 1,
    equally_many: bool = False,
    number: int | None = None,
    number_of_windows: int | None = None,
    group: dist.ProcessGroup | None = None,
    refused: Exception | None = None,
) -> float:
    """This rank's count of a window added to those of all ranks of `group`, which find here that they don't match.

    `equally_many`: all ranks must have as many micro-batches. `number` (from 1) and `number_of_windows` are None where
    they aren't known. `refused` is this rank's own error, raised after the others have been told (by a `count` of NaN).
    One collective of four numbers.
    """
    rows = gathered([count, micro_batches, number or 0, number_of_windows or 0], group)
    if refused is not None:
        raise refused
    counts = [row[0] for row in rows]
    if where := those_with_nan(counts):
        raise ValueError(f"a count was refused on {where}, whose own message says why: no rank can average this window")
    of_each_rank = [int(row[1]) for row in rows]
    by_rank = ", ".join(f"rank {rank}: {held}" for rank, held in enumerate(of_each_rank))
    if 0 in of_each_rank:
        raise ValueError(
            f"a window must hold at least one micro-batch, got an empty one ({by_rank}): every rank takes part in the "
            "gradient's reduction, be it with a micro-batch whose count is 0"
        )
    if equally_many and len(set(of_each_rank)) > 1:
        raise ValueError(
            f"the ranks of a sharded model must have as many micro-batches in a window, got {by_rank}: each forward "
            "gathers the shards of all. Deal as many to all ranks (course_lib.samplers does)"
        )
    places = [f"window {int(number) or '?'} of {int(of) or '?'}" for _, _, number, of in rows]
    if len(set(places)) > 1:
        raise ValueError(
            "the ranks have different numbers of windows ("
            + ", ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            + "): the longer ones would wait forever. Give all ranks as many batches (course_lib.samplers deals them "
            "so), or cut all to as many with itertools.islice"
        )
    if not sum(counts) > 0:
        raise NothingToAverage(
            f"the total count of {'the window' if number is None else f'window {number}'} must be above 0, got 0 over "
            f"{counted(len(rows), 'rank')}: there is nothing to average. Leave such micro-batches out on all ranks, or "
            "take larger windows"
        )
    return sum(counts)


# ------------------------------------------------------------------------------------------- what the caller gives


def _counts(count_fn: Callable[[Any], Any], micro_batches: list[Any]) -> tuple[list[float], Exception | None]:
    try:
        if count_fn is len and any(isinstance(batch, Mapping) for batch in micro_batches):
            raise ValueError(
                "count_fn must count samples or tokens, got len, which counts the keys of a micro-batch that is a "
                'dict: write, for example, lambda batch: len(batch["labels"])'
            )
        return [checked_count(count_fn(batch)) for batch in micro_batches], None
    except Exception as error:
        return [math.nan], error


def checked_count(count: float | Tensor) -> float:
    """The count as a float, or a ValueError."""
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"a micro-batch's count must be a finite number of at least 0, got {count!r}")
    return number


def checked_loss_sum(loss: Tensor, count: float) -> Tensor:
    """The loss itself, or a ValueError where it is no sum over `count` samples, as far as its graph tells.

    Seen: a mean, or a sum divided by `count` (above 2), also as the first of several terms, divided, negated, cast,
    reshaped, or times a number below 1. One over features is taken for a mean: `loss * 1` passes.

    Bounds, not seen: a mean that is times 1 or more (its count, perhaps) or a learned weight, added to a sum, or gone
    through another function (`clamp`, `sqrt`, a compiled one); a median; a ratio (Dice); a `nanmean` that leaves some
    out; a sum divided by another count than `count_fn`'s.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"the loss must be a 0-dim tensor, the sum over the micro-batch, got {got}")
    if count > 1 and is_mean(loss, count):
        raise ValueError(
            f"the loss must be a sum over the micro-batch's count of {count:g}, got a mean (by its grad_fn): "
            'use reduction="sum", and leave the division to the count over the whole window. If it is a sum (of means '
            "over one sample each, say), return loss * 1"
        )
    return loss


def _takes_one(fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without signature
        return False
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in by_position if p.default is p.empty]
    return len(by_position) >= 1 and len(required) <= 1


# --------------------------------------------------------------------------------------------- the model's ranks


def _check_reduction(model: nn.Module, reduction: Reduction, group: dist.ProcessGroup | None) -> None:
    refuse_what_is_outside_ddp(reduction.replicas, model.parameters())
    refuse_what_ddp_never_reduces(reduction.replicas)
    for replica in reduction.replicas:
        if replica.static_graph:
            raise ValueError("static_graph=True does not go with no_sync in the first window: make DDP without it")
        if not replica.require_backward_grad_sync:
            raise ValueError("accumulate was called within no_sync(), where DDP reduces nothing: call it outside")
    ranks = world_size_of(reduction.group)
    if reduction.group is not None and group is not None and dist.get_world_size(group) != ranks:
        raise ValueError(
            f"group has {dist.get_world_size(group)} ranks, the model's gradients are averaged over {ranks}: leave "
            "group out, it is the model's by default"
        )


@contextmanager
def _no_reduction(reduction: Reduction) -> Iterator[None]:
    with ExitStack() as stack:
        for replica in reduction.replicas:
            stack.enter_context(replica.no_sync())
        for module in reduction.shards:
            module.set_requires_gradient_sync(False, recurse=False)
            stack.callback(module.set_requires_gradient_sync, True, recurse=False)
        yield


@contextmanager
def gradients_as_zeros(model: nn.Module) -> Iterator[None]:
    """For a backward pass that must be made, of a mean over nothing: its gradients are NaN, and so is 0 times them."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    handles = [parameter.register_hook(torch.zeros_like) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _forward_through(replicas: list[DistributedDataParallel]) -> Iterator[None]:
    """Notice a forward that went past DDP: its backward would reduce nothing, and say nothing."""
    seen: list[nn.Module] = []

    def see(module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            seen.append(module)

    handles = [replica.register_forward_pre_hook(see) for replica in replicas]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if replicas and not seen:
        raise RuntimeError(
            "loss_sum_fn did not run the forward through the DistributedDataParallel model that was given "
            "(perhaps through the module inside it): the ranks' gradients would not be reduced"
        )


def _average_gradients(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """As DDP does, in one all-reduce for each dtype; None stays None where all ranks have None."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in trained):
        raise ValueError("sparse gradients of a plain module are not averaged over ranks: wrap it in DDP")
    for dtype in dict.fromkeys(parameter.dtype for parameter in trained):  # in the same order on all ranks
        same = [parameter for parameter in trained if parameter.dtype == dtype]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        present = torch.tensor([p.grad is not None for p in same], dtype=dtype, device=same[0].device)
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), present])
        dist.all_reduce(flat, group=group)
        *sums, present = flat.split([*(p.numel() for p in same), len(same)])
        for parameter, total, anywhere in zip(same, sums, present.tolist(), strict=True):
            if anywhere:
                parameter.grad = (total / dist.get_world_size(group)).view_as(parameter)
