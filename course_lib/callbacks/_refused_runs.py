"""What ExactResume refuses before a batch is trained: runs that would be another one after a resume, or at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS

from course_lib._lightning import COMBINED_LOADER, LOADER_MODE, SKIP_BACKWARD
from course_lib.callbacks._trainer import accumulation_by_epoch, finders_of, refuse_another_lightning
from course_lib.resume import ResumableDataLoader
from course_lib.samplers import EpochBatchSampler


def refuse_steps_by_another(trainer: Trainer, pl_module: LightningModule) -> None:
    refuse_another_lightning("ExactResume", trainer)
    if not pl_module.automatic_optimization or trainer.strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            "ExactResume needs a Trainer that decides when to step: automatic optimization, and a strategy that "
            f"does not accumulate by its own count, got {type(trainer.strategy).__name__}"
        )


def refuse_loaders(trainer: Trainer) -> None:
    _refuse_loaders_that_part(trainer)
    _refuse_orders_that_overfitting_leaves(trainer)


def _refuse_loaders_that_part(trainer: Any) -> None:
    # The shorter one has begun its next epoch, or none, when the longer one ends; a checkpoint does not say which.
    combined = COMBINED_LOADER.of(trainer.fit_loop)
    lengths = {sized_len(loader) for loader in combined.flattened}
    resumable = [loader for loader in combined.flattened if hasattr(loader, "load_state_dict")]
    mode = LOADER_MODE.of(combined)
    if len(lengths) > 1 and resumable and mode != "min_size":
        raise MisconfigurationException(
            f'a CombinedLoader of the mode "{mode}" reads a {type(resumable[0]).__name__} beside a loader of another '
            f"length (batches: {', '.join(str(sized_len(loader)) for loader in combined.flattened)}): the shorter one "
            'would be resumed in another pass. Take the mode "min_size", or one TwoStreamBatchSampler over both'
        )


def _refuse_orders_that_overfitting_leaves(trainer: Any) -> None:
    # Lightning looks at loader.sampler, which torch makes a SequentialSampler beside any batch sampler.
    if not trainer.overfit_batches or trainer.max_epochs == 1:
        return
    combined = COMBINED_LOADER.of(trainer.fit_loop)
    for loader, limit in zip(combined.flattened, combined.limits, strict=True):
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, EpochBatchSampler) or isinstance(loader, ResumableDataLoader):
            continue
        first, second = (_batches_of_epoch(sampler, epoch, limit) for epoch in (sampler.epoch + 1, sampler.epoch + 2))
        if first != second:
            raise MisconfigurationException(
                f"overfit_batches wants the same batches in each epoch, this {type(sampler).__name__} draws others: "
                f"Lightning leaves it as it is in a {type(loader).__name__}. Make it with shuffle=False, or read it "
                "through a ResumableDataLoader"
            )


def _batches_of_epoch(sampler: EpochBatchSampler, epoch: int, count: float) -> list[list[int]]:
    alone = copy.copy(sampler)
    alone.set_epoch(epoch)
    return list(islice(alone, int(count)))


def refuse_windows_of_evaluations(trainer: Trainer) -> None:
    # A Trainer calls its closure for the window's last micro-batch alone: each further evaluation adds that one's
    # gradient to the others', which are of the parameters before the step.
    if SKIP_BACKWARD.of(trainer.fit_loop):
        return
    windows = accumulation_by_epoch(trainer) or {0: 1}
    longest = max(trainer.accumulate_grad_batches, *windows.values())
    if longest > 1 and any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise MisconfigurationException(
            f"LBFGS evaluates the loss many times a step, and of a window of {longest} micro-batches a Trainer repeats "
            "the last one only: the gradient would be none of the window's. Take accumulate_grad_batches=1 and larger "
            "batches, or another optimizer"
        )


def evaluated_once(trainer: Trainer, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The arguments of an optimizer's step, whose closure raises where it is called again in a window of several."""
    closure = named.get("closure", given[1] if len(given) > 1 else None)
    if closure is None or trainer.accumulate_grad_batches == 1 or SKIP_BACKWARD.of(trainer.fit_loop):
        return None
    called = False

    def once() -> Any:
        nonlocal called
        if called:
            raise MisconfigurationException(
                f"{type(given[0]).__name__} evaluates the loss a second time in one step, and of a window of "
                f"{trainer.accumulate_grad_batches} micro-batches a Trainer repeats the last one only: the gradient "
                "would be none of the window's. Take accumulate_grad_batches=1 and larger batches, or another optimizer"
            )
        called = True
        return closure()

    return (given, named | {"closure": once}) if "closure" in named else ((given[0], once, *given[2:]), named)


