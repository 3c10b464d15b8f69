"""A Trainer's bad steps, skipped on all ranks together."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from course_lib._tensors import parameters_of
from course_lib.callbacks._replaced_methods import replace_methods
from course_lib.callbacks._trainer import callbacks_of_kind, has_trained, require_plain_optimization
from course_lib.callbacks._windows import TellsOfWindows
from course_lib.samplers.epoch import EpochBatchSampler
from course_lib.skipping import StepGuard
from course_lib.skipping.detector import SpikeDetector
from course_lib.skipping.gradients import gradients_of
from course_lib.skipping.lr_schedules import follow_skip, goes_by_lr_factor
from course_lib.skipping.requirements import check_limits


class SkipBadSteps(TellsOfWindows):
    """Skip an update on all ranks where the loss or the gradient is not finite, or the gradient's norm is a spike.

        Trainer(max_steps=10_000, callbacks=[SkipBadSteps(spike_factor=10, journal="skipped.jsonl")])

    After a skip, parameters, optimizer state, buffers, the gradient scaler and schedules of the interval ``"step"`` are
    as if the window had not been; see :class:`course_lib.skipping.StepGuard`, which does the work and whose arguments
    are taken here. A ``training_step`` that finds its batch bad calls :meth:`reject`, even on one rank alone. A window
    in which ``training_step`` returned ``None`` is skipped whole, as its forward has left its traces. What it *logs* is
    not held back: the mean of a logged NaN is NaN, so log a loss only where it is finite. In a skipped step gradients
    are ``None`` for the module's own ``on_before_optimizer_step``.

    ``trainer.global_step`` counts updates: ``max_steps=100`` trains for 100 of them, checkpoints are named by them, and
    ``WeightAveraging`` leaves its average alone after a skip. (The loggers' step counts attempts.) A schedule of the
    interval ``"epoch"`` goes on with the epochs, one of the interval ``"step"`` with the updates: where ``max_epochs``
    ends the run, a cosine stops as many steps before its end as were skipped.

    It judges the gradient that would be applied: after ``ExactAccumulation``, wherever that is in the list, and
    before the Trainer clips. A skipped step is not clipped.

    Args:
        sample_indices: ``sample_indices(batch)`` -> the batch's indices in the dataset, for the journal. Default: asked
            from the loader's sampler, where its order is a function of (seed, epoch): ``course_lib.samplers``, a
            ``DistributedSampler``, no shuffling. With a Trainer's own shuffling on one device they stay unknown.
        spike_factor, history, min_history, max_consecutive_skips, journal: See :class:`StepGuard`.

    Attributes:
        attempts: Optimizer steps that the Trainer tried.
        updates: Those that were made; a schedule's ``last_epoch``.
        skipped: ``attempts - updates``.

    The counters and the accepted norms go into checkpoints and continue after a resume, and in a second fit of the same
    Trainer.

    Raises:
        MisconfigurationException: Manual optimization, a strategy other than one device and DDP, or a schedule of the
            interval ``"step"`` with another ``frequency`` than 1.
        TooManySkips: ``max_consecutive_skips`` in a row.
    """

    def __init__(
        self,
        *,
        sample_indices: Callable[[Any], Iterable[int]] | None = None,
        spike_factor: float | None = None,
        history: int = 128,
        min_history: int = 16,
        max_consecutive_skips: int | None = 50,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        SpikeDetector(spike_factor, history=history, min_history=min_history)  # raises now, not when training starts
        check_limits(None, max_consecutive_skips)
        self.sample_indices = sample_indices
        self._guard_arguments: dict[str, Any] = dict(
            spike_factor=spike_factor,
            history=history,
            min_history=min_history,
            max_consecutive_skips=max_consecutive_skips,
            journal=journal,
        )
        self._guard: StepGuard | None = None
        self._state: Mapping[str, Any] = {}
        """The guard's, while there is none."""
        self._fetched = 0
        self._window: list[_MicroBatch] = []
        self._backwards = 0
        self._skipping = False
        self._scaler_before: dict[str, Any] | None = None
        self._replaced = ExitStack()

    @property
    def attempts(self) -> int:
        return self._state.get("attempts", 0) if self._guard is None else self._guard.attempts

    @property
    def updates(self) -> int:
        return self._state.get("updates", 0) if self._guard is None else self._guard.updates

    @property
    def skipped(self) -> int:
        return self.attempts - self.updates

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
        if not has_trained(trainer):
            self._state = {}  # a checkpoint's comes after this hook

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
        self._guard = StepGuard(pl_module, trainer.optimizers[0], scaler=scaler, **self._guard_arguments)
        if self._state:
            self._guard.load_state_dict(self._state)
        self._fetched, self._window, self._backwards, self._scaler_before = 0, [], 0, None
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
        if skip is None:
            return
        self._skipping = True
        _take_back_one_step(trainer)
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
            self._state = self._guard.state_dict()
            self._guard.close()
        self._guard = None
        self._replaced.close()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state) if self._guard is None else self._guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = dict(state_dict)

    # ------------------------------------------------------------------------------------------------- helpers

    def _replace_methods(self, guard: StepGuard, pl_module: LightningModule, trainer: Trainer) -> Callable[[], None]:
        # No hook sees the loss between training_step and its backward, or can hold a schedule back.
        backward, clip = pl_module.backward, pl_module.configure_gradient_clipping
        step_schedule = pl_module.lr_scheduler_step

        @functools.wraps(backward)
        def marking_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._backwards += 1
            return backward(guard.mark(loss), *args, **kwargs)

        @functools.wraps(clip)
        def clip_unless_skipped(*args: Any, **kwargs: Any) -> Any:
            return None if self._skipping else clip(*args, **kwargs)  # by value, torch needs a gradient

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
            lr_scheduler_step=step_schedule_unless_skipped,
        )


def skips_of(trainer: Trainer) -> int:
    """What SkipBadSteps has taken out of ``trainer.global_step``."""
    return sum(one.skipped for one in callbacks_of_kind(trainer, SkipBadSteps))


def attempts_of(trainer: Trainer) -> int:
    """Optimizer steps that the Trainer tried, of whatever kind of optimizer and loop."""
    return trainer.global_step + skips_of(trainer)


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
