"""A Trainer's bad steps, skipped on all ranks together."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any, Literal, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from course_lib._tensors import parameters_of
from course_lib._words import counted
from course_lib.callbacks._replaced_methods import replace_methods
from course_lib.callbacks._trainer import CountsSkips, require_plain_optimization
from course_lib.callbacks._windows import TellsOfWindows
from course_lib.samplers.epoch import EpochBatchSampler
from course_lib.skipping import StepGuard
from course_lib.skipping.detector import SpikeDetector
from course_lib.skipping.gradients import gradients_of
from course_lib.skipping.lr_schedules import follow_skip, goes_by_lr_factor
from course_lib.skipping.requirements import check_limits


class SkipBadSteps(CountsSkips, TellsOfWindows):
    """Skip an update on all ranks where the loss or the gradient is not finite, or the gradient's norm is a spike.

        Trainer(max_steps=10_000, callbacks=[SkipBadSteps(spike_factor=10, journal="skipped.jsonl")])

    After a skip, parameters, optimizer state, buffers, the gradient scaler and schedules of the interval ``"step"`` are
    as if the window had not been; see :class:`course_lib.skipping.StepGuard`, which does the work and whose arguments
    are taken here. A ``training_step`` that finds its batch bad calls :meth:`reject`, even on one rank alone. A window
    in which ``training_step`` returned ``None`` is skipped whole, as its forward has left its traces. What it *logs* is
    not held back: the mean of a logged NaN is NaN, so log a loss only where it is finite. In a skipped step gradients
    are ``None`` for the module's own ``on_before_optimizer_step``.

    A schedule of the interval ``"epoch"`` goes on with the epochs. One of the interval ``"step"`` follows the updates:
    where ``max_epochs`` ends the run, a cosine stops as many steps before its end as were skipped; with ``max_steps``,
    which counts updates, it ends where it should.

    It judges the gradient that would be applied: after ``ExactAccumulation``, wherever that is in the list, and
    before the Trainer clips. A skipped step is not clipped.

    Args:
        max_steps_means: What ``trainer.global_step``, and with it ``max_steps``, counts. ``"updates"``: skipped
            attempts are taken out, so that ``max_steps=100`` trains for 100 updates, checkpoints are named by updates,
            and callbacks that average weights whenever ``global_step`` moves leave their averages alone.
            ``"attempts"``: as Lightning counts: a run is never longer than planned, and whatever follows
            ``global_step`` (averages, too) moves with skips. The loggers' step counts attempts either way.
        sample_indices: ``sample_indices(batch)`` -> the batch's indices in the dataset, for the journal. Default: asked
            from the loader's sampler, where its order is a function of (seed, epoch): ``course_lib.samplers``, a
            ``DistributedSampler``, no shuffling. With a Trainer's own shuffling on one device they stay unknown.
        averages: ``AveragedModel(module)``, made before the fit, or several: updated after each update, and saved and
            restored with the callback.
        max_norm: Clip the accepted gradients to this norm, in place of the Trainer's ``gradient_clip_val``.
        spike_factor, history, min_history, max_consecutive_skips, journal: See :class:`StepGuard`.

    Attributes:
        attempts: Optimizer steps that the Trainer tried.
        updates: Those that were made; a schedule's ``last_epoch``.
        skipped: ``attempts - updates``.

    The counters and the accepted norms go into checkpoints and continue after a resume.

    Raises:
        MisconfigurationException: Manual optimization, a strategy other than one device and DDP, a schedule of the
            interval ``"step"`` with another ``frequency`` than 1, or ``max_norm`` beside the Trainer's own clipping.
        TooManySkips: ``max_consecutive_skips`` in a row.
    """

    def __init__(
        self,
        *,
        max_steps_means: Literal["updates", "attempts"] = "updates",
        sample_indices: Callable[[Any], Iterable[int]] | None = None,
        averages: Any = (),
        max_norm: float | None = None,
        spike_factor: float | None = None,
        history: int = 128,
        min_history: int = 16,
        max_consecutive_skips: int | None = 50,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_steps_means not in ("updates", "attempts"):
            raise ValueError(f'max_steps_means must be "updates" or "attempts", got {max_steps_means!r}')
        SpikeDetector(spike_factor, history=history, min_history=min_history)  # raises now, not when training starts
        check_limits(max_norm, max_consecutive_skips)
        self.max_steps_means = max_steps_means
        self.sample_indices = sample_indices
        self.attempts = self.updates = 0
        self.uncounted_attempts = 0
        self._guard: StepGuard | None = None
        self._averages = (averages,) if hasattr(averages, "update_parameters") else tuple(averages)
        self._guard_arguments: dict[str, Any] = dict(
            averages=self._averages,
            max_norm=max_norm,
            spike_factor=spike_factor,
            history=history,
            min_history=min_history,
            max_consecutive_skips=max_consecutive_skips,
            journal=journal,
        )
        self._restored: Mapping[str, Any] = {}
        self._fetched = 0
        self._window: list[_MicroBatch] = []
        self._backwards = 0
        self._skipping = False
        self._scaler_before: dict[str, Any] | None = None
        self._replaced = ExitStack()

    def reject(self, reason: str) -> None:
        """Have all ranks skip the window that runs, for what this rank knows about its data: in ``training_step``."""
        if self._guard is None:
            raise RuntimeError("reject() belongs into training_step: no training runs now")
        self._guard.reject(reason)

    def reject_on_all_ranks(self, reason: str) -> None:
        """The same, for what every rank knows and says: at any time before the step."""
        self.reject(reason)
        assert self._guard is not None
        for gradient in gradients_of(self._guard.optimizer):
            gradient.mul_(math.nan)

    # ------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        require_plain_optimization(
            self,
            trainer,
            pl_module,
            with_manual="use course_lib.skipping.StepGuard(self, self.optimizers()) in your training_step: "
            "guard.mark(loss) ahead of manual_backward, guard.step() for optimizer.step()",
            other_strategies="whose ranks may not hold the same gradients: they could not decide alike",
        )
        self.tell_of_windows(trainer)
        if self._guard_arguments["max_norm"] is not None and trainer.gradient_clip_val is not None:
            raise MisconfigurationException(
                f"max_norm={self._guard_arguments['max_norm']:g} and the Trainer's gradient_clip_val="
                f"{trainer.gradient_clip_val:g} would both clip: give one of them"
            )
        self.attempts = self.updates = 0
        if trainer.fit_loop.total_batch_idx < 0:  # in a second fit the Trainer goes on with the counter without them
            self.uncounted_attempts = 0
        self._restored = {}  # a checkpoint's state comes after this hook

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(goes_by_lr_factor(c.scheduler) for c in trainer.lr_scheduler_configs if c.interval == "step"):
            raise MisconfigurationException(
                "the learning rate follows plan().lr_factor(...), which goes by updates, and sizes and batches go "
                "by attempts: after a skip they part. Take lr_factor(...) of the SizeScheduleDataModule itself"
            )
        if any(c.interval == "step" and c.frequency != 1 for c in trainer.lr_scheduler_configs):
            raise MisconfigurationException(
                'SkipBadSteps lets schedules of the interval "step" follow the updates, which needs frequency=1: '
                "Lightning counts a larger one in batches, skipped ones included"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for average in self._averages:
            average.to(pl_module.device)
        self._guard = StepGuard(pl_module, trainer.optimizers[0], scaler=scaler, **self._guard_arguments)
        if self._restored:
            self._restore(self._guard)
        self._fetched, self._window, self._backwards, self._scaler_before = 0, [], 0, None
        self._read_counters()
        self._replaced.callback(self._replace_methods(self._guard, pl_module, trainer))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fetched = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._guard is not None
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._window, self._backwards = [], 0
        self._guard.begin()
        self._skipping = False
        known = None if self.sample_indices is None else self.sample_indices(batch)
        self._window.append(_MicroBatch(batch_idx, self._fetched, known))
        self._fetched += 1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        assert self._guard is not None
        scaler = self._guard.scaler
        has_gradient = len(gradients_of(optimizer)) > 0
        if self._backwards < len(self._window):
            self._guard.reject("training_step returned None")
        if scaler is not None and has_gradient and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # of others, Lightning has done it
        window, loader = self._window, trainer.train_dataloader
        skip = self._guard.judge(
            epoch=trainer.current_epoch,
            batch_indices=[micro_batch.number for micro_batch in window],
            sample_indices=lambda: _samples_of(window, loader),
        )
        self._read_counters()
        if skip is None:
            return
        self._follow_skip(trainer)
        # torch's optimizers leave out a parameter without a gradient, its state and its decay included.
        for parameter in parameters_of(optimizer):
            parameter.grad = None
        if scaler is not None and has_gradient and not skip.overflow:
            self._scaler_before = scaler.state_dict()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._guard is not None
        if self._scaler_before is not None and self._guard.scaler is not None:
            self._guard.scaler.load_state_dict(self._scaler_before)
            self._scaler_before = None
        self._guard.flush()  # only now, so that a run that ends by it ends with all in place

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.skipped:
            rank_zero_info(
                f"SkipBadSteps: {self.updates:,} updates in {self.attempts:,} attempts, {self.skipped:,} skipped."
            )
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        if self._guard is not None:
            self._restored = self._guarded_state(self._guard)
            self._guard.close()
        self._guard = None
        self._replaced.close()

    def state_dict(self) -> dict[str, Any]:
        state = self._restored if self._guard is None else self._guarded_state(self._guard)
        return {**state, "uncounted_attempts": self.uncounted_attempts}  # a second fit has them before its guard

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict)
        self.uncounted_attempts = self._restored.pop("uncounted_attempts", 0)

    # ------------------------------------------------------------------------------------------------- helpers

    def _guarded_state(self, guard: StepGuard) -> dict[str, Any]:
        averages = {"averages": [average.state_dict() for average in self._averages]} if self._averages else {}
        return guard.state_dict() | averages

    def _read_counters(self) -> None:
        assert self._guard is not None
        self.attempts, self.updates = self._guard.attempts, self._guard.updates

    def _restore(self, guard: StepGuard) -> None:
        guard.load_state_dict(self._restored)
        saved = self._restored.get("averages", [])
        if len(saved) != len(self._averages):
            raise MisconfigurationException(
                f"the checkpoint has {counted(len(saved), 'average')}, and SkipBadSteps was given "
                f"{len(self._averages)}: give it as many, or start from the checkpoint's weights"
            )
        for average, state in zip(self._averages, saved, strict=True):
            average.load_state_dict(state)

    def _follow_skip(self, trainer: Trainer) -> None:
        self._skipping = True
        if self.max_steps_means == "updates":
            self.uncounted_attempts += 1
            _take_back_one_step(trainer)

    def _replace_methods(self, guard: StepGuard, pl_module: LightningModule, trainer: Trainer) -> Callable[[], None]:
        # No hook sees the loss between training_step and its backward, or can hold a schedule back.
        backward, clip = pl_module.backward, pl_module.configure_gradient_clipping
        optimizer_step, step_schedule = pl_module.optimizer_step, pl_module.lr_scheduler_step

        @functools.wraps(backward)
        def marking_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._backwards += 1
            return backward(guard.mark(loss), *args, **kwargs)

        @functools.wraps(clip)
        def clip_unless_skipped(*args: Any, **kwargs: Any) -> Any:
            return None if self._skipping else clip(*args, **kwargs)  # by value, torch needs a gradient

        @functools.wraps(optimizer_step)
        def watched_step(*args: Any, **kwargs: Any) -> None:
            updates = guard.updates
            optimizer_step(*args, **kwargs)
            if guard.updates > updates:
                for average in self._averages:
                    average.update_parameters(pl_module)

        @functools.wraps(step_schedule)
        def step_schedule_unless_skipped(scheduler: Any, metric: Any) -> None:
            by_step = any(c.scheduler is scheduler and c.interval == "step" for c in trainer.lr_scheduler_configs)
            if self._skipping and by_step:
                follow_skip(scheduler)
            else:
                step_schedule(scheduler, metric)

        return replace_methods(
            pl_module,
            backward=marking_backward,
            configure_gradient_clipping=clip_unless_skipped,
            optimizer_step=watched_step,
            lr_scheduler_step=step_schedule_unless_skipped,
        )


class _MicroBatch(NamedTuple):
    number: int
    """As the Trainer numbers it; continues after a resume within an epoch."""
    fetched: int
    """How many batches the loader's iterator had delivered before it."""
    sample_indices: Iterable[int] | None


def _samples_of(window: list[_MicroBatch], loader: Any) -> list[int] | None:
    samples: list[int] = []
    for micro_batch in window:
        known = micro_batch.sample_indices
        indices = _indices_of(loader, micro_batch.fetched) if known is None else known
        if indices is None:
            return None
        samples += map(int, indices)
    return samples


def _indices_of(loader: Any, number: int) -> Iterable[int] | None:
    """The indices of a loader's batch, ``number`` batches after the start of its iteration; None if nobody knows."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, EpochBatchSampler):
        again = copy.copy(sampler)
        again.load_state_dict(sampler.state_dict(batches=number))
        return next(iter(again), None)
    if type(sampler) is BatchSampler and isinstance(sampler.sampler, SequentialSampler | DistributedSampler):
        return next(islice(sampler, number, None), None)
    return None  # to iterate another one would draw another order


def _take_back_one_step(trainer: Trainer) -> None:
    """Let the attempt that runs not count; the loop's own progress is where ``trainer.global_step`` comes from."""
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    for counter in (progress.total, progress.current):
        counter.ready -= 1  # was counted when the attempt began
        counter.completed -= 1  # will be counted when it ends