def refused_resumes(trainer: Trainer, own: dict[str, Any]) -> Iterator[str]:
    """Why a checkpoint, in which ExactResume has kept ``own``, is not one that this Trainer can go on from."""
    if own.get("within_update"):
        yield (
            "this checkpoint was saved in the middle of an update, by an exception or by a hook that runs there: some "
            "parameters or schedules have moved and others have not. Resume from an older one"
        )
    if own.get("swapped"):
        yield (
            "this checkpoint was saved within a validation that had put the averaged weights into the module, and the "
            "trained ones in their place. Resume from an older one, and save behind a validation"
        )
    if own.get("pruned"):
        yield (
            "this checkpoint was saved behind a ModelPruning's cut. It holds zeros, and not the masks that keep them: "
            "they would be trained again. Resume from a checkpoint ahead of the first cut"
        )
    if own.get("moved_unseen"):
        yield (
            f"this checkpoint was saved within the first window of its life, in which the module itself has moved "
            f"{own['moved_unseen'][0]}: no optimizer has it, and what it was when the window began is not known. "
            "Resume from another one"
        )
    if own.get("plateau_waits"):
        yield (
            'this checkpoint was saved at a batch\'s end, ahead of the step of a ReduceLROnPlateau with "interval": '
            '"step", which Lightning would leave out. Resume from one of an epoch\'s end, and save there; or step the '
            'schedule once an epoch, with "interval": "epoch"'
        )
    for finder in finders_of(trainer):
        yield (
            f"a {type(finder).__name__} tries a fit of its own ahead of this one, and Lightning goes on from what was "
            "before that, with the weights of this checkpoint and without its place. Leave it out where a run is "
            "resumed: the learning rate that it found is in the checkpoint, and a batch size is the loader's"
        )


def why_its_epoch_is_none_of_this_run(trainer: Trainer) -> str:
    """Why a checkpoint is refused of an epoch that begins behind this run's ``max_epochs``, or ``""``."""
    # Lightning returns at once, without a word; and a second fit would make new optimizers for what is left of that
    # epoch, and lose the batch that was fetched.
    progress: Any = trainer.fit_loop.epoch_progress.current
    max_epochs = trainer.max_epochs
    if max_epochs in (None, -1) or progress.started <= max_epochs:
        return ""
    return (
        f"this checkpoint was saved within epoch {progress.started - 1}, and Trainer(max_epochs={max_epochs}) ends "
        f"ahead of it: nothing would be trained. Take max_epochs={progress.started} or more to go on from it"
    )


def why_within_a_window(progress: dict[str, Any], k: int, before: int | None) -> str:
    """Why a checkpoint is refused whose counts of batches are within a window of ``k`` micro-batches, or ``""``.

    ``before``: the length of the windows that it was saved in; 0: by a run without ExactResume; None: unknown.
    """
    done = progress["current"]["processed"]
    if progress["is_last_batch"] or not done % k or before in (None, k):
        return ""
    if before:
        return (
            f"this checkpoint was saved within an epoch, after {done} of its batches, in windows of {before}: with "
            f"accumulate_grad_batches={k} the Trainer steps after batch {done + k - done % k}, and divides by {k} what "
            f"{k - done % k} have given. Resume it with accumulate_grad_batches={before}, or from a checkpoint of an "
            "epoch's end"
        )
    return (
        f"this checkpoint was saved inside an accumulation window, after {done % k} of its {k} micro-batches, by a run "
        "without ExactResume: it does not hold their gradients, so their samples would be lost. Resume from a "
        "checkpoint of a window's end; or lose them, with ExactResume(strict=False) among the callbacks"
    )
