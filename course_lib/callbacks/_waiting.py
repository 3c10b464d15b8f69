"""What a checkpoint was saved ahead of: hooks and a validation that Lightning does not make again in a resumed run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from course_lib._lightning import DATA_FETCHER, VALIDATION_IS_DUE


def what_waits(
    trainer: Any, begun: int, batch_has_ended: bool, before_own_hook: bool, validated_at: int
) -> dict[str, Any]:
    """What is still to come of the batch, the validation and the epoch that a checkpoint is saved in.

    ``begun``: micro-batches of a window that has not ended. ``validated_at``: those of the run when the callbacks had
    heard of the last validation's end.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    has_validated = validated_at == epoch_loop.batch_progress.total.ready
    epoch_waits = batch_has_ended and epoch_loop.batch_progress.is_last_batch
    hooks = ["on_train_batch_end"] * before_own_hook
    hooks += ["on_validation_end"] * (trainer.validating and has_validated)
    hooks += ["on_train_epoch_end"] * epoch_waits
    return {
        "within_validation": trainer.validating and not has_validated and not begun,
        "hooks_that_wait": hooks,
        "validation_waits": (
            epoch_waits and not has_validated and VALIDATION_IS_DUE.of(epoch_loop)(DATA_FETCHER.of(trainer.fit_loop))
        ),
    }


def warn_of_an_epochs_start(trainer: Any, batches: dict[str, Any]) -> None:
    """Where a run goes on within an epoch, whose first hook Lightning does not call again."""
    module = trainer.lightning_module
    owners = [module] * is_overridden("on_train_epoch_start", module)
    owners += [one for one in trainer.callbacks if _has_its_own(one, "on_train_epoch_start")]
    if owners and batches["current"]["ready"] and not batches["is_last_batch"]:
        rank_zero_warn(
            "this checkpoint was saved within an epoch, and Lightning does not call "
            f"{' and '.join(f'{type(one).__name__}.on_train_epoch_start' for one in owners)} again for it: what that "
            "sets and no checkpoint holds (another attribute than a number or a tensor of the module's) is now what "
            "__init__ has made of it. Set it in on_train_batch_start, or go by the Trainer's current_epoch where it is "
            "read"
        )


def warn_of_what_has_not_run(trainer: Any, own: dict[str, Any], *, epoch_ends: bool) -> None:
    """Where a checkpoint was saved in a callback's hook, ahead of one that Lightning calls later.

    ``epoch_ends``: Whether the end of the epoch that it was saved in comes now.
    """
    if own.get("validation_waits") and not epoch_ends:
        rank_zero_warn(
            "this checkpoint was saved ahead of an epoch's validation, which is not made, as the run is over or "
            "validates by other rules now: a ModelCheckpoint that goes by it has not seen this epoch. Trainer.validate "
            "makes it"
        )
    module = trainer.lightning_module
    if own.get("set_back") and (savers := _save_by_themselves(trainer)):
        rank_zero_warn(
            f"this checkpoint was saved within a window and set back to its start, but not what "
            f"{' and '.join(savers)} put into it: that is as it was within the window, whose micro-batches are now "
            "trained again. If it counts micro-batches or goes by them, it counts some twice"
        )
    for hook in own.get("hooks_that_wait", ()):
        ends_an_epoch = hook == "on_train_epoch_end"
        if ends_an_epoch and epoch_ends:
            continue
        owners = [module] * is_overridden(hook, module)
        owners += [one for one in trainer.callbacks if ends_an_epoch and _ends_epochs_in_its_own_way(one)]
        if owners:
            at_the_end_of = "validation" if hook == "on_validation_end" else "batch"
            rank_zero_warn(
                f"this checkpoint was saved at a {at_the_end_of}'s end, ahead of "
                f"{' and '.join(f'{type(one).__name__}.{hook}' for one in owners)}, which Lightning does not call "
                "again for it: if that moves a weight, an average or a rate, or chooses a checkpoint, the run is "
                "another one. Then resume from an older checkpoint"
            )


def _save_by_themselves(trainer: Any) -> list[str]:
    """The methods of a reader's own that put something into a checkpoint."""
    hooks = [(one, hook) for one in trainer.callbacks for hook in ("state_dict", "on_save_checkpoint")]
    hooks.append((trainer.lightning_module, "on_save_checkpoint"))
    methods = ((one, hook, getattr(type(one), hook, None)) for one, hook in hooks)  # a duck of a callback may have none
    return [f"{type(one).__name__}.{hook}" for one, hook, method in methods if method and not _is_known(method)]


def _ends_epochs_in_its_own_way(callback: Callback) -> bool:
    """Whether it is the reader's own, goes by a metric to choose the best checkpoint, or prunes there."""
    if isinstance(callback, ModelCheckpoint):
        return callback.monitor is not None
    return isinstance(callback, ModelPruning) or _has_its_own(callback, "on_train_epoch_end")


def _has_its_own(callback: Callback, hook: str) -> bool:
    """Whether a callback is a reader's own that has this hook; another library's may be no ``Callback`` at all."""
    return not _is_known(getattr(callback, hook, getattr(Callback, hook)))


def _is_known(method: Callable[..., Any]) -> bool:
    return str(getattr(method, "__module__", "")).startswith(("lightning.", "course_lib."))
