"""A Trainer put at the clean point of a checkpoint: its loops, its loaders, what is still to come; or why it cannot.

Lightning reads from its counters where a checkpoint was saved, and passes over what was to come next. Here a checkpoint
says it: behind which batch or epoch it was, and whether a validation waits.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import RestartStage
from torch.utils.data import DataLoader, IterableDataset

from course_lib._lightning import (
    COMBINED_LOADER,
    DATA_FETCHER,
    EVALUATION_STAGE,
    RESTARTING,
    RESUMING,
    STATES_TO_LOAD,
    VALIDATION_IS_DUE,
    count_limited,
)
from course_lib._words import counted
from course_lib.callbacks._clean_point import BATCHES, EPOCHS
from course_lib.callbacks._trainer import accumulation_by_epoch, callbacks_of_kind
from course_lib.resume import COUNTED_AGAIN, ResumableDataLoader


def put_loops(trainer: Trainer, *, between_epochs: bool, validation_waits: bool) -> None:
    """Have the loops make next what comes behind a clean point."""
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    RESTARTING.put(fit_loop, False)  # else an epoch that is resumed within does not step its ReduceLROnPlateau
    epoch_loop.val_loop.restarting = False  # a validation is made whole
    if between_epochs:
        epoch_loop.restarting = False
        RESUMING.put(fit_loop, False)  # the epoch's order is drawn when it begins, behind our seeds
        fit_loop.reset_restart_stage()
        return
    if validation_waits:
        EVALUATION_STAGE.put(epoch_loop.val_loop, RestartStage.RESTARTED_MID_EVALUATION)
    # At an epoch's end the loop takes a validation that is due and does not wait for one that has been made.
    stays = validation_waits or epoch_loop.batch_progress.is_last_batch
    VALIDATION_IS_DUE.put(epoch_loop, lambda _: stays)


def ask_the_loops_again(trainer: Trainer) -> None:
    """Whether a validation is due: from the first batch on, the loop says it itself."""
    vars(trainer.fit_loop.epoch_loop).pop(VALIDATION_IS_DUE.name, None)


def validation_is_due(trainer: Trainer) -> bool:
    """Behind this batch, and not only because the run has been told to stop."""
    told, trainer.should_stop = trainer.should_stop, False
    try:
        return bool(VALIDATION_IS_DUE.of(trainer.fit_loop.epoch_loop)(DATA_FETCHER.of(trainer.fit_loop)))
    finally:
        trainer.should_stop = told


def why_loaders_are_elsewhere(trainer: Trainer, *, is_over: bool) -> str:
    """Why a training loader does not go on behind the batches of the clean point, or ``""``.

    ``is_over``: whether these are all of their epoch.
    """
    loaders = COMBINED_LOADER.of(trainer.fit_loop).flattened
    for loader in loaders:
        if not _order_is_known(loader):
            return (
                f"the order of a {type(loader).__name__} comes from a generator of its own, or from a sampler without "
                "a state, and so it is in no checkpoint: another one would come, with some samples twice. Take a "
                "course_lib.resume.ResumableDataLoader; at an epoch's end, DataLoader(shuffle=True) without a "
                "generator will do"
            )
    if is_over:
        return ""
    done = counted(trainer.fit_loop.epoch_loop.batch_progress.current.ready, "batch", "batches")
    for loader in loaders:
        if hasattr(loader, "load_state_dict") and sized_len(loader) is not None:
            continue
        what = "does not know where it was" if sized_len(loader) is not None else "has no length, and is read ahead"
        return (
            f"this checkpoint was saved within an epoch, after {done}, and a {type(loader).__name__} {what}: some "
            "samples would come twice, or never. Take a course_lib.resume.ResumableDataLoader, or resume from a "
            "checkpoint of an epoch's end"
        )
    return ""


def _order_is_known(loader: Any) -> bool:
    """Whether it is in a state, or a function of the epoch, or drawn from the global generators as an epoch begins."""
    if isinstance(loader, ResumableDataLoader) or not isinstance(loader, DataLoader):
        return hasattr(loader, "load_state_dict")
    batches, sampler = loader.batch_sampler, loader.sampler
    if isinstance(loader.dataset, IterableDataset) or any(
        hasattr(part, "set_epoch") or hasattr(part, "load_state_dict") for part in (batches, sampler)
    ):
        return True
    if loader.generator is not None or getattr(sampler, "generator", None) is not None:
        return False
    parts = [type(part).__module__ for part in (batches, sampler) if part is not None]
    return all(module.startswith(("torch.utils.data.", "torchdata.")) for module in parts)


def put_loaders(trainer: Trainer, *, between_epochs: bool, is_over: bool) -> None:
    """Where an epoch's batches have all been read, at the next epoch; else behind those of the clean point."""
    fit_loop = trainer.fit_loop
    stateful = [one for one in COMBINED_LOADER.of(fit_loop).flattened if hasattr(one, "load_state_dict")]
    # Lightning loads no states between epochs, nor where the module has asked for the number of batches before.
    not_loaded = list(zip(stateful, STATES_TO_LOAD.of(fit_loop), strict=False))
    STATES_TO_LOAD.put(fit_loop, [])
    for loader, state in not_loaded:
        if not (is_over and isinstance(loader, ResumableDataLoader)):
            loader.load_state_dict(state)
            if is_over:
                iter(loader)  # over what is left of the epoch that ended: nothing
    for loader in stateful if is_over else ():
        if isinstance(loader, ResumableDataLoader):
            loader.set_epoch(trainer.current_epoch + (not between_epochs))
    count_batches_again(trainer)
    if not_loaded and not is_over:
        iter(DATA_FETCHER.of(fit_loop))


