"""Why a checkpoint is not one to go on from, in a sentence; or ``""``."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from course_lib._lightning import COMBINED_LOADER
from course_lib._words import counted
from course_lib.callbacks._clean_point import BATCHES, EPOCHS
from course_lib.callbacks._trainer import accumulation_by_epoch, callbacks_of_kind
from course_lib.resume import ResumableDataLoader


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
        if what := _why_its_place_is_lost(loader):
            return (
                f"this checkpoint was saved within an epoch, after {done}, and a {type(loader).__name__} {what}: some "
                "samples would come twice, or never. Take a course_lib.resume.ResumableDataLoader, or resume from a "
                "checkpoint of an epoch's end"
            )
    return ""


def _why_its_place_is_lost(loader: Any) -> str:
    if sized_len(loader) is None:
        return "has no length, and is read ahead"
    if not hasattr(loader, "load_state_dict"):
        return "does not know where it was"
    if _draws_its_order_anew(loader):
        return "knows how many batches it gave, and not the order that its sampler drew"
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


def _draws_its_order_anew(loader: Any) -> bool:
    """Whether it has one of torch's own samplers that draw, which torchdata's loader reads again up to its place."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    drawing = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return any(type(one) in drawing for one in samplers) and not isinstance(loader, ResumableDataLoader)


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
