"""The guard of an optimizer's steps."""

from __future__ import annotations

import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from course_lib._arguments import int_of_at_least
from course_lib._ranks import any_outside, ddp_modules, rank_of_this_process, world_size_of
from course_lib.skipping.buffers import BufferSnapshot
from course_lib.skipping.detector import SpikeDetector, gradient_norm
from course_lib.skipping.journal import Journal, Skip
from course_lib.skipping.voting import vote

NON_FINITE_LOSS = "non-finite loss"
NON_FINITE_GRADIENT = "non-finite gradient"
SPIKE = "gradient-norm spike"
NO_GRADIENT = "no gradient"
SCALER = "overflow in the scaled gradients"

Samples = Iterable[int] | Callable[[], Iterable[int] | None] | None
"""A window's indices in the dataset, or a function that finds them, called for a window that is skipped."""


class StepGuard:
    """Update, or skip on all ranks: parameters, optimizer state, buffers, schedule, scaler and averages stay.

    A window is what lies behind one ``step()``: one micro-batch, or several that are accumulated. Each rank decides by
    the norm of its gradients after DDP's reduction, which are the same everywhere, so that no collective is needed:

    - not finite: a NaN or an infinity on any rank (``backward`` sees to it that a loss that is not finite arrives);
    - above what the accepted norms before it allow, with ``spike_factor`` (see :class:`SpikeDetector`): decided by the
      norm's last bit, so on devices of one kind;
    - none at all: no parameter got a gradient.

    What one rank alone knows about its data goes the same way: :meth:`reject` before the window's last backward. With
    :func:`vote` and :meth:`skip`, all ranks skip before their forward. Gradients stay after a step, as after
    ``optimizer.step()``: zero them before the next window.

    Args:
        model: What the forward goes through: a ``DistributedDataParallel``, a wrapper of it, or a plain module (on
            several ranks, one whose gradients something else makes equal before ``step``: ``accumulate`` does). Its
            buffers are copied before a window's first forward that builds a graph. Those of another model that the
            same loss runs through (a GAN's discriminator) are not: give it a guard, and call that one's ``abandon``.
        optimizer: Any that steps without a closure.
        scheduler: Stepped after each update, never after a skip.
        scaler: A ``torch.amp.GradScaler`` of this optimizer alone; ``step`` unscales, steps and updates it. Where
            finite losses overflow in half precision, the scale is lowered as ever, and the attempt counts as skipped.
            A loss that is not finite, a spike and ``reject`` leave the scaler as it was. To tell the two apart the
            ranks vote, in those windows alone whose gradients are not finite.
        averages: ``AveragedModel`` (or several): its ``update_parameters`` is called after each update.
        max_norm: Clip the accepted gradients to this norm, with the norm that is known already. A loop that clips by
            itself before ``step`` hides spikes from the guard, and by value (``clip_grad_value_``) infinities too.
        spike_factor: How many robust standard deviations above the median a norm may be; None judges no norm.
        history: How many accepted norms are remembered.
        min_history: How many there must be before one is judged.
        max_consecutive_skips: So many skips in a row end the run with :class:`TooManySkips`; None: never.
        journal: Where to write a line for each skip; other ranks write beside it. See :class:`Journal`.
        on_device: Leave the decision on the device, without waiting for it, by the ``found_inf`` that fused optimizers
            take. ``step`` then returns a 0-dim bool tensor, and the rest (counters, journal, schedule) follows at the
            next ``step``, before its update, or at ``flush()``. Default: where the optimizer is fused, the gradients
            are on an accelerator, and there are no ``averages``, which need the buffers of before the next forward,
            and no scaler, which waits for its own reasons.
        group: The ranks that step together. Default: DDP's, else the default group.
        timeout: Seconds to wait for the other ranks to make their guard.

    Attributes:
        attempts: Steps tried: updates and skips.
        updates: Steps that changed the parameters.
        skipped: ``attempts - updates``.

    Raises:
        ValueError: An argument out of range, an optimizer that needs a closure, sharded parameters (FSDP).
        RuntimeError: Another rank made no guard within ``timeout`` seconds.
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
        on_device: bool | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
    ) -> None:
        if isinstance(optimizer, LBFGS):
            raise ValueError("optimizer must step without a closure, got LBFGS: it makes many evaluations a step")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "scheduler must be one that is stepped by updates, got ReduceLROnPlateau: step it yourself"
            )
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be a positive number or None, got {max_norm!r}")
        if max_consecutive_skips is not None:
            int_of_at_least(1, "max_consecutive_skips", max_consecutive_skips)
        fused = _takes_found_inf(optimizer)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.averages = tuple(averages) if isinstance(averages, Sequence) else (averages,)
        possible = fused and scaler is None and not self.averages
        if on_device and not possible:
            others = [name for name, given in (("a scaler", scaler), ("averages", self.averages)) if given]
            got = (
                f"{'' if fused else 'un'}fused {type(optimizer).__name__}{''.join(f' with {name}' for name in others)}"
            )
            raise ValueError(f"on_device=True needs a fused optimizer, no scaler and no averages, got {got}")
        self.model, self.optimizer = model, optimizer
        self.scheduler, self.scaler, self.max_norm = scheduler, scaler, max_norm
        self.max_consecutive_skips = max_consecutive_skips
        self.detector = SpikeDetector(spike_factor, history=history, min_history=min_history)
        self._on_device = on_device if possible else False
        replicas = ddp_modules(model)
        if any_outside(replicas, self._parameters()):
            raise ValueError(
                "the optimizer holds parameters outside DistributedDataParallel: their gradients are each rank's own, "
                "and the ranks could not decide alike. Wrap all that is trained, or give each part its own guard"
            )
        self._group = group or (replicas[0].process_group if replicas else None)
        self._world_size, self._rank = world_size_of(self._group), rank_of_this_process()
        self._run = _meet_other_ranks(self._group, timeout)
        self._journal = None if journal is None else Journal(journal, self._rank)
        self._attempts = self._updates = 0
        self._row: list[Skip] = []
        self._stepped: set[Tensor] = set()
        self._pending: _Pending | None = None
        self._buffers = BufferSnapshot(model)
        self._loss_is_bad: Tensor | None = None
        self._rejections: list[str] = []
        self._poison: list[Any] = []
        self._forward_hook = model.register_forward_pre_hook(self._before_forward, prepend=True)

    # ------------------------------------------------------------------------------------------------- a window

    def begin(self) -> None:
        """Copy the buffers, as the window's first forward does; for loops whose forward goes past ``model``."""
        if not self._buffers.taken:
            self._buffers.take()

    def abandon(self) -> None:
        """Forget the window that runs, with what its forward left in the buffers: after an exception in it.

        The ranks must agree on it, as on any exception that is caught; gradients are the caller's to zero.
        """
        self._buffers.put_back()
        self._end_window()

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():  # a validation in between is no window
            self.begin()

    def backward(self, loss: Tensor, **arguments: Any) -> None:
        """``loss.backward()`` of the unscaled loss: marked and, with a scaler, scaled.

        Fits ``accumulate(..., backward=guard.backward)``.
        """
        loss = self.mark(loss)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**arguments)

    def mark(self, loss: Tensor) -> Tensor:
        """The loss, or NaN where it is not finite: its gradients are then NaN, and reach every rank.

        An infinite loss may well have finite gradients (by a constant), which no reduction could tell from others.
        For whoever calls backward otherwise: ``fabric.backward(guard.mark(loss))``.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"the loss must be a tensor of one element, got {got}")
        finite = torch.isfinite(loss.detach()).reshape(())
        self._loss_is_bad = ~finite if self._loss_is_bad is None else self._loss_is_bad | ~finite
        return loss * torch.where(finite, 1.0, math.nan).to(loss.dtype)

    def reject(self, reason: str) -> None:
        """Have all ranks skip this window, for what this rank alone knows: no collective, before its last backward."""
        if not self._rejections:
            # Not by the loss: what masks its gradient (no valid target, a dead ReLU) would mask the NaN too.
            trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
            self._poison = [parameter.register_hook(_all_nan) for parameter in trained]
        self._rejections.append(str(reason))

    def step(
        self,
        *,
        epoch: int | None = None,
        batch_indices: int | Iterable[int] | None = None,
        sample_indices: Samples = None,
    ) -> bool | Tensor:
        """Update and return True, or skip on all ranks and return False. What is given goes into the journal.

        With ``on_device``, what is returned is a tensor: as a condition it works the same, but waits for the device.

        Raises:
            TooManySkips: This was one skip too many in a row; everything is as it was before the first of them.
            RuntimeError: A window was rejected after its last backward, or a loss was not finite and its gradients
                were: other ranks have not heard of it.
        """
        self.flush()
        place = _Place(epoch, batch_indices, sample_indices)
        gradients = self._gradients()
        if self._decides_on_device(gradients):
            return self._step_on_device(gradients, place)
        if self.scaler is not None and gradients:
            self.scaler.unscale_(self.optimizer)
        skip = self._judge(place)
        if skip is None:
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
            else:
                self.optimizer.step()
            self._stepped.update(parameter for parameter in self._parameters() if parameter.grad is not None)
            self._after_update()
        if self.scaler is not None and gradients:
            before = self.scaler.state_dict()
            self.scaler.update()
            if skip is not None and skip.reason != SCALER:
                self.scaler.load_state_dict(before)
        self._raise_if_too_many()
        return skip is None

    def judge(
        self,
        *,
        epoch: int | None = None,
        batch_indices: int | Iterable[int] | None = None,
        sample_indices: Samples = None,
    ) -> Skip | None:
        """The first half of ``step()``, for trainers that call the optimizer themselves: None, or what is skipped.

        By then buffers are restored, counters moved and the journal written. The caller must update on None, and must
        not otherwise; optimizer, scaler, schedule and averages are the caller's. ``flush()`` afterwards raises
        :class:`TooManySkips`. Gradients are expected to be unscaled.
        """
        return self._judge(_Place(epoch, batch_indices, sample_indices))

    def skip(
        self,
        reason: str,
        *,
        epoch: int | None = None,
        batch_indices: int | Iterable[int] | None = None,
        sample_indices: Samples = None,
        caused_here: bool | None = None,
    ) -> bool:
        """Skip this window without a look at its gradients, and return False. All ranks must call it: after a vote."""
        self.flush()
        self._buffers.put_back()
        place = _Place(epoch, batch_indices, sample_indices)
        self._count(str(reason), place, None, math.inf, caused_here=caused_here or (self._world_size == 1 or None))
        self._end_window()
        self._raise_if_too_many()
        return False

    # --------------------------------------------------------------------------------------------- the counters

    @property
    def attempts(self) -> int:
        return self._attempts + (self._pending is not None)

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
        """Let the model go: its forwards copy no buffers any more."""
        self._settle()
        self._end_window()
        self._forward_hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """The counters and the accepted norms, for a checkpoint."""
        self._settle()
        return {"attempts": self._attempts, "updates": self._updates, "norms": list(self.detector.accepted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._settle()
        self._end_window()  # a forward before the checkpoint was loaded began none
        self._attempts, self._updates = int(state["attempts"]), int(state["updates"])
        self.detector.accepted.clear()
        self.detector.accepted.extend(state["norms"])
        self._row = []

    # --------------------------------------------------------------------------------------------- the decision

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _judge(self, place: _Place) -> Skip | None:
        gradients = self._gradients()
        limit = self.detector.limit
        norm: float | None = None
        bad_here = bool(self._rejections)
        if gradients:
            self._check_buffers_are_known()
            norm_tensor = gradient_norm(gradients)
            norm, loss_is_bad = self._evidence(norm_tensor).tolist()  # what waits for a device, once
            bad_here |= bool(loss_is_bad)
        reason = self._reason(norm, bad_here, limit)
        if reason is None and self.max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters(), self.max_norm, norm_tensor)
        overflow = norm is not None and not math.isfinite(norm)
        if overflow and self.scaler is not None and not vote(bad_here, group=self._group):
            reason = SCALER
        if reason is not None:
            self._buffers.put_back()
        skip = self._count(reason, place, norm, limit, caused_here=bad_here or (self._world_size == 1 or None))
        self._end_window()
        return skip

    def _evidence(self, norm: Tensor) -> Tensor:
        if self._loss_is_bad is None:
            return torch.stack([norm, torch.zeros_like(norm)])
        return torch.stack([norm, self._loss_is_bad.to(norm)])

    def _reason(self, norm: float | None, bad_here: bool, limit: float) -> str | None:
        own = "; ".join(self._rejections) or NON_FINITE_LOSS
        if norm is not None and not math.isfinite(norm):
            return own if bad_here else NON_FINITE_GRADIENT
        if norm is not None and norm > limit:
            return SPIKE
        if not bad_here:
            return NO_GRADIENT if norm is None else None
        if self._world_size > 1:
            raise RuntimeError(
                f"rank {self._rank} found its window bad ({own}), and the reduced gradients don't show it: the other "
                "ranks would update. Call reject() before the window's last backward, and run the backward with "
                "guard.backward(loss), or on guard.mark(loss)"
            )
        return own

    def _check_buffers_are_known(self) -> None:
        if not self._buffers.taken and any(True for _ in self.model.buffers()):
            raise RuntimeError(
                "the window's forward did not go through the model that the guard was given (perhaps through a module "
                "inside it, or what torch.compile made of it), so the buffers before it are not known, and it could "
                "not be skipped. Give the guard what the forward goes through, or call guard.begin() before it"
            )

    def _count(
        self, reason: str | None, place: _Place, norm: float | None, limit: float, *, caused_here: bool | None
    ) -> Skip | None:
        self._attempts += 1
        if reason is None:
            assert norm is not None
            self._updates += 1
            self._row = []
            self.detector.accept(norm)
            return None
        skip = Skip(
            run=self._run,
            attempt=self._attempts,
            updates=self._updates,
            rank=self._rank,
            reason=reason,
            caused_here=caused_here,
            norm=norm,
            norm_limit=limit if math.isfinite(limit) else None,
            **place.fields(),
        )
        self._row.append(skip)
        if self._journal is not None:
            self._journal.write(skip)
        return skip

    def _end_window(self) -> None:
        self._buffers.drop()
        self._loss_is_bad = None
        self._rejections = []
        for handle in self._poison:
            handle.remove()
        self._poison = []

    def _after_update(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        for average in self.averages:
            average.update_parameters(self.model)

    def _raise_if_too_many(self) -> None:
        if self.max_consecutive_skips is not None and len(self._row) >= self.max_consecutive_skips:
            skips, self._row = self._row, []
            # What was left to the device is found out late: the next window has begun, and won't be judged.
            self._buffers.put_back()
            self._end_window()
            raise TooManySkips(skips)

    # --------------------------------------------------------------------------- without waiting for the device

    def _decides_on_device(self, gradients: list[Tensor]) -> bool:
        if not gradients or self._on_device is False or (self._on_device is None and gradients[0].device.type == "cpu"):
            return False
        # A parameter's first step makes its state, whatever found_inf says: that one is decided on the host.
        return all(parameter in self._stepped for parameter in self._parameters() if parameter.grad is not None)

    @torch.no_grad()
    def _step_on_device(self, gradients: list[Tensor], place: _Place) -> Tensor:
        self._check_buffers_are_known()
        norm, limit = gradient_norm(gradients), self.detector.limit
        evidence = self._evidence(norm)
        bad = ~torch.isfinite(norm) | (norm > limit)
        if self._world_size == 1:
            bad |= evidence[1].bool() | bool(self._rejections)
        if self.max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters(), self.max_norm, norm)
        optimizer: Any = self.optimizer
        optimizer.grad_scale, optimizer.found_inf = None, bad.float()
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        self._buffers.put_back(where=bad)
        evidence = evidence.to("cpu", non_blocking=True)
        event = torch.cuda.Event() if norm.is_cuda else None
        if event is not None:
            event.record()
        self._pending = _Pending(place, limit, evidence, list(self._rejections), event)
        self._end_window()
        return ~bad

    def _settle(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if pending.event is not None:
            pending.event.synchronize()
        norm, loss_is_bad = pending.evidence.tolist()
        bad_here = bool(loss_is_bad) or bool(pending.rejections)
        opened, self._rejections = self._rejections, pending.rejections
        try:
            reason = self._reason(norm, bad_here, pending.limit)
        finally:
            self._rejections = opened
        caused_here = bad_here or (self._world_size == 1 or None)
        if self._count(reason, pending.place, norm, pending.limit, caused_here=caused_here) is None:
            self._after_update()


class TooManySkips(RuntimeError):
    """So many steps in a row were skipped that no data is left to blame. ``skips`` holds them all."""

    def __init__(self, skips: Sequence[Skip]) -> None:
        self.skips = list(skips)
        told = [f"{skip.place()}: {skip.reason}" for skip in self.skips]
        if len(told) > 20:
            told[10:-10] = [f"… {len(told) - 20:,} more (in the error's `skips`) …"]
        super().__init__(
            f"{len(self.skips):,} steps in a row were skipped, as many as max_consecutive_skips allows. Parameters and "
            "optimizer are as they were before the first of them:\n  " + "\n  ".join(told)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.skips,)


class _Place(NamedTuple):
    """Where a window was in the data; read when it has been skipped, for it may lie on a device."""

    epoch: int | None
    batch_indices: int | Iterable[int] | None
    sample_indices: Samples

    def fields(self) -> dict[str, Any]:
        batches = self.batch_indices
        if batches is not None and (not isinstance(batches, Iterable) or getattr(batches, "ndim", 1) == 0):
            batches = [operator.index(batches)]  # type: ignore[arg-type]
        samples = self.sample_indices() if callable(self.sample_indices) else self.sample_indices
        return {
            "epoch": None if self.epoch is None else int(self.epoch),
            "batch_indices": None if batches is None else [int(index) for index in batches],
            "sample_indices": None if samples is None else [int(index) for index in samples],
        }


class _Pending(NamedTuple):
    """A decision that the device may not have made yet."""

    place: _Place
    limit: float
    evidence: Tensor
    rejections: list[str]
    event: torch.cuda.Event | None


def _takes_found_inf(optimizer: Optimizer) -> bool:
    # The fused Adagrad of torch 2.11 takes it and does not say so.
    says_so = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(says_so or (type(optimizer) is torch.optim.Adagrad and optimizer.defaults["fused"]))


def _all_nan(gradient: Tensor) -> Tensor:
    return gradient * math.nan


_guards_made: Counter[tuple[int, ...]] = Counter()


def _meet_other_ranks(group: dist.ProcessGroup | None, timeout: float) -> str:
    """Wait until every rank has made its guard, and agree on a name for the run.

    Through the group's store: a collective would pair with whatever the others are at, and hang or mix the two up.
    """
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    if world_size_of(group) == 1:
        return now
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    prefix = f"course_lib.skipping/{'-'.join(map(str, ranks))}/{_guards_made[ranks]}"
    _guards_made[ranks] += 1
    store.set(f"{prefix}/{dist.get_rank()}", now)
    try:
        store.wait([f"{prefix}/{rank}" for rank in ranks], timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [str(rank) for rank in ranks if not store.check([f"{prefix}/{rank}"])]
        raise RuntimeError(
            f"rank {dist.get_rank()} made a StepGuard, and rank{'s'[: len(missing) > 1]} {', '.join(missing)} did not "
            f"within {timeout:g} s: a guard on some ranks alone would skip where the others step. Make it on every "
            "rank, in the same order, or give a longer timeout"
        ) from error
    return str(store.get(f"{prefix}/{ranks[0]}").decode())
