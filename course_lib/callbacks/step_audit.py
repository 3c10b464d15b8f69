"""Planned optimizer steps against those that a Trainer made.

>>> audit = StepAudit(strict=True)
>>> Trainer(callbacks=[audit], ...).fit(model)  # raises where the run did not make the steps that were planned
>>> audit.updates, audit.attempts, audit.skipped
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from course_lib.callbacks._trainer import accumulation_by_epoch, callbacks_of
from course_lib.loader import MiniDataLoader
from course_lib.schedules import ScheduledBatchSampler
from course_lib.skipping.gradients import gradients_of
from course_lib.steps import StepPlan, plan_steps


class StepCountError(RuntimeError):
    """A run made other optimizer steps than planned."""


class StepAudit(Callback):
    """Plan the optimizer steps when training starts, count them while it runs, and say where the two differ.

    ``trainer.global_step`` counts every call of an optimizer, also one that changed nothing (``training_step``
    returned ``None``, or a gradient scaler held the step back). The audit keeps them apart:

    - ``attempts``: optimizer steps that the Trainer tried, over all optimizers;
    - ``updates``: those in which the optimizer ran with a gradient, so that parameters changed;
    - ``skipped``: ``attempts - updates``;
    - ``batches_per_epoch``: micro-batches of this rank, epoch by epoch.

    Args:
        plan: The plan to hold the run against; ``None``: made from the Trainer and its loader when training starts.
            It stays ``None`` where steps can't be planned (a loader without length, manual optimization), and
            ``why_no_plan`` says why.
        strict: Raise a :class:`StepCountError` at the end of training, instead of warning.

    The counts go into checkpoints and continue after a resume.
    """

    def __init__(self, plan: StepPlan | None = None, *, strict: bool = False) -> None:
        self.plan = plan
        self.strict = strict
        self.why_no_plan = ""
        self._given_plan = plan
        self._handles: list[Any] = []
        self._restored = False
        self._reset()

    def _reset(self) -> None:
        self.attempts = 0
        self.updates = 0
        self.batches_per_epoch: dict[int, int] = {}
        self.attempts_before_audit = 0
        self.stopped_early = False
        self._skipper = False
        self._judged = False

    @property
    def skipped(self) -> int:
        return self.attempts - self.updates

    @property
    def agrees(self) -> bool:
        """Whether every planned step was made and changed parameters; true as well where nothing could be planned."""
        return self.plan is None or self.updates + self.attempts_before_audit == self.plan.total_steps

    def explain(self) -> str:
        """Say what was planned, what was counted, and where the two part."""
        if self.plan is None:
            planned = f"Nothing planned: {self.why_no_plan}"
        else:
            planned = f"{self.plan.total_steps:,} optimizer steps planned"
        lines = [f"{planned}; {self.updates:,} updates counted, in {self.attempts:,} attempts."]
        if self.skipped:
            counted = "global_step and the LR schedule count them all the same"
            if self._skipper:
                counted = "SkipBadSteps has counted what it skipped, and held the LR schedule back"
            lines.append(f"{self.skipped:,} attempts changed nothing; {counted}.")
        if self.plan is None:
            return "\n".join(lines)
        if self.attempts_before_audit:
            lines.append(f"The {self.attempts_before_audit:,} steps before this audit began are taken as updates.")
        if self.stopped_early:
            lines.append("Training was told to stop (trainer.should_stop) before the planned end.")
        for epoch, run in self.batches_per_epoch.items():
            due = self.plan.batches_in_epoch(epoch)
            if due != run and not self.attempts_before_audit:
                lines.append(f"Epoch {epoch} is the first to differ: {due:,} batches planned, {run:,} run.")
                break
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------- hooks

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A checkpoint's counts have been loaded by now; those of an earlier fit with this object are not wanted.
        if not self._restored:
            self._reset()
        self._restored = self._judged = False
        self.plan = self._given_plan
        self.why_no_plan = "training did not begin: no batch, or nothing left to do"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.attempts_before_audit = _attempts_of(trainer) - self.attempts
        self._skipper = any(hasattr(callback, "uncounted_attempts") for callback in callbacks_of(trainer))
        if self.plan is None:
            self.plan, self.why_no_plan = _plan_of(trainer, pl_module)
        self._handles = [optimizer.register_step_post_hook(self._count_update) for optimizer in trainer.optimizers]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        epoch = trainer.current_epoch
        self.batches_per_epoch[epoch] = self.batches_per_epoch.get(epoch, 0) + 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.attempts = _attempts_of(trainer) - self.attempts_before_audit

    def _count_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # torch's optimizers leave out a parameter without a gradient: no gradient at all, no update. A fused one is
        # called even when the gradient scaler found a value that is not finite, and then changes nothing.
        held_back = getattr(optimizer, "found_inf", None)
        if gradients_of(optimizer) and (held_back is None or not bool(held_back)):
            self.updates += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._judge(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._judged:  # a fit that has nothing to train calls no other hook
            self._judge(trainer)

    def _judge(self, trainer: Trainer) -> None:
        self._remove_hooks()
        self._judged = True
        planned_end = self.plan is None or self.attempts + self.attempts_before_audit >= self.plan.total_steps
        self.stopped_early = trainer.should_stop and not planned_end
        if self.agrees:
            rank_zero_info(f"StepAudit: {self.explain()}")
        elif self.strict:
            raise StepCountError(self.explain())
        else:
            rank_zero_warn(f"StepAudit: {self.explain()}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "attempts": self.attempts,
            "updates": self.updates,
            "batches_per_epoch": dict(self.batches_per_epoch),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.attempts = state_dict["attempts"]
        self.updates = state_dict["updates"]
        self.batches_per_epoch = dict(state_dict["batches_per_epoch"])
        self._restored = True


def _attempts_of(trainer: Trainer) -> int:
    """global_step: attempts, of whatever kind of optimizer and loop, and those that SkipBadSteps took out of it."""
    return trainer.global_step + sum(getattr(callback, "uncounted_attempts", 0) for callback in callbacks_of(trainer))


def _plan_of(trainer: Trainer, pl_module: LightningModule) -> tuple[StepPlan | None, str]:
    """The plan of a Trainer that is about to train, or why there is none."""
    if not pl_module.automatic_optimization:
        return None, "with manual optimization, the module's own code decides when to step"
    if trainer.strategy.handles_gradient_accumulation:
        return None, f"{type(trainer.strategy).__name__} accumulates by its own count"
    if trainer.num_training_batches == float("inf"):
        return None, "the loader has no length"
    if trainer.max_steps == -1 and trainer.max_epochs in (-1, None):
        return None, "neither max_epochs nor max_steps ends this run"
    by_epoch = accumulation_by_epoch(trainer)
    stops_and_windows: dict[str, Any] = {
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "accumulate_grad_batches": trainer.accumulate_grad_batches if by_epoch is None else by_epoch,
    }
    loader: Any = trainer.train_dataloader
    sampler: Any = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, ScheduledBatchSampler) and not trainer.overfit_batches:  # type: ignore[attr-defined]
        plan: StepPlan = sampler.plan(
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            limit_train_batches=trainer.limit_train_batches,
        )
        return plan, ""
    plain = type(loader) in (DataLoader, MiniDataLoader) and loader.batch_size is not None
    if plain and isinstance(loader.sampler, Sized) and not trainer.overfit_batches:  # type: ignore[attr-defined]
        sampler = loader.sampler
        shared = isinstance(sampler, DistributedSampler) and not sampler.drop_last
        plan = plan_steps(
            len(sampler.dataset) if shared else len(sampler),
            loader.batch_size,
            world_size=sampler.num_replicas if shared else 1,
            drop_last=loader.drop_last,
            limit_train_batches=trainer.limit_train_batches,
            **stops_and_windows,
        )
        return plan, ""
    # Of any other loader only the number of batches is known: each counts as one sample.
    return plan_steps(int(trainer.num_training_batches), 1, **stops_and_windows), ""
