"""A run that goes on with another number of ranks: its epochs counted again, and what it had done before.

A Trainer counts a loader's batches once: before it restores the loader, and for all epochs. In a run that goes on
*within* an epoch on other ranks both are wrong: that epoch has a length of its own, and the next ones have another. The
rule: *count again when the loader is restored, and in every epoch.*
"""

from __future__ import annotations

import copy
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from course_lib._lightning import COMBINED_LOADER, DATA_FETCHER, SKIP_BACKWARD, count_limited, loaded_checkpoint
from course_lib.callbacks._progress import count_batches_between_validations
from course_lib.callbacks._replaced_methods import save_nothing_for_the_exception
from course_lib.resume import COUNTED_AGAIN, ResumableDataLoader
from course_lib.samplers import EpochBatchSampler


def run_so_far(trainer: Trainer) -> dict[str, int]:
    """What a run had done when it came to the ranks that it has now: for ``plan_steps``, in ``configure_optimizers``.

    The schedules in a checkpoint come back with the horizon that they were made with. On another number of ranks it is
    wrong: the rate ends too high, or turns up again. A function of the plan's progress is not saved, and goes on::

        plan = plan_steps(n, 32, world_size=self.trainer.world_size, max_epochs=10, **run_so_far(self.trainer))
        schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * plan.progress(step))))

    A run that goes on with as many ranks gets the plan that it had.

    Returns:
        ``steps_done``: updates, as the learning rate counts them, and ``samples_done``; both 0 in a run from its start,
        and in one that has had its number of ranks from the start (told by ``ExactResume``, in the checkpoint).

    Raises:
        ValueError: The checkpoint does not say where the training loader was, or not in samples.
    """
    checkpoint = loaded_checkpoint(trainer)
    if not checkpoint:
        return {"steps_done": 0, "samples_done": 0}
    since = since_ranks(checkpoint, trainer.world_size)
    if since is None:
        raise ValueError(
            "the checkpoint does not say how far the run is in the data: it does not hold the state of one "
            "ResumableDataLoader over all samples. Give plan_steps steps_done and samples_done yourself"
        )
    return {"steps_done": since["steps_done"], "samples_done": since["samples_done"]}


def say_that_batches_are_counted_again(checkpoint: dict[str, Any]) -> None:
    """Have a resumable loader take its state from this checkpoint on other ranks, which it would refuse."""
    for state in checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []):
        if isinstance(state, dict) and "position" in state:  # others refuse a key that they do not know
            state[COUNTED_AGAIN] = True


def warn_of_buffers_of_other_ranks(trainer: Trainer) -> None:
    """Where each rank of a resumed run had buffers of its own: a checkpoint holds those of the first one."""
    model = trainer.model
    if (
        isinstance(model, DistributedDataParallel)
        and not model.broadcast_buffers
        and any(True for _ in model.buffers())
    ):
        rank_zero_warn(
            "with broadcast_buffers=False each rank has buffers of its own (BatchNorm's statistics), of which this "
            "checkpoint holds those of the first rank: the others go on with these, so that what they validate by them "
            "is something else for a while. Leave that flag out, and all ranks have those of the first one"
        )


def count_batches_again(trainer: Any) -> None:
    """Give a Trainer the number of batches that its training loaders have in the epoch at which they stand now."""
    fit_loop = trainer.fit_loop
    combined = COMBINED_LOADER.of(fit_loop)
    lengths: list[Any] = [sized_len(loader) for loader in combined.flattened]
    if None in lengths or not any(isinstance(loader, ResumableDataLoader) for loader in combined.flattened):
        return
    limits = [count_limited(length, trainer.limit_train_batches) for length in lengths]
    averaging = SKIP_BACKWARD.of(fit_loop)  # there Lightning counts one batch more, and one window for all
    if limits == combined.limits and fit_loop.max_batches - averaging in limits:
        return
    combined.limits = limits
    iter(DATA_FETCHER.of(fit_loop))  # counts, and a resumable loader fetches nothing before its first batch is wanted
    fit_loop.max_batches = sized_len(combined)
    count_batches_between_validations(trainer)
    if averaging:
        fit_loop.max_batches += 1
        trainer.accumulate_grad_batches = fit_loop.max_batches


def refuse_an_epoch_that_ranks_cannot_share(trainer: Trainer) -> None:
    """The rest of an epoch may divide where the next one does not; ask now, and not when it comes.

    Raises:
        ValueError: The sampler's own, with the other tails.
    """
    if trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs:
        return
    for loader in COMBINED_LOADER.of(trainer.fit_loop).flattened:
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(loader, ResumableDataLoader) and isinstance(sampler, EpochBatchSampler):
            later = copy.copy(sampler)
            later.set_epoch(sampler.epoch + 1)
            try:
                iter(later)  # it judges, and deals nothing before its first batch is asked for
            except ValueError:
                save_nothing_for_the_exception(trainer)
                raise


def since_ranks(checkpoint: dict[str, Any], world_size: int) -> dict[str, int] | None:
    """The ranks, and what was done before the run came to them; None: the loader's state does not say it."""
    # Callbacks and loaders of others keep what they like: a list is a state as well.
    callbacks = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    for callback in callbacks:
        since = callback.get("since_ranks")
        if since and since["world_size"] == world_size:
            return dict(since)
    states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
    if len(states) != 1 or not isinstance(states[0], dict):
        return None
    num_samples = states[0].get("num_samples", states[0].get("num_primary"))
    if num_samples is None:
        return None
    steps = checkpoint["global_step"]
    for callback in callbacks:
        if callback.get("uncounted_attempts") == 0 and "attempts" in callback:  # else global_step counts updates
            steps -= callback["attempts"] - callback["updates"]
    samples = states[0]["epoch"] * num_samples + states[0]["position"]
    return {"world_size": world_size, "steps_done": steps, "samples_done": samples}
