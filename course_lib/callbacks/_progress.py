"""What a Trainer counts, put right: batches that were passed over, an epoch that ended, one that has no batches."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage

from course_lib._lightning import (
    BATCHES_THAT_STEPPED,
    DATA_FETCHER,
    EVALUATION_STAGE,
    LAST_BATCH_REACHED,
    RESTARTING,
    SKIP_BACKWARD,
    VALIDATION_IS_DUE,
)


def make_no_step_in_averaging_epoch(trainer: Trainer) -> None:
    """In the epoch that StochasticWeightAveraging adds for BatchNorm's statistics; before each of its micro-batches.

    No backward runs there. Lightning 2.6 steps all the same, at the epoch's last batch, with the gradient of the last
    step that was made, and so moves the averaged weights.
    """
    if SKIP_BACKWARD.of(trainer.fit_loop):
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False
        # One window, and a batch longer than the epoch; a GradientAccumulationScheduler has made shorter ones.
        trainer.accumulate_grad_batches = int(trainer.fit_loop.max_batches)


def count_batches_passed_over(trainer: Trainer, *, begun: bool, ended: bool) -> None:
    """Count a batch that was passed over as begun and ended; ``begun`` and ``ended`` say it of the one read last.

    Where ``on_train_batch_start`` returns -1, or a ``collate_fn`` None, Lightning counts the batch as read alone, and
    from then on takes checkpoints for those of other moments than they were saved at.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        counts.started = counts.processed = counts.ready - (not begun)
        counts.completed = counts.ready - (not ended)


def end_batch(trainer: Trainer, batch: Any, batch_idx: int) -> None:
    """Count those that were passed over; and clear the gradients where a window begins with a batch of ``None``.

    Lightning clears them within a window's first training step: here the last window's would be added to this one's.
    """
    count_batches_passed_over(trainer, begun=True, ended=False)
    if batch is None and batch_idx % trainer.accumulate_grad_batches == 0:
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()


def stopped_within_epoch(trainer: Trainer) -> bool:
    """Whether the run was told to stop there, by a callback or ``max_steps``."""
    # At a stop that a callback or max_steps asked for, a Trainer counts the epoch as run, and would leave out the rest.
    fit_loop = trainer.fit_loop
    progress: Any = fit_loop.epoch_progress.current
    return progress.processed == progress.started and not LAST_BATCH_REACHED.of(fit_loop.epoch_loop)()


def go_on_with_next_epoch(trainer: Trainer) -> bool:
    """Where an epoch has ended; returns whether it was saved in the hook of its last batch, without that end."""
    # A checkpoint of an epoch's end: with max_epochs, a Trainer goes on with the next epoch. With max_steps, it takes
    # the run for one that was stopped within the epoch, and trains the first batches of it again.
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    last_batch_ended = epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch
    counted: Any = fit_loop.epoch_progress
    for counts in (counted.total, counted.current):
        # Saved behind all that an epoch's end does, as for a SIGTERM: Lightning counts that end once more.
        counts.completed = min(counts.completed, counts.processed)
    between_epochs = counted.current.completed == counted.current.ready and not fit_loop.restarted_on_epoch_start
    behind_its_end = between_epochs and epoch_loop.batch_progress.is_last_batch
    without_its_end = fit_loop.restarted_mid_epoch and last_batch_ended
    if without_its_end:
        # Saved in the last batch's hook: Lightning begins the next epoch without counting it, and a checkpoint that is
        # taken in it would begin it again. It asks whether the epoch that ended had as many batches as the next one,
        # which may have more of them, on fewer ranks or in the epoch that StochasticWeightAveraging adds; and it looks
        # for a validation that was passed, which draws.
        fit_loop.reset_restart_stage()
        RESTARTING.put(fit_loop, False)
        epoch_loop.batch_progress.increment_completed()
        BATCHES_THAT_STEPPED.put(epoch_loop, BATCHES_THAT_STEPPED.of(epoch_loop) + 1)
        epoch_loop.restarting = False
        epoch_loop.reset_restart_stage()
    if fit_loop.restarted_on_epoch_start:
        # Saved before an epoch's first batch: Lightning takes the counts of the one that ended for those of this one.
        # And it does not count this one as begun: a checkpoint that is saved here again would be that of no epoch.
        progress: Any = fit_loop.epoch_progress.current
        progress.ready = progress.completed + 1
        epoch_loop.restarting = False
        epoch_loop.reset_restart_stage()
    if fit_loop.restarted_on_epoch_end or behind_its_end:
        if not behind_its_end:
            fit_loop.epoch_progress.increment_completed()
        RESTARTING.put(fit_loop, False)
        fit_loop.epoch_loop.restarting = False
        fit_loop.reset_restart_stage()
        fit_loop.epoch_loop.reset_restart_stage()
    return without_its_end


