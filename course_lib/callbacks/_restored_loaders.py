"""The loaders of a run that is resumed: put where those of a run that was not stopped would be, or refused."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset

from course_lib._generators import held_by
from course_lib._lightning import COMBINED_LOADER, DATA_FETCHER, LOADERS_MADE_IN, STATES_TO_LOAD
from course_lib._words import counted
from course_lib.callbacks._drawn_orders import draws_as_it_is_iterated, order_in_no_state
from course_lib.loader import MiniDataLoader
from course_lib.resume import ResumableDataLoader
from course_lib.schedules.sampler import ScheduledBatchSampler


def restore_loaders(trainer: Trainer, next_epoch: int | None) -> bool:
    """Put loaders where those of a Trainer that was not stopped would be; where an epoch has ended, at the next one.

    Lightning loads no states where it takes an epoch for one that has not begun, or that is over, or where a module has
    asked for ``estimated_stepping_batches``: for that it makes the loaders before it knows their states. And it ends an
    epoch by its own count: a loader that is restored there has the epoch's (empty) rest to deliver, and Lightning would
    take that for the next epoch.

    Returns:
        Whether the iterators that Lightning has made are of the epoch that ended.
    """
    fit_loop = trainer.fit_loop
    loaders = COMBINED_LOADER.of(fit_loop).flattened
    stateful = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
    not_loaded = list(zip(stateful, STATES_TO_LOAD.of(fit_loop), strict=False))
    STATES_TO_LOAD.put(fit_loop, [])  # a second fit begins an epoch of its own
    own = [loader for loader in stateful if isinstance(loader, MiniDataLoader | ResumableDataLoader)]
    for loader, state in not_loaded:
        if next_epoch is None or not isinstance(loader, ResumableDataLoader):
            loader.load_state_dict(state)
        if next_epoch is not None and loader not in own:
            iter(loader)  # over what is left of the epoch that ended: what torchdata's loader draws next follows
    counting = [loader for loader in own if isinstance(loader, MiniDataLoader)]
    if next_epoch is not None:
        for loader in own:
            if isinstance(loader, ResumableDataLoader):
                loader.set_epoch(next_epoch)  # its state may be within an epoch that limit_train_batches has ended
        left = [loader.leave_epoch() for loader in counting]
        # A loader without a state draws its next order when it is iterated, which was before this run's seeds; and one
        # that is not ours was iterated over what its state left of the epoch that ended.
        return any(left) or len(loaders) > len(own)
    if not_loaded:
        iter(DATA_FETCHER.of(fit_loop))
    return False


def draw_the_epochs_order_again(trainer: Trainer) -> None:
    """Iterate the loaders of an epoch that had begun, and had delivered nothing, once the generators have been seeded.

    Lightning has iterated them before that, and calls no hook at this epoch's start: it was called before the save.
    """
    fit_loop = trainer.fit_loop
    if fit_loop.restarted_mid_epoch and trainer.current_epoch and not fit_loop.epoch_loop.batch_progress.current.ready:
        iter(DATA_FETCHER.of(fit_loop))


def turn_to_the_next_epoch(trainer: Trainer, has_ended: bool) -> None:
    """In a run that is resumed, where the iterators that Lightning has made are of an epoch that has ended."""
    if has_ended and trainer.fit_loop.is_resuming:
        iter(DATA_FETCHER.of(trainer.fit_loop))


def make_loaders_again_when_due(trainer: Any, made_in: int | None, progress: dict[str, Any]) -> None:
    """Count ``reload_dataloaders_every_n_epochs`` from the epoch in which a checkpoint's loaders were made."""
    fit_loop, epoch = trainer.fit_loop, trainer.current_epoch
    if made_in is None or not trainer.reload_dataloaders_every_n_epochs:
        return
    due_later = 0 < epoch - made_in < trainer.reload_dataloaders_every_n_epochs
    if due_later or LOADERS_MADE_IN.of(fit_loop) < epoch:  # made now, for the end of the epoch before
        LOADERS_MADE_IN.put(fit_loop, made_in)
    samplers = [getattr(loader, "batch_sampler", None) for loader in COMBINED_LOADER.of(fit_loop).flattened]
    follow_a_schedule = all(isinstance(sampler, ScheduledBatchSampler) for sampler in samplers)  # and draw nothing
    if due_later or (epoch and _is_within_an_epoch(progress) and not follow_a_schedule):
        rank_zero_warn(
            f"the loaders of epoch {epoch} had been made in epoch {made_in}, and are made again now: "
            "train_dataloader() must give the same as then (by a seed of its own, or by the epoch, and not by the "
            "global generators), and what it gives in later epochs comes when it was due"
        )


def _is_within_an_epoch(progress: dict[str, Any]) -> bool:
    return bool(progress["current"]["ready"]) and not progress["is_last_batch"]


def warn_of_draws(trainer: Trainer, progress: dict[str, Any]) -> None:
    """Where what samples draw at random is in no checkpoint: in workers that went on, or ahead of this run's seeds."""
    within_epoch = _is_within_an_epoch(progress)
    for loader in COMBINED_LOADER.of(trainer.fit_loop).flattened:
        if isinstance(loader, ResumableDataLoader):
            continue
        cure = "take a course_lib.resume.ResumableDataLoader"
        if getattr(loader, "num_workers", 0) and (within_epoch or getattr(loader, "persistent_workers", False)):
            why = "its workers' generators went on from batch to batch, and are in no checkpoint"
        elif within_epoch and _reads_a_stream_again(loader):
            why = "its stream is read again up to where it was, and draws its order, too, from other seeds"
            cure = "seed it in __iter__, by the epoch, or resume from a checkpoint of an epoch's end"
        elif sized_len(loader) is None:
            why = "Lightning fetches the first batch of a loader without a length ahead of this run's seeds"
        else:
            continue
        rank_zero_warn(
            f"what the samples of a {type(loader).__name__} draw at random (an augmentation) is not what they would "
            f"have drawn if this run had not been stopped: {why}. Where they draw nothing, all is well; else {cure}"
        )


