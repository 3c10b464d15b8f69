"""Planned optimizer steps against those that a Trainer made.

audit = StepAudit(strict=True)
Trainer(callbacks=[audit], ...).fit(model)  # raises where the run did not make the steps that were planned
audit.updates, audit.attempts, audit.skipped
"""

from __future__ import annotations

import itertools
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from course_lib.callbacks._trainer import (
    accumulation_by_epoch,
    callbacks_of_kind,
    has_trained,
    refuse_another_lightning,
)
from course_lib.callbacks._windows import TellsOfWindows
from course_lib.callbacks.exact_resume import ExactResume
from course_lib.callbacks.skip_bad_steps import attempts_of, skips_of
from course_lib.schedules import ScheduledBatchSampler
from course_lib.skipping.gradients import gradients_of
from course_lib.steps import StepPlan, plan_steps
from course_lib.steps.plan import Windows


class StepCountError(RuntimeError):
    """A run made other optimizer steps than planned."""


class StepAudit(TellsOfWindows):
    """Plan the optimizer steps when training starts, count them while it runs, and say where the two differ.

    ``trainer.global_step`` counts every call of an optimizer, also one that changed nothing (``training_step``
    returned ``None``, or a gradient scaler held the step back). The audit keeps them apart:

    - ``attempts``: optimizer steps that the Trainer tried, over all optimizers (with manual optimization, those that
      ``training_step`` made: Lightning counts no others);
    - ``updates``: optimizer steps with a gradient, wherever they were made;
    - ``skipped``: ``attempts - updates``; ``known_skips`` of them were reported by ``SkipBadSteps``;
    - ``batches_per_epoch``: micro-batches of this rank, epoch by epoch.

    A run agrees with its plan where each planned step was made or is a known skip. A run that is told to stop before
    its end (``EarlyStopping``, ``max_time``, ``trainer.should_stop``) agrees where that holds until the stop.

    Args:
        plan: The plan to hold the run against; ``None``: made from the Trainer and its loader when training starts.
            It stays ``None`` where steps can't be planned (a loader without length, manual optimization, a run that has
            come to other ranks), and ``why_no_plan`` says why.
        strict: Raise a :class:`StepCountError` when the fit has ended and its last checkpoint is written, instead of
            warning.

    The counts go into checkpoints (of ``ModelCheckpoint``; of any callback, with ``ExactResume``) and continue after a
    resume and in a second fit of the same Trainer. A schedule that comes back from a checkpoint with another horizon
    than the run has now, or with that of other ranks, is told by a warning.
    """

    def __init__(self, plan: StepPlan | None = None, *, strict: bool = False) -> None:
        self.plan = plan
        self.strict = strict
        self.why_no_plan = ""
        self._given_plan = plan
        self._handles: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self.attempts = 0
        self.updates = 0
        self.known_skips = 0
        self.attempts_before_audit = 0
        """Of the attempts: those of which no checkpoint told what became of them."""
        self.batches_per_epoch: dict[int, int] = {}
        self.stopped_early = False
        self._world_sizes: list[int] = []
        """The numbers of ranks that the run has had, each once."""

    @property
    def skipped(self) -> int:
        return self.attempts - self.updates

    @property
    def agrees(self) -> bool:
        """Whether every planned step was made, or is a known skip; true as well where nothing could be planned."""
        return self.plan is None or self.updates == self._updates_due(self.plan)

    def _updates_due(self, plan: StepPlan) -> int:
        end = self._attempts_until_the_end(plan)
        put_off = end > plan.total_steps
        # Ahead of an end that was put off, max_epochs has ended the run.
        ends_ahead = self.stopped_early or (put_off and self.attempts < end)
        return (self._steps_until_stop(plan) if ends_ahead else end) - self.known_skips

    def _attempts_until_the_end(self, plan: StepPlan) -> int:
        """Those that are planned, and where ``max_steps`` ends the run those that it does not count."""
        return plan.total_steps + (self.known_skips if plan.total_steps == plan.max_steps else 0)

    def _steps_until_stop(self, plan: StepPlan) -> int:
        """The steps whose micro-batches have run; behind ``max_steps`` as well, which skips may have put off."""
        epoch = max(self.batches_per_epoch, default=0)
        here = epoch, self.batches_per_epoch.get(epoch, 0)
        most = plan.steps_done + sum(self.batches_per_epoch.values())  # a window has one micro-batch at least
        windows = Windows(plan.spans, range(plan.steps_done, most))
        ended = itertools.takewhile(lambda window: (window.epoch, window.stop) <= here, windows)
        return plan.steps_done + sum(1 for _ in ended)

    def explain(self) -> str:
        """Say what was planned, what was counted, and where the two part."""
        if self.plan is None:
            planned = f"Nothing planned: {self.why_no_plan}"
        else:
            planned = f"{self.plan.total_steps:,} optimizer steps planned"
        lines = [f"{planned}; {self.updates:,} updates counted, in {self.attempts:,} attempts."]
        unknown = self.skipped - self.known_skips
        if self.known_skips:
            lines.append(f"SkipBadSteps skipped {self.known_skips:,} of them, and held the LR schedule back.")
        if unknown > 0:
            lines.append(
                f"{unknown:,} attempts changed nothing; global_step and the LR schedule count them all the same."
            )
        if unknown < 0:
            lines.append(
                f"At least {-unknown:,} updates were made where Lightning counts no step (outside training_step, say): "
                "global_step and max_steps leave them out."
            )
        if self.plan is None:
            return "\n".join(lines)
        if self.plan.steps_done:
            lines.append(f"{self.plan.steps_done:,} of the planned steps were made before, on other ranks.")
        if self.attempts_before_audit:
            lines.append(f"The {self.attempts_before_audit:,} steps before this audit began are taken as updates.")
        if self.stopped_early:
            due = self._steps_until_stop(self.plan)
            lines.append(f"Training was told to stop before the planned end, when {due:,} steps were due.")
        if not self.agrees:
            if (due := self._updates_due(self.plan)) != self.plan.total_steps:
                too = "many" if self.updates > due else "few"
                lines.append(f"In all, {due:,} updates were due: {abs(self.updates - due):,} too {too}.")
            if not self.plan.steps_done and not self.attempts_before_audit:
                lines += self._first_epoch_that_differs(self.plan)
        return "\n".join(lines)

    def _first_epoch_that_differs(self, plan: StepPlan) -> list[str]:
        for epoch, run in self.batches_per_epoch.items():
            due = plan.batches_in_epoch(epoch)
            if due != run:
                return [f"Epoch {epoch} is the first to differ: {due:,} batches planned, {run:,} run."]
        return []

    # ------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_another_lightning("StepAudit", trainer)
            self.tell_of_windows(trainer)
            if not has_trained(trainer):
                self._reset()  # a checkpoint's counts come after this hook
            self.plan = self._given_plan
            self.why_no_plan = "training did not begin: no batch, or nothing left to do"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in callbacks_of_kind(trainer, ExactResume):
            callback.go_on(trainer, pl_module)  # it may come later in the list
        self._take_what_came_before(trainer)
        if trainer.world_size not in self._world_sizes:
            self._world_sizes.append(trainer.world_size)
        came_to_others = len(self._world_sizes) > 1
        if self.plan is None and came_to_others:
            ranks = ", then to ".join(map(str, self._world_sizes))
            self.why_no_plan = f"the run was dealt to {ranks} ranks: plan_steps(..., **run_so_far(trainer)) plans it"
        elif self.plan is None:
            self.plan, self.why_no_plan = _plan_of(trainer, pl_module)
        if self.attempts and (self.plan is not None or came_to_others):
            _warn_of_other_horizons(trainer, self.plan)
        self._handles = [optimizer.register_step_post_hook(self._count_update) for optimizer in trainer.optimizers]

    def _take_what_came_before(self, trainer: Trainer) -> None:
        before = attempts_of(trainer) - self.attempts
        self.attempts_before_audit += before
        self.updates += before - max(0, min(before, skips_of(trainer) - self.skipped))
        self.attempts += before

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batches_per_epoch.setdefault(trainer.current_epoch, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.attempts = attempts_of(trainer)
        if batch is not None:  # Lightning leaves out a batch that is None
            self.batches_per_epoch[trainer.current_epoch] = batch_idx + 1

    def _count_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # torch's optimizers leave out a parameter without a gradient: no gradient at all, no update. A fused one is
        # called even when the gradient scaler found a value that is not finite, and then changes nothing.
        held_back = getattr(optimizer, "found_inf", None)
        if gradients_of(optimizer) and (held_back is None or not bool(held_back)):
            self.updates += 1

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in on_train_end, where ModelCheckpoint, which comes later, writes the last one.
        self._remove_hooks()
        self._take_what_came_before(trainer)  # where nothing was left to do, training has not started
        self.known_skips = max(0, min(self.skipped, skips_of(trainer)))
        self.stopped_early = (
            trainer.should_stop and self.plan is not None and self.attempts < self._attempts_until_the_end(self.plan)
        )
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
            "attempts_before_audit": self.attempts_before_audit,
            "batches_per_epoch": dict(self.batches_per_epoch),
            "world_sizes": self._world_sizes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.attempts = state_dict["attempts"]
        self.updates = state_dict["updates"]
        self.attempts_before_audit = state_dict["attempts_before_audit"]
        self.batches_per_epoch = dict(state_dict["batches_per_epoch"])
        self._world_sizes = list(state_dict["world_sizes"])


def _warn_of_other_horizons(trainer: Trainer, plan: StepPlan | None) -> None:
    # A checkpoint brings a schedule's horizon with it, as a number; of OneCycleLR, the step after it raises.
    ends = "makes another number of steps on its ranks now"
    if plan is not None:
        ends = f"ends after {plan.total_steps:,} optimizer steps"
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        for name in ("T_max", "total_steps", "total_iters"):
            horizon = getattr(scheduler, name, None)
            if config.interval == "step" and isinstance(horizon, int) and horizon != (plan and plan.total_steps):
                rank_zero_warn(
                    f"{type(scheduler).__name__} came back from the checkpoint with {name}={horizon:,}, and this run "
                    f"{ends}: the rate will not end where it should. Let it follow "
                    "plan_steps(..., **run_so_far(trainer)).progress, by LambdaLR"
                )


def _plan_of(trainer: Trainer, pl_module: LightningModule) -> tuple[StepPlan | None, str]:
    """The plan of a Trainer that is about to train, or why there is none."""
    if not pl_module.automatic_optimization:
        return None, "with manual optimization, the module's own code decides when to step"
    if trainer.strategy.handles_gradient_accumulation:
        return None, f"{type(trainer.strategy).__name__} accumulates by its own count"
    if callbacks_of_kind(trainer, StochasticWeightAveraging):
        return None, "StochasticWeightAveraging adds an epoch, in which Lightning makes one step with an old gradient"
    if trainer.num_training_batches == float("inf"):
        return None, "the loader has no length"
    if trainer.max_steps == -1 and trainer.max_epochs in (-1, None):
        return None, "neither max_epochs nor max_steps ends this run"
    ends: dict[str, Any] = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
    sampler: Any = getattr(trainer.train_dataloader, "batch_sampler", None)
    if isinstance(sampler, ScheduledBatchSampler) and not trainer.overfit_batches:  # type: ignore[attr-defined]
        return sampler.plan(**ends, limit_train_batches=trainer.limit_train_batches), ""
    by_epoch = accumulation_by_epoch(trainer)
    windows = trainer.accumulate_grad_batches if by_epoch is None else by_epoch
    # Batches are what ends an epoch: each counts as one sample.
    return plan_steps(int(trainer.num_training_batches), 1, accumulate_grad_batches=windows, **ends), ""
