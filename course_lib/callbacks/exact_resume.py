"""A run that is stopped anywhere, any number of times, and resumed equals the uninterrupted run.

A Trainer's checkpoint does not hold the gradients that a window has gathered so far, nor the state of the random
generators. A checkpoint that was taken inside a window (by ``val_check_interval``, a time interval, an exception, a
second kill just after a resume) therefore loses the window's earlier samples, and nothing says so. The rule: *a
checkpoint holds the run as it was when the last window ended; the random numbers of a window are a function of the
seed, the window's place in the run and the rank.*

    Trainer(accumulate_grad_batches=8, callbacks=[ExactResume(), ModelCheckpoint(...)]).fit(
        model, ResumableDataLoader(dataset, batch_size=16, shuffle=True)
    )

``ExactAccumulation``, ``SkipBadSteps``, ``StepAudit`` and ``SizeScheduleDataModule`` bring it with them.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import LBFGS

from course_lib._generators import seed_generators
from course_lib._lightning import LOADERS_MADE_IN, MODULE_MODE, RESTARTING, RESUMING, SHOULD_ACCUMULATE, SKIP_BACKWARD
from course_lib._ranks import refuse_what_ddp_never_reduces
from course_lib.callbacks import _averages, _metrics, _progress, _refused_runs, _replaced_methods, _restored_loaders
from course_lib.callbacks._modes import modes_of, put_modes, was_pruned
from course_lib.callbacks._other_ranks import (
    count_batches_again,
    refuse_an_epoch_that_ranks_cannot_share,
    say_that_batches_are_counted_again,
    since_ranks,
    warn_of_buffers_of_other_ranks,
)
from course_lib.callbacks._same_objects import begin_as_in_a_new_process
from course_lib.callbacks._trainer import finders_of, load_in_its_precision, window_length
from course_lib.callbacks._unstepped import Unstepped, put_what_is_in_no_state
from course_lib.callbacks._waiting import warn_of_an_epochs_start, warn_of_what_has_not_run, what_waits
from course_lib.callbacks._window_end import BATCH_PROGRESS, WindowEnd


class CheckpointError(RuntimeError):
    """A checkpoint from which the run cannot be resumed as if it had not been stopped."""


class ExactResume(Callback):
    """Checkpoints from which a run goes on as if it had not been stopped, wherever they were taken.

    A checkpoint that is taken inside a window of ``accumulate_grad_batches`` micro-batches is set back to the window's
    start: the loops' counters, the states of the training loader and of the data module, the module's buffers
    (BatchNorm's running statistics), its extra state, the parameters that no optimizer has and the module itself moves
    (a momentum encoder), and the rates. Other parameters, optimizers and schedules have not changed since. Buffers with
    ``persistent=False`` that training has changed are saved, too, and so are numbers, tensors and schedules that the
    module or a part of it keeps as a plain attribute and training moves. (Lightning forgets them.) The run that resumes
    trains the whole window, and an ``EarlyStopping`` sees the validations in it once. (What callbacks of your own save,
    or an ``on_save_checkpoint``, is not set back, and a resume warns of it: count steps there.) So is a checkpoint that
    is taken when a run has been told to stop within an epoch (``max_time``, ``max_steps``): the run that resumes trains
    the rest of the epoch, which Lightning leaves out. Where an ``EarlyStopping`` had ended the run, it stays so, with a
    warning. (Lightning trains on.) Any other checkpoint between windows stays as it is.

    With ``reseed``, the global generators of Python, NumPy and torch are seeded after each window, and after each
    validation, from the run's first seed (``torch.initial_seed()`` when training begins; it goes into checkpoints), the
    number of micro-batches so far, and the rank. So dropout draws what it would have drawn, validation does not move
    the generators of training, and each rank has draws of its own. A generator that an object keeps for itself is its
    own affair.

    Where a run goes on within an epoch on another number of ranks, fewer or more, the batches of that epoch and of the
    next ones are counted again: the rest of it is trained once, and the next ones are whole. (A Trainer counts once.
    Without this callback a ``ResumableDataLoader`` refuses to be restored there.) With ``reseed``, so are those of
    epochs of other lengths, as a curriculum has, in any run with a ``ResumableDataLoader``.

    What ``self.log`` has gathered of the epoch's training metrics goes on, on one rank (Lightning begins the mean
    again), and ``trainer.callback_metrics`` has what was logged last, as rank 0 had it: a ``ReduceLROnPlateau``, an
    ``EarlyStopping`` and code of your own go by what they would have seen. A validation that was due, or under way, is
    made, and behind an epoch's last batch its end as well, so that a ``ModelCheckpoint`` sees each. (Lightning passes
    it over, or makes a part of it. The logger's row of that epoch lacks the means of the training metrics.)

    A ``ModelCheckpoint`` that saves at a batch's end does so behind the module's own ``on_train_batch_end``, so that
    what that does is saved. (Lightning calls it last, and not again.) A callback of your own that saves there comes
    ahead of it, and at an epoch's last batch, where no validation follows, all come ahead of the module's own
    ``on_train_epoch_end``: a resume warns that these have not run.

    Parameters that were frozen or unfrozen during the run, and parts in eval mode, are so again; a warning names them.
    (A checkpoint of Lightning does not hold it: what a ``BaseFinetuning`` had unfrozen, it leaves frozen.) In the epoch
    that ``StochasticWeightAveraging`` adds for BatchNorm's statistics, no step is made. (Lightning makes one, with the
    gradient of the step before.)

    A run that is resumed behind its last step ends with its averaged weights. (Lightning returns before it puts them
    into the module.) What else was due at its last epoch's end (a validation, a schedule's step) is left out where
    ``max_steps`` ends it, and a warning names the validation; and so are, in any epoch, the hooks of its end behind one
    that raises. An exception within a validation leaves the module in the modes, and with the weights, that it trained
    with, so that a checkpoint of it can be resumed, and a second ``fit`` can go on. (Lightning leaves it in eval mode,
    and WeightAveraging leaves the average in it.) Where a checkpoint is refused, none is saved for that exception.

    The training loader must know its position: take a :class:`~course_lib.resume.ResumableDataLoader`, or another that
    has a state (torchdata's ``StatefulDataLoader``, whose sampler needs one, too, if it draws). A
    ``GradientAccumulationScheduler`` gets its window length back within an epoch. (Lightning takes the Trainer's.)

    Args:
        reseed: Whether to seed the generators. ``StepAudit`` alone brings this callback with ``False``.
        strict: Raise for a checkpoint that cannot be resumed exactly, instead of warning. Where another callback
            brought this one, a loader that does not know its position is warned of.

    Raises:
        MisconfigurationException: Manual optimization, or a strategy that accumulates by its own count; or a
            ``StochasticWeightAveraging`` that has been in a fit before; or two ``WeightAveraging``; or a
            ``CombinedLoader`` of a loader with a state and one of another length, but for the mode ``"min_size"``; or
            LBFGS, or another optimizer that evaluates the loss twice in a step, with windows of several micro-batches;
            or the Trainer of ``pytorch_lightning``; or ``overfit_batches`` with one of ``course_lib.samplers`` that
            shuffles in a plain DataLoader, which Lightning leaves as it is on one device.
        ValueError: In ``fit(ckpt_path=...)``: the next epoch cannot be dealt to as many ranks as there are now. Or a
            parameter is trained that was frozen when DDP wrapped the module.
        CheckpointError: In ``fit(ckpt_path=...)``, before a batch is trained: the checkpoint was taken inside a window
            by a run without this callback, or in windows of another length, or in the middle of an update, or behind a
            ``ModelPruning``'s cut, or at a batch's end, ahead of a ``ReduceLROnPlateau`` that is stepped by steps, or
            behind an epoch's last batch with no validation to come, where a ``ReduceLROnPlateau`` or an
            ``EarlyStopping`` waits for the epoch's end; or within an epoch, of a loader that does not know its position
            (torch's DataLoader begins again) or its length, or where one of these two goes by a mean that several ranks
            have gathered, or a torchmetrics ``Metric`` (behind the epoch's last batch a ``ModelCheckpoint``, too); or
            ahead of the run's first batch, of a DataLoader whose order is drawn by then (with workers, or all at once);
            or of an order that a generator draws that is in no checkpoint; or in an epoch that ``max_epochs`` leaves
            out. Or a ``LearningRateFinder`` or ``BatchSizeFinder`` is there.
    """

    _seed: int | None
    _window_end: WindowEnd | None
    _since_ranks: dict[str, int] | None
    _averaged_epoch: int | None
    _unstepped: Unstepped | None
    _loaded: dict[str, Any]  # what a checkpoint held of this callback
    _turns_to_next_epoch: bool
    _window_begun: bool
    _went_on: bool
    _validates_every: float | None

    def __init__(self, *, reseed: bool = True, strict: bool = True) -> None:
        self.reseed = reseed
        self.strict = strict
        self._brought = False
        self._handles: list[Any] = []
        self._replaced = ExitStack()
        self._swaps: list[_averages.CountedSwaps] = []
        self._forget()

    # ------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        _refused_runs.refuse_steps_by_another(trainer, pl_module)
        _averages.refuse_a_second_fit(trainer)
        _averages.refuse_two_averages(trainer)
        self._forget()
        self._since_ranks = {"world_size": trainer.world_size, "steps_done": 0, "samples_done": 0}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if finders_of(trainer) and own and own["seed"] is None:
            return  # what a finder puts back when it has found: nothing is trained yet
        # The state that is loaded is that of a window's end. What the loops count while they are restored is not.
        self._window_end = copy.deepcopy(WindowEnd.of_checkpoint(checkpoint, trainer))
        self._resumed = True
        begin_as_in_a_new_process(trainer)
        say_that_batches_are_counted_again(checkpoint)
        self._since_ranks = since_ranks(checkpoint, trainer.world_size)
        self._loaded_own = own is not None
        for why in _refused_runs.refused_resumes(trainer, own or {}):
            self._refuse(trainer, why)
        load_in_its_precision(trainer, pl_module, _averages.trained_state(checkpoint))
        gathered = own and own.get("gathered")
        self._metrics = _metrics.EpochMetrics(gathered, trainer.world_size)
        before = {"logged": _metrics.logged_before(own or {}), "stop_waits": (own or {}).get("stop_waits", False)}
        self._window_end = self._window_end._replace(gathered=gathered, **before)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refused_runs.refuse_loaders(trainer)
        _refused_runs.refuse_windows_of_evaluations(trainer)
        self.go_on(trainer, pl_module)
        if self._window_end is None:
            self._remember(trainer)
        if self._seed is None:
            self._seed = trainer.strategy.broadcast(torch.initial_seed())
        self._swaps = _averages.counted_swaps(trainer)
        self._deciders.watch(trainer)
        self._replaced = _replaced_methods.call_around_the_hooks(
            trainer,
            pl_module,
            self._begin_batch,
            lambda: self._end_batch(trainer, False),
            on_train_start=lambda: self._begin_training(trainer),
            on_train_epoch_start=lambda: self._begin_epoch(trainer),
            on_validation_end=lambda: self._seed_generators(trainer),
        )
        self._unstepped = Unstepped(trainer, pl_module, self._loaded)
        for optimizer in trainer.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda *step: self._begin_step(trainer, *step)))
        self._seed_generators(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refused_runs.refuse_windows_of_evaluations(trainer)
        if self._resumed or self.reseed:  # an audit alone leaves a run as it is
            count_batches_again(trainer)  # one epoch may be longer than another
        self._seed_generators(trainer)  # a loader that was made again for this epoch has drawn
        if self._validates_every is not None:
            _progress.validate_as_before(trainer, self._validates_every)
        self._validates_every = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        _progress.count_batches_passed_over(trainer, begun=False, ended=False)
        self._batch_has_ended = self._before_own_hook = False
        if self._resumed:
            # The scheduler does it in on_train_epoch_start, which is not called here, and refuses it in on_train_start.
            trainer.accumulate_grad_batches = window_length(trainer)
            if _metrics.has_plateaus(trainer):
                RESTARTING.put(trainer.fit_loop, False)  # else they are not stepped at this epoch's end
        _progress.make_no_step_in_averaging_epoch(trainer)
        # Once more: a run that is resumed before a validation passes it over, and draws while it does.
        if self._micro_batches_begun(trainer) == 1:
            self._seed_generators(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._stepping = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        _progress.end_batch(trainer, batch, batch_idx)
        self._batch_has_ended = True
        self._end_batch(trainer, before_own_hook=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before_own_hook = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._handles:  # training has begun, and this is no sanity check
            self._validated_at = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            if self._micro_batches_begun(trainer) == 0:
                self._remember(trainer)
            self._seed_generators(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _progress.count_batches_passed_over(trainer, begun=True, ended=True)
        self._batch_has_ended = self._before_own_hook = False
        if not _progress.stopped_within_epoch(trainer):
            self._remember(trainer)
        self._seed_generators(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._window_end is None:
            return
        own = checkpoint["callbacks"][self.state_key]
        own |= self._deciders.state(trainer) | {"gathered": self._window_end.gathered}
        own["averaged_epoch"] = _averages.averaged_epoch(trainer, self._averaged_epoch)
        own |= {"modes": modes_of(trainer, pl_module), "pruned": was_pruned(trainer, pl_module)}
        own["window_length"] = None if SKIP_BACKWARD.of(trainer.fit_loop) else window_length(trainer)
        epoch_loop, begun = trainer.fit_loop.epoch_loop, self._micro_batches_begun(trainer)
        own |= what_waits(trainer, begun, self._batch_has_ended, self._before_own_hook, self._validated_at)
        own["swapped"] = any(swaps.number % 2 for swaps in self._swaps)
        progress: Any = epoch_loop.batch_progress.current
        schedulers = epoch_loop.scheduler_progress.current
        updated = progress.processed == progress.ready and not SHOULD_ACCUMULATE.of(epoch_loop)()
        within_step = begun and self._stepping and not updated
        own["plateau_waits"] = self._batch_has_ended and updated and _metrics.has_plateaus_of_steps(trainer)
        own["loaders_made_in"] = LOADERS_MADE_IN.of(trainer.fit_loop)
        state, set_back = _averages.trained_state(checkpoint), False
        if within_step or schedulers.ready != schedulers.completed or _averages.an_average_lags(trainer):
            own["within_update"] = True
        elif (begun and not updated) or _progress.stopped_within_epoch(trainer):
            started = trainer.fit_loop.epoch_progress.state_dict()["current"]["started"]
            own["next_epoch_begun"] = started > self._window_end.loops["epoch_progress"]["current"]["started"]
            self._window_end.put_into(checkpoint, trainer)
            set_back = own["set_back"] = self._window_begun
            if set_back and self._unstepped:
                own["moved_unseen"] = self._unstepped.set_back(state, checkpoint["optimizer_states"])
            self._deciders.set_back(checkpoint["callbacks"], own, self._window_end)
        elif not begun:
            # The loader may have delivered a batch that has not reached the loop.
            self._window_end.put_loader_state_into(checkpoint, trainer)
        else:
            own["gathered"] = self._metrics.state(trainer)
        if self._unstepped is not None:
            own |= self._unstepped.in_no_state(state, set_back=set_back)

    def go_on(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put a run that is resumed where it was: once, when this or another callback first asks where that is."""
        if self._window_end is None or not self._resumed or self._went_on:
            return
        self._went_on, loops = True, self._window_end.loops
        batches, is_over = loops[BATCH_PROGRESS], loops[BATCH_PROGRESS]["is_last_batch"]
        put_modes(trainer, pl_module, self._loaded.get("modes"))
        put_what_is_in_no_state(pl_module, self._loaded)
        count_batches_again(trainer)
        self._deciders.see_again(trainer)
        waits, under_way = (self._loaded.get(name, False) for name in ("validation_waits", "within_validation"))
        self._validates_every = _progress.end_the_epoch_by_its_validation(trainer, waits=waits, under_way=under_way)
        epoch_ends = self._validates_every is not None
        if not epoch_ends:
            self._validates_every = _progress.keep_the_validation_that_ended(trainer)
        if is_over:
            self._metrics.see_again(trainer)
        self._refuse(trainer, self._metrics.why_refused(trainer))
        _metrics.make_the_validation_that_was_due(trainer, under_way)
        warn_of_what_has_not_run(trainer, self._loaded, epoch_ends=self._validates_every is not None)
        warn_of_an_epochs_start(trainer, batches)
        warn_of_buffers_of_other_ranks(trainer)
        # A checkpoint of the next epoch is set back to a window's start behind all that.
        if not epoch_ends and not self._loaded.get("next_epoch_begun"):
            self._refuse(trainer, self._deciders.end_the_epoch(trainer, pl_module))
        at_end = _metrics.resumes_at_an_epochs_end(trainer)
        ended = _metrics.epoch_that_ended(trainer)
        no_hook_comes = at_end and self._averaged_epoch is not None  # else the checkpoint does not know
        if (_progress.go_on_with_next_epoch(trainer) or no_hook_comes) and ended != self._averaged_epoch:
            _averages.average_the_epoch_that_ended(trainer, pl_module, ended)
            self._averaged_epoch = ended  # also where the next checkpoint is set back to this window's start
        window_before = self._loaded.get("window_length") if self._loaded_own else 0
        self._refuse(trainer, _refused_runs.why_within_a_window(batches, window_length(trainer), window_before))
        why = _restored_loaders.why_loaders_are_elsewhere(trainer, batches)
        self._refuse(trainer, why, strict=self.strict and not self._brought)
        _restored_loaders.warn_of_draws(trainer, batches)
        _restored_loaders.warn_of_validation_orders(trainer)
        next_epoch = loops["epoch_progress"]["current"]["started"] if is_over else None
        self._turns_to_next_epoch = _restored_loaders.restore_loaders(trainer, next_epoch)
        if not epoch_ends:  # else they stand at the next epoch, which counts them when it begins
            count_batches_again(trainer)  # of loaders whose states Lightning had not loaded
        _restored_loaders.make_loaders_again_when_due(trainer, self._loaded.get("loaders_made_in"), batches)
        _averages.begin_averaging_again(trainer, pl_module)
        refuse_an_epoch_that_ranks_cannot_share(trainer)
        self._deciders.end_a_run_that_was_stopped(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks(pl_module)
        RESUMING.put(trainer.fit_loop, False)  # else a second fit goes on with iterators of this one

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resumed and not self._went_on:
            self._refuse(trainer, _refused_runs.why_its_epoch_is_none_of_this_run(trainer))
            put_modes(trainer, pl_module, self._loaded.get("modes"))
            put_what_is_in_no_state(pl_module, self._loaded)
            if not _progress.leave_an_epoch_without_batches(trainer):
                RESUMING.put(trainer.fit_loop, False)  # as in on_train_end, which was not called
            warn_of_what_has_not_run(trainer, self._loaded, epoch_ends=False)
            _averages.end_a_run_that_was_over(trainer, pl_module, self._averaged_epoch)
            if self._seed is not None:
                self._seed_generators(trainer)  # where the run left them: a second fit draws on

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hooks(pl_module)
        if trainer.validating or trainer.sanity_checking:
            MODULE_MODE.of(trainer.fit_loop.epoch_loop.val_loop).restore(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "within_update": False,
            "since_ranks": self._since_ranks,
            "averaged_epoch": self._averaged_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seed = state_dict["seed"]
        self._averaged_epoch = state_dict.get("averaged_epoch")
        self._deciders = _metrics.Deciders(state_dict)
        self._loaded = state_dict

    # ------------------------------------------------------------------------------------------------- helpers

    def _forget(self) -> None:
        self._seed = self._window_end = self._since_ranks = self._averaged_epoch = self._unstepped = None
        self._deciders, self._metrics = _metrics.Deciders(), _metrics.EpochMetrics()
        self._loaded, self._validated_at, self._validates_every = {}, -1, None
        self._loaded_own = self._resumed = self._went_on = self._turns_to_next_epoch = False
        self._stepping = self._window_begun = self._batch_has_ended = self._before_own_hook = False

    def _remove_hooks(self, pl_module: LightningModule) -> None:
        if self._unstepped:
            self._unstepped.leave()
        self._replaced.close()
        for handle in self._handles:
            handle.remove()
        for swaps in self._swaps:
            swaps.end(pl_module)
        self._deciders.leave()
        self._handles, self._swaps = [], []

    def _begin_training(self, trainer: Trainer) -> None:
        self._seed_generators(trainer)
        _restored_loaders.draw_the_epochs_order_again(trainer)

    def _begin_epoch(self, trainer: Trainer) -> None:
        self._seed_generators(trainer)
        _restored_loaders.turn_to_the_next_epoch(trainer, self._turns_to_next_epoch)
        self._turns_to_next_epoch = False

    def _begin_batch(self) -> None:
        if not self._window_begun and self._unstepped is not None:  # behind all that the module's own hooks did
            self._unstepped.keep()
            self._window_begun = True

    def _begin_step(self, trainer: Trainer, optimizer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        refuse_what_ddp_never_reduces([trainer.model])
        # Lightning's closure makes the forward and the backward pass, ahead of on_before_optimizer_step.
        makes_a_pass_first = len(given) > 1 or named.get("closure") is not None
        self._stepping |= not makes_a_pass_first or isinstance(optimizer, LBFGS)
        return _refused_runs.evaluated_once(trainer, given, named)

    def _end_batch(self, trainer: Trainer, before_own_hook: bool) -> None:
        self._before_own_hook = before_own_hook
        self._metrics.gather_on(trainer)
        if not SHOULD_ACCUMULATE.of(trainer.fit_loop.epoch_loop)():
            self._remember(trainer)
            self._seed_generators(trainer)

    def _remember(self, trainer: Trainer) -> None:
        self._stepping, self._window_begun = False, False
        gathered, stop_waits = self._metrics.state(trainer), _metrics.a_stop_waits(trainer)
        self._window_end = WindowEnd.now(trainer, gathered=gathered, stop_waits=stop_waits)

    def _micro_batches_begun(self, trainer: Trainer) -> int:
        """Since the last window ended."""
        assert self._window_end is not None
        return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready - self._window_end.micro_batches)

    def _seed_generators(self, trainer: Trainer) -> None:
        if self.reseed:
            micro_batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            assert self._seed is not None
            seed_generators(self._seed, micro_batches, trainer.global_rank)

    def _refuse(self, trainer: Trainer, why: str, strict: bool | None = None) -> None:
        if why and (self.strict if strict is None else strict):
            _replaced_methods.save_nothing_for_the_exception(trainer)
            raise CheckpointError(why)
        if why:
            rank_zero_warn(why)