def _reads_a_stream_again(loader: Any) -> bool:
    stream = getattr(loader, "dataset", None)
    is_passed_over = hasattr(loader, "load_state_dict") and not hasattr(stream, "load_state_dict")
    return isinstance(stream, IterableDataset) and is_passed_over


def warn_of_validation_orders(trainer: Any) -> None:
    """Of validations whose order comes from a generator, which is in no checkpoint."""
    validations = COMBINED_LOADER.of_set(trainer.fit_loop.epoch_loop.val_loop, None)
    for loader in () if validations is None or not trainer.current_epoch else validations.flattened:
        if not _knows_its_order(loader) and held_by(*_samplers_of(loader)):
            rank_zero_warn(
                f"the order of a {type(loader).__name__} that is validated comes from a generator of its own, which is "
                "in no checkpoint: it is another one now, and where limit_val_batches cuts it, so are the samples. "
                "Leave generator= out, or do not shuffle it"
            )


def _knows_its_order(loader: Any) -> bool:
    return isinstance(loader, ResumableDataLoader) or hasattr(getattr(loader, "batch_sampler", None), "load_state_dict")


def _samplers_of(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(part): part for part in parts if part is not None}.values())


def why_loaders_are_elsewhere(trainer: Trainer, progress: dict[str, Any]) -> str:
    """Why loaders that have no state begin with other batches than those that come next in a checkpoint, or ``""``."""
    loaders = COMBINED_LOADER.of(trainer.fit_loop).flattened
    forgetful = [loader for loader in loaders if not hasattr(loader, "load_state_dict")]
    names, done = ", ".join(type(loader).__name__ for loader in forgetful), progress["current"]["ready"]
    own = [loader for loader in loaders if loader in forgetful or isinstance(loader, MiniDataLoader)]
    drawing = [loader for loader in own if _draws_by_a_generator_of_its_own(loader)]
    if drawing and trainer.current_epoch:
        return (
            f"the order of a {type(drawing[0]).__name__} comes from a generator of its own, which is in no checkpoint: "
            "it begins with the orders of the first epochs again. Draw it from the global generators, which are seeded "
            "here (without generator=), or take a course_lib.resume.ResumableDataLoader"
        )
    for loader in loaders:
        if loader in own or _knows_its_order(loader):
            continue
        if what := order_in_no_state(loader, within_epoch=not progress["is_last_batch"]):
            return (
                f"the order of a {type(loader).__name__} comes from {what}, and so it is in no checkpoint: another one "
                "would come, with some samples twice and others never. Give it a sampler with a state (torchdata's "
                "shuffle=True without generator= has one), or take a course_lib.resume.ResumableDataLoader; or, if the "
                "loader's own state holds the order all the same, ExactResume(strict=False)"
            )
    if progress["is_last_batch"]:
        return ""
    saved_within = f"this checkpoint was saved within an epoch, after {counted(done, 'batch', 'batches')}"
    read_ahead = [loader for loader in loaders if loader not in forgetful and sized_len(loader) is None]
    if read_ahead:
        return (
            f"{saved_within} of a {type(read_ahead[0]).__name__} without a length: Lightning fetches a batch ahead of "
            "it, and the saved state counts that one as trained. Give the loader a __len__, take a "
            "course_lib.resume.ResumableDataLoader, or resume from a checkpoint of an epoch's end"
        )
    if not forgetful:
        return ""
    if done:
        return (
            f"{saved_within}, and a {names} does not know where it was: it begins the epoch's batches again and leaves "
            "out as many at the end. Take a course_lib.resume.ResumableDataLoader, or resume from a checkpoint of an "
            "epoch's end"
        )
    if any(getattr(loader, "num_workers", 0) for loader in forgetful):
        return (
            f"this checkpoint was saved ahead of the run's first batch, and a {names} with workers had drawn its "
            "order, and its workers' seeds, by then: they are others now. Nothing is trained yet: begin without a "
            "checkpoint. Or take a course_lib.resume.ResumableDataLoader, which knows its order"
        )
    if trainer.current_epoch:  # its order is drawn again behind the seeds
        return ""
    at_once = [loader for loader in forgetful if draws_as_it_is_iterated(loader)]
    if at_once:
        return (
            f"this checkpoint was saved ahead of the run's first batch, and a {type(at_once[0]).__name__} had drawn "
            "its order by then: it draws all at once when it is iterated, which is ahead of this run's seeds, so the "
            "order is another one now. Nothing is trained yet: begin without a checkpoint. Or draw the order with the "
            "first index (by yield, in __iter__), or take a course_lib.resume.ResumableDataLoader"
        )
    return ""


def _draws_by_a_generator_of_its_own(loader: Any) -> bool:
    known = [loader.order_generator] if isinstance(loader, MiniDataLoader) else []
    return not _knows_its_order(loader) and any(one not in known for one in held_by(*_samplers_of(loader)))