def say_that_batches_are_counted_again(checkpoint: dict[str, Any]) -> None:
    """Have a resumable loader take its state from this checkpoint on other ranks, which it would refuse."""
    for state in checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []):
        if isinstance(state, dict) and "position" in state:  # others refuse a key that they do not know
            state[COUNTED_AGAIN] = True


def count_batches_again(trainer: Any) -> None:
    """Give a Trainer the number of batches that its training loaders have in the epoch at which they stand now.

    It counts once, before it restores a loader, and for all epochs. On other ranks the rest of an epoch has another
    length, and the next ones have a third.
    """
    fit_loop = trainer.fit_loop
    combined = COMBINED_LOADER.of(fit_loop)
    lengths: list[Any] = [sized_len(loader) for loader in combined.flattened]
    if None in lengths or not any(isinstance(loader, ResumableDataLoader) for loader in combined.flattened):
        return
    limits = [count_limited(length, trainer.limit_train_batches) for length in lengths]
    if limits == combined.limits and fit_loop.max_batches in limits:
        return
    combined.limits = limits
    iter(DATA_FETCHER.of(fit_loop))  # counts, and a resumable loader fetches nothing before its first batch is wanted
    fit_loop.max_batches = sized_len(combined)
    if isinstance(trainer.val_check_interval, float) and fit_loop.max_batches != float("inf"):
        trainer.val_check_batch = max(1, int(fit_loop.max_batches * trainer.val_check_interval))


def why_refused(trainer: Trainer, own: dict[str, Any] | None, loops: dict[str, Any]) -> str:
    """Why a checkpoint that says ``own`` of its clean point is not one to go on from, or ``""``."""
    if own is None:
        return (
            "this checkpoint was saved ahead of the first step of its run, where no clean point is: begin as that run "
            "did"
        )
    if own["within_update"]:
        return (
            "this checkpoint was saved in the middle of an update, by an exception or by a hook: some parameters have "
            "moved, and what follows had not been done. Resume from an older one"
        )
    if own["between_epochs"]:
        return ""
    started, last = loops[EPOCHS]["current"]["started"], trainer.max_epochs
    if last not in (None, -1) and started > last:
        return (
            f"this checkpoint was saved within epoch {started - 1}, and Trainer(max_epochs={last}) ends ahead of it: "
            f"nothing would be trained. Take max_epochs={started} or more to go on from it"
        )
    k, done, before = trainer.accumulate_grad_batches, loops[BATCHES]["current"]["ready"], own["windows"]
    if done % k and before != k and not loops[BATCHES]["is_last_batch"] and accumulation_by_epoch(trainer) is None:
        return (
            f"this checkpoint was saved within an epoch, after {counted(done, 'batch', 'batches')}, in windows of "
            f"{before}: with accumulate_grad_batches={k} the first window would be cut short. Resume it with "
            f"accumulate_grad_batches={before}, or from a checkpoint of an epoch's end"
        )
    return ""


def why_a_monitor_cannot_go_on(trainer: Trainer, gathered: list[str]) -> str:
    monitors = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    monitors |= {one.monitor for one in callbacks_of_kind(trainer, EarlyStopping)}
    monitors |= {one.monitor for one in callbacks_of_kind(trainer, ModelCheckpoint)}
    if not (lost := sorted(set(gathered) & monitors)):
        return ""
    return (
        "this checkpoint was saved within an epoch, and a ReduceLROnPlateau, an EarlyStopping or a ModelCheckpoint "
        f"goes by {', '.join(lost)}, a mean over all of the epoch's batches, which is in no checkpoint. Resume from a "
        "checkpoint of an epoch's end, or let it go by a metric of the validation"
    )


def begun_window(trainer: Any, checkpoint: dict[str, Any]) -> str:
    """What a resume loses from a checkpoint that a run without ExactResume has saved within a window, or ``""``."""
    batches = checkpoint["loops"]["fit_loop"][BATCHES]
    k, done = trainer.accumulate_grad_batches, batches["current"]["processed"]
    if batches["is_last_batch"] or not done % k:
        return ""
    states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
    sizes = [state["batch_size"] for state in states if isinstance(state, dict) and state.get("batch_size")]
    samples = f" ({done % k * sizes[0] * trainer.world_size} samples)" if len(sizes) == 1 else ""
    return (
        f"this checkpoint was saved inside an accumulation window, after {done % k} of its {k} micro-batches{samples}, "
        "by a run without ExactResume: it does not hold their gradients. Resume from a checkpoint of a window's end; "
        "or, to go on without those samples, add ExactResume(strict=False) to the callbacks"
    )
