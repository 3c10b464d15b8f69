"""The guard of an optimizer's steps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib._ranks import (
    gathered,
    rank_of_this_process,
    reduction_of,
    refuse_what_ddp_never_reduces,
    world_size_of,
)
from course_lib._tensors import parameters_of
from course_lib.skipping import requirements
from course_lib.skipping.buffers import BufferSnapshot
from course_lib.skipping.detector import SpikeDetector
from course_lib.skipping.found_inf import HostCopy, PendingDecision, step_unless, takes_found_inf
from course_lib.skipping.gradients import gradient_norm, gradients_of, norm_of_all_shards
from course_lib.skipping.journal import Journal
from course_lib.skipping.lr_schedules import follow_skip
from course_lib.skipping.nan_signal import NanSignal, own_reason
from course_lib.skipping.ranks import vote
from course_lib.skipping.skips import (
    NO_GRADIENT,
    NON_FINITE_GRADIENT,
    OVERFLOW,
    SPIKE,
    Samples,
    Skip,
    TooManySkips,
    WindowLocation,
)


class StepGuard:
    """Update, or skip on all ranks: parameters, optimizer state, buffers, schedule, scaler and averages stay.

    A window is what lies behind one ``step()``: one micro-batch, or several that are accumulated. It is skipped where
    the gradients are not finite (``backward`` sees to it that a loss that is not finite arrives in them), where their
    norm is above what the accepted ones before it allow (``spike_factor``), and where no parameter has one. Each rank
    decides by the gradients after DDP's reduction, which are the same everywhere: no collective is needed. Gradients
    stay, as after ``optimizer.step()``: zero them.

    What one rank alone knows goes the same way: :meth:`reject` before the window's last backward. By :func:`vote` and
    :meth:`skip` all ranks skip before their forward.

    Where ``fully_shard`` has sharded the model, the ranks hold different gradients: one small vote a step tells all of
    them the norm over all shards, and who has rejected.

    On a GPU, where the optimizer takes ``found_inf``, as torch's fused ones do, and there are neither shards nor
    ``scaler`` nor ``averages``, the device decides and the host does not wait for it: ``step`` returns a 0-dim bool
    tensor, and counters, journal and schedule follow at the next ``step``, before its update, or at ``flush()``.

    A guard is made on every rank, in the same order, as DDP is: one collective agrees on the run's name. A copy or a
    file of its model has none.

    Bounds, not taken back: the random generators (dropout has drawn its masks); what a forward writes to a parameter
    (``nn.Embedding(max_norm=1)``, a codebook: make it a buffer); and state that is neither parameter nor buffer. A
    spike is decided by the norm's last bit, so ranks need devices of one kind.

    Args:
        model: What the forward goes through: a ``DistributedDataParallel``, a module sharded by ``fully_shard``, a
            wrapper of one, or a plain module (on several ranks, one whose gradients something else makes equal before
            ``step``: ``accumulate`` does). Its buffers are copied before a window's first forward that builds a graph.
            Those of another model that the same loss runs through (a GAN's discriminator) are not: give it a guard, and
            call that one's ``abandon``.
        optimizer: Any that steps without a closure, and whose parameters are the model's, all or some of them. In a
            Trainer's manual optimization, ``self.optimizers()``: ``global_step`` then counts the updates.
        scheduler: Stepped after each update, never after a skip. A ``LambdaLR`` asks for its factor again after a skip,
            at the same count, so that a rate of ``course_lib.schedules`` can go by attempts, as the sizes do: ``lambda
            update: factor(guard.attempts)``.
        scaler: A ``torch.amp.GradScaler`` of this optimizer alone, and no shards'; ``step`` unscales, steps and updates
            it. Where finite losses overflow in half precision, the scale is lowered as usual, and the attempt counts as
            skipped; any other skip leaves it as it was. To tell the two apart the ranks vote, but only in windows whose
            gradients are not finite.
        averages: ``AveragedModel`` (or several): its ``update_parameters`` is called after each update.
        max_norm: Clip the accepted gradients to this norm. A loop that clips before ``step`` hides spikes from the
            guard, and by value (``clip_grad_value_``) infinities too.
        spike_factor: How many robust standard deviations above the median a norm may be (:class:`SpikeDetector`); None
            judges no norm.
        history: How many accepted norms are remembered.
        min_history: How many there must be before one is judged.
        max_consecutive_skips: This many skips in a row end the run with :class:`TooManySkips`; None: never.
        journal: Where to write a line for each skip; other ranks write beside it. See :class:`Journal`.
        group: The ranks that step together. Default: those of DDP or the shards, else the default group.

    Attributes:
        attempts: Steps tried: updates and skips.
        updates: Steps that were made.
        skipped: ``attempts - updates``.

    Raises:
        ValueError: An argument out of range, an optimizer that needs a closure or holds parameters that the model does
            not have, tensor parallelism, FSDP1, a mesh of two dimensions.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        averages: Any = (),
        max_norm: float | None = None,
        spike_factor: float | None = None,
        history: int = 128,
        min_history: int = 16,
        max_consecutive_skips: int | None = 50,
        journal: str | os.PathLike[str] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        reduction = reduction_of(model)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        requirements.check_optimizer(model, reduction, optimizer)
        requirements.check_scaler(self.scaler, reduction)
        requirements.check_scheduler(scheduler)
        requirements.check_limits(max_norm, max_consecutive_skips)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.averages = (averages,) if hasattr(averages, "update_parameters") else tuple(averages)
        self.max_norm, self.max_consecutive_skips = max_norm, max_consecutive_skips
        self.detector = SpikeDetector(spike_factor, history=history, min_history=min_history)
        self._replicas, self._sharded = reduction.replicas, bool(reduction.shards)
        self._group = group or reduction.group
        self._world_size, self._rank = world_size_of(self._group), rank_of_this_process()
        self._on_device = takes_found_inf(optimizer) and not (self.scaler or self.averages or self._sharded)
        made = gathered([datetime.now(UTC).timestamp()], self._group)[0][0]
        self._run = datetime.fromtimestamp(made, UTC).isoformat(timespec="microseconds")
        self._journal = None if journal is None else Journal(journal, self._rank)
        self._attempts = self._updates = 0
        self._skips_in_a_row: list[Skip] = []
        self._stepped: set[Tensor] = set()
        self._pending: PendingDecision | None = None
        self._buffers = BufferSnapshot(model)
        self._signal = NanSignal()

    # ------------------------------------------------------------------------------------------------- a window

    def begin(self) -> None:
        """Copy the buffers, as the window's first forward does; for loops whose forward goes past ``model``."""
        self._buffers.take()

    def abandon(self) -> None:
        """Forget the window that runs, with what its forward left in the buffers: after an exception in it.

        The ranks must agree on it, as on any exception that is caught; gradients are the caller's to zero.
        """
        self._buffers.put_back()
        self._end_window()

    def backward(self, loss: Tensor, **arguments: Any) -> None:
        """``loss.backward()`` of the unscaled loss: marked and, with a scaler, scaled.

        Fits ``accumulate(..., backward=guard.backward)``.
        """
        loss = self.mark(loss)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**arguments)

    def mark(self, loss: Tensor) -> Tensor:
        """The loss, or NaN where it is not finite: its gradients are then NaN, and reach every rank.

        So they are where those of the loss itself are finite (a constant, no valid target, a mean over an empty mask).
        For whoever calls backward otherwise: ``fabric.backward(guard.mark(loss))``.
        """
        return self._signal.mark(loss, parameters_of(self.optimizer))

    def reject(self, reason: str) -> None:
        """Have all ranks skip this window, for what this rank alone knows: no collective, before its last backward."""
        self._signal.reject(str(reason), parameters_of(self.optimizer))

    def step(
        self,
        *,
        epoch: int | None = None,
        batch_indices: int | Iterable[int] | None = None,
        sample_indices: Samples = None,
    ) -> bool | Tensor:
        """Update and return True, or skip on all ranks and return False. What is given goes into the journal.

        Where the device decides, what is returned is a tensor: as a condition it works the same, but waits for it.

        Raises:
            TooManySkips: This was one skip too many in a row; all but a scale that has overflowed is as it was before.
            RuntimeError: A window was rejected after its last backward, or a loss was not finite and its gradients
                were: other ranks have not heard of it.
        """
        refuse_what_ddp_never_reduces(self._replicas)
        self.flush()
        location = WindowLocation(epoch, batch_indices, sample_indices)
        gradients = gradients_of(self.optimizer)
        if self._device_decides(gradients):
            return self._step_on_device(location, gradients)
        scaler = self.scaler if gradients else None
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        skip = self._judge(location, gradients)
        if skip is None:
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
            self._after_update()
        if scaler is not None:
            before = scaler.state_dict()
            scaler.update()
            if skip is not None and not skip.overflow:
                scaler.load_state_dict(before)
        self._raise_if_too_many()
        return skip is None

    def judge(self, **location: Any) -> Skip | None:
        """The first half of ``step()``, for trainers that call the optimizer themselves: None, or what is skipped.

        When it returns, buffers are restored, counters moved and the journal is written. The caller must update if it
        is None, and only then; optimizer, scaler, schedule and averages are the caller's. ``flush()`` afterwards
        raises :class:`TooManySkips`. Gradients are expected to be unscaled. Arguments as of ``step``.
        """
        refuse_what_ddp_never_reduces(self._replicas)
        return self._judge(WindowLocation(**location), gradients_of(self.optimizer))

    def skip(self, reason: str, **location: Any) -> bool:
        """Skip this window unseen, and return False: all ranks alike, after a vote, and ahead of a forward of DDP's.

        Arguments as of ``step``.
        """
        self.flush()
        self.abandon()
        self._count_skip(str(reason), WindowLocation(**location), None, math.inf, caused_here=False)
        self._raise_if_too_many()
        return False

    # --------------------------------------------------------------------------------------------- the counters

    @property
    def attempts(self) -> int:
        self._settle()
        return self._attempts

    @property
    def updates(self) -> int:
        self._settle()
        return self._updates

    @property
    def skipped(self) -> int:
        self._settle()
        return self._attempts - self._updates

    def flush(self) -> None:
        """Wait for a decision that is still on the device, and do what follows from it.

        Raises:
            TooManySkips: As ``step``.
        """
        self._settle()
        self._raise_if_too_many()

    def close(self) -> None:
        """Let the model go: its forwards no longer copy buffers."""
        self._settle()
        self._end_window()
        self._buffers.hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """The counters, the last skips in a row, and the accepted norms."""
        self._settle()
        own = {"attempts": self._attempts, "updates": self._updates}
        return own | {"norms": list(self.detector.accepted), "skips": [asdict(skip) for skip in self._skips_in_a_row]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._settle()
        self._end_window()  # a forward before the checkpoint was loaded began none
        self._attempts, self._updates = int(state["attempts"]), int(state["updates"])
        self.detector.restore(state["norms"])
        self._skips_in_a_row = [Skip(**skip) for skip in state.get("skips", ())]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of what holds a guard (a module, say) has None in its place

    # --------------------------------------------------------------------------------------------- the decision

    def _judge(self, location: WindowLocation, gradients: list[Tensor]) -> Skip | None:
        if gradients:
            self._buffers.check_taken()
        total = gradient_norm(gradients)
        value, factor = self._signal.beside(total).tolist()  # what waits for a device, once
        norm = value if gradients else None
        own = own_reason(self._signal.rejections, factor)
        if self._sharded:
            norm = norm_of_all_shards(norm if own is None else math.nan, self._group)
            total.fill_(math.nan if norm is None else norm)
        skip = self._conclude(location, norm, self.detector.limit, own)
        if skip is not None:
            self._buffers.put_back()
        else:
            if self.max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters_of(self.optimizer), self.max_norm, total)
            self._stepped.update(p for p in parameters_of(self.optimizer) if p.grad is not None)
        self._end_window()
        return skip

    def _conclude(self, location: WindowLocation, norm: float | None, limit: float, own: str | None) -> Skip | None:
        """Count a window as an update, or as the skip that is returned; ``own`` is why this rank itself finds it bad.

        The ranks agree on whether, and each has its own words for why.
        """
        not_finite = norm is not None and not math.isfinite(norm)
        if self.scaler is not None and not_finite and not vote(own is not None, group=self._group):
            reason: str | None = OVERFLOW
        elif norm is None:
            reason = own or NO_GRADIENT
        elif not_finite:
            reason = own or NON_FINITE_GRADIENT
        elif norm > limit:
            reason = SPIKE
        elif own is not None and self._world_size > 1:
            raise RuntimeError(
                f"rank {self._rank} found its window bad ({own}), and the reduced gradients don't show it: the other "
                "ranks would update. Call reject() before the window's last backward, and run the backward with "
                "guard.backward(loss), or on guard.mark(loss)"
            )
        else:
            reason = own
        if reason is not None:
            return self._count_skip(reason, location, norm, limit, caused_here=own is not None)
        assert norm is not None
        self._attempts += 1
        self._updates += 1
        self._skips_in_a_row = []
        self.detector.accept(norm)
        return None

    def _count_skip(
        self, reason: str, location: WindowLocation, norm: float | None, limit: float, *, caused_here: bool
    ) -> Skip:
        self._attempts += 1
        skip = Skip(
            run=self._run,
            attempt=self._attempts,
            updates=self._updates,
            rank=self._rank,
            reason=reason,
            caused_here=True if caused_here or self._world_size == 1 else None,
            norm=norm,
            norm_limit=limit if math.isfinite(limit) else None,
            **location.fields(),
        )
        self._skips_in_a_row.append(skip)
        if self._journal is not None:
            self._journal.write(skip)
        follow_skip(self.scheduler)
        return skip

    def _end_window(self) -> None:
        self._buffers.drop()
        self._signal.reset()

    def _after_update(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        for average in self.averages:
            average.update_parameters(self.model)

    def _raise_if_too_many(self) -> None:
        skips = self._skips_in_a_row
        if self.max_consecutive_skips is not None and len(skips) >= self.max_consecutive_skips:
            self._skips_in_a_row = []
            self.abandon()  # what was left to the device is found out late: the next window has begun
            raise TooManySkips(skips)

    # --------------------------------------------------------------------------- without waiting for the device

    def _host_would_wait(self, gradients: list[Tensor]) -> bool:
        return gradients[0].device.type != "cpu"

    def _device_decides(self, gradients: list[Tensor]) -> bool:
        """Not of a parameter's first step, which makes its state, whatever found_inf says."""
        if not (self._on_device and gradients and self._host_would_wait(gradients)):
            return False
        return self._stepped.issuperset(p for p in parameters_of(self.optimizer) if p.grad is not None)

    def _step_on_device(self, location: WindowLocation, gradients: list[Tensor]) -> Tensor:
        self._buffers.check_taken()
        norm, limit = gradient_norm(gradients), self.detector.limit
        evidence = self._signal.beside(norm)
        bad = ~torch.isfinite(norm) | (norm > limit)
        if self._world_size == 1:
            bad |= evidence[1].isnan()
        if self.max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters_of(self.optimizer), self.max_norm, norm)
        self._buffers.put_back(where=bad)
        self._pending = PendingDecision(location, limit, self._signal.rejections, HostCopy(evidence))
        self._end_window()
        step_unless(self.optimizer, bad)
        return ~bad

    def _settle(self) -> None:
        """Do what follows from a decision that was left on the device."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        norm, factor = pending.evidence.read()
        own = own_reason(pending.rejections, factor)
        if self._conclude(pending.location, norm, pending.limit, own) is None:
            self._after_update()