def end_the_epoch_by_its_validation(trainer: Trainer, *, waits: bool, under_way: bool) -> float | None:
    """Have the validation and the end of an epoch come that a checkpoint has all batches of, and neither of the two.

    Lightning takes that epoch for one that has ended, or its validation for one that was made. The checkpoint says
    whether the validation ``waits`` or was ``under_way``.

    Returns:
        Where the checkpoint is such a one, the ``val_check_batch`` that the Trainer has from the next epoch on.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    in_the_batchs_hook, every = epoch_loop.restarted_on_train_batch_end, trainer.val_check_batch
    behind_the_last = epoch_loop.batch_progress.is_last_batch and (in_the_batchs_hook or under_way)
    if not (fit_loop.restarted_mid_epoch and behind_the_last) or every is None:  # None: validations go by the clock
        return None
    progress: Any = fit_loop.epoch_progress
    as_lightning_counts = progress.state_dict()
    if in_the_batchs_hook:
        for counts in (progress.total, progress.current):
            counts.processed -= 1
        progress.total.completed -= 1
        progress.current.completed = progress.current.processed
    if (waits or under_way) and every != math.inf:  # on other ranks this epoch had another number of batches
        _have_a_validation_due(trainer)
    if not VALIDATION_IS_DUE.of(epoch_loop)(DATA_FETCHER.of(fit_loop)):
        trainer.val_check_batch = every
        progress.load_state_dict(as_lightning_counts)
        return None
    batches: Any = epoch_loop.batch_progress
    for counts in (batches.total, batches.current):
        counts.completed = counts.processed
    epoch_loop.reset_restart_stage()
    RESTARTING.put(fit_loop, False)  # else schedules by the epoch are not stepped at its end
    BATCHES_THAT_STEPPED.put(epoch_loop, BATCHES_THAT_STEPPED.of(epoch_loop) - 1)  # counted behind the validation
    EVALUATION_STAGE.put(epoch_loop.val_loop, RestartStage.RESTARTED_MID_EVALUATION)
    epoch_loop.val_loop.batch_progress.reset_on_run()
    return every


def keep_the_validation_that_ended(trainer: Trainer) -> float | None:
    """Where a checkpoint was saved behind the validation at an epoch's end: let Lightning find that validation again.

    It asks whether one is due behind the batches that were read. By the next epoch's ``val_check_batch`` (a share of
    more batches) it may not be; then Lightning would train batches of the epoch that has had all of them.

    Returns:
        Where the checkpoint is such a one, the ``val_check_batch`` that the Trainer has from the next epoch on.
    """
    epoch_loop, every = trainer.fit_loop.epoch_loop, trainer.val_check_batch
    ended = epoch_loop.batch_progress.is_last_batch and not epoch_loop.restarted_on_train_batch_end
    over = trainer.fit_loop.restarted_mid_epoch and ended
    if not over or every is None:  # None: validations go by the clock
        return None
    if every != math.inf:
        _have_a_validation_due(trainer)
    return every


def _have_a_validation_due(trainer: Trainer) -> None:
    epoch_loop, over_epochs = trainer.fit_loop.epoch_loop, trainer.check_val_every_n_epoch is None
    trainer.val_check_batch = 1 + (epoch_loop.total_batch_idx if over_epochs else epoch_loop.batch_idx)


def validate_as_before(trainer: Trainer, every: float) -> None:
    """Behind the two that gave ``every``; the next epoch has a length of its own."""
    if SKIP_BACKWARD.of(trainer.fit_loop) or not count_batches_between_validations(trainer):
        trainer.val_check_batch = every


def count_batches_between_validations(trainer: Trainer) -> bool:
    """Where they are a share of the epoch's batches; returns whether they are."""
    batches, share = trainer.fit_loop.max_batches, trainer.val_check_interval
    if not isinstance(share, float) or batches == math.inf:
        return False
    trainer.val_check_batch = max(1, int(batches * share))
    return True


def leave_an_epoch_without_batches(trainer: Trainer) -> bool:
    """Where a run was over when it was resumed; returns whether its checkpoint had begun an epoch without a batch.

    A second fit would take that epoch for one that is done, or for one that has had the batches of the epoch before.
    """
    fit_loop = trainer.fit_loop
    progress: Any = fit_loop.epoch_progress
    if fit_loop.epoch_loop.batch_progress.current.ready and progress.current.started >= progress.current.ready:
        return False
    for counts in (progress.total, progress.current):
        counts.ready = counts.started = counts.processed
    fit_loop.restarting = False  # with the loops in it
    return True


def count_the_last_epoch_as_ended(trainer: Trainer) -> None:
    """For a run that ends within an epoch: at a run's end, StochasticWeightAveraging asks which epoch has ended."""
    epochs = trainer.fit_loop.epoch_progress
    progress: Any = epochs.current
    if progress.processed < progress.started:
        epochs.increment_processed()
        epochs.increment_completed()
