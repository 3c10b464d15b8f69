"""What several callbacks ask of a Trainer, and how they stand in for a module's methods while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from course_lib._lightning import (
    BATCHES_THAT_STEPPED,
    COMBINED_LOADER,
    DATA_FETCHER,
    LAST_BATCH_REACHED,
    LOADERS_MADE_IN,
    RESTARTING,
    SKIP_BACKWARD,
    STATES_TO_LOAD,
)
from course_lib.loader import MiniDataLoader
from course_lib.resume import ResumableDataLoader


def require_plain_optimization(
    callback: Callback, trainer: Trainer, pl_module: LightningModule, *, with_manual: str, other_strategies: str
) -> None:
    """Raise a MisconfigurationException unless optimization is automatic, on one device or under DDP.

    ``with_manual`` says what to do instead, ``other_strategies`` what is wrong with them.
    """
    name, strategy = type(callback).__name__, trainer.strategy
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(f"{name} needs automatic optimization; with manual optimization {with_manual}")
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"{name} knows one device and DDP, got {type(strategy).__name__}, {other_strategies}"
        )


Kind = TypeVar("Kind", bound=Callback)


def callbacks_of_kind(trainer: Trainer, kind: type[Kind]) -> list[Kind]:
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


class CountsSkips(Callback):
    """What SkipBadSteps tells the callbacks that it is built on, which cannot import it."""

    max_steps_means: str
    attempts: int
    updates: int
    uncounted_attempts: int
    """Skips that were taken out of ``trainer.global_step``."""

    @property
    def skipped(self) -> int:
        return self.attempts - self.updates

    def reject_on_all_ranks(self, reason: str) -> None:
        raise NotImplementedError


def skippers_of(trainer: Trainer) -> list[CountsSkips]:
    """The SkipBadSteps among the callbacks."""
    return callbacks_of_kind(trainer, CountsSkips)


def attempts_of(trainer: Trainer) -> int:
    """global_step: attempts, of whatever kind of optimizer and loop, and those that SkipBadSteps took out of it."""
    return trainer.global_step + sum(skipper.uncounted_attempts for skipper in skippers_of(trainer))


def accumulation_by_epoch(trainer: Trainer) -> dict[int, int] | None:
    """What a GradientAccumulationScheduler among the callbacks says; None where there is none."""
    schedulers = callbacks_of_kind(trainer, GradientAccumulationScheduler)
    return schedulers[0].scheduling if schedulers else None


def window_length(trainer: Trainer) -> int:
    """The micro-batches of a window in this epoch, as a GradientAccumulationScheduler has it, or else the Trainer."""
    windows = accumulation_by_epoch(trainer)
    if windows is None:
        return trainer.accumulate_grad_batches
    return windows[max(epoch for epoch in windows if epoch <= trainer.current_epoch)]


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


def load_in_its_precision(trainer: Trainer, pl_module: LightningModule, state: dict[str, Tensor]) -> None:
    """Load a module's state once more, in the precision in which it was trained.

    Lightning loads it first and converts the module behind that, which rounds what ``precision="64-true"`` had.
    """
    own = pl_module.state_dict()
    if any(
        tensor.is_floating_point() and own[name].dtype != tensor.dtype for name, tensor in state.items() if name in own
    ):
        trainer.precision_plugin.convert_module(pl_module)
        pl_module.load_state_dict(state, strict=pl_module.strict_loading)


def finders_of(trainer: Trainer) -> list[Callback]:
    """Those that try fits of their own when a ``fit`` starts."""
    return [*callbacks_of_kind(trainer, LearningRateFinder), *callbacks_of_kind(trainer, BatchSizeFinder)]


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


def make_loaders_again_when_due(trainer: Any, made_in: int | None) -> None:
    """Count ``reload_dataloaders_every_n_epochs`` from the epoch in which a checkpoint's loaders were made."""
    fit_loop, epoch = trainer.fit_loop, trainer.current_epoch
    if made_in is None or not trainer.reload_dataloaders_every_n_epochs:
        return
    due_later = 0 < epoch - made_in < trainer.reload_dataloaders_every_n_epochs
    if due_later or LOADERS_MADE_IN.of(fit_loop) < epoch:  # made now, for the end of the epoch before
        LOADERS_MADE_IN.put(fit_loop, made_in)
    if due_later:
        rank_zero_warn(
            f"the loaders of epoch {epoch} had been made in epoch {made_in}, and are made again now: "
            "train_dataloader() must give the same in both, and what it gives in later epochs comes when it was due"
        )


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
    if fit_loop.restarted_on_epoch_end:
        fit_loop.epoch_progress.increment_completed()
        RESTARTING.put(fit_loop, False)
        fit_loop.epoch_loop.restarting = False
        fit_loop.reset_restart_stage()
        fit_loop.epoch_loop.reset_restart_stage()
    return without_its_end


def leave_an_epoch_without_batches(trainer: Trainer) -> None:
    """Where a run was over when it was resumed, and its checkpoint had begun an epoch more without a batch.

    A second fit would take that epoch for one that is done.
    """
    progress: Any = trainer.fit_loop.epoch_progress.current
    if not trainer.fit_loop.epoch_loop.batch_progress.current.ready:
        progress.ready = progress.started = progress.processed


def why_loaders_are_elsewhere(trainer: Trainer, progress: dict[str, Any]) -> str:
    """Why loaders that have no state begin with other batches than those that come next in a checkpoint, or ``""``."""
    loaders = COMBINED_LOADER.of(trainer.fit_loop).flattened
    forgetful = [loader for loader in loaders if not hasattr(loader, "load_state_dict")]
    names, done = ", ".join(type(loader).__name__ for loader in forgetful), progress["current"]["ready"]
    if not forgetful or progress["is_last_batch"]:
        return ""
    if done:
        return (
            f"this checkpoint was saved within an epoch, after {done} batches, and a {names} does not know where it "
            "was: it begins the epoch's batches again and leaves out as many at the end. Take a "
            "course_lib.resume.ResumableDataLoader, or resume from a checkpoint of an epoch's end"
        )
    if any(getattr(loader, "num_workers", 0) for loader in forgetful):
        return (
            f"this checkpoint was saved ahead of the run's first batch, and a {names} with workers had drawn its "
            "order, and its workers' seeds, by then: they are others now. Nothing is trained yet: begin without a "
            "checkpoint. Or take a course_lib.resume.ResumableDataLoader, which knows its order"
        )
    return ""


def save_nothing_for_the_exception(trainer: Trainer) -> None:
    """Ahead of a refusal: what is half restored is in no state to be saved, least of all over what was refused."""
    for callback in trainer.checkpoint_callbacks:
        vars(callback)["on_exception"] = _PassedOver(callback)


class _PassedOver:
    """In place of a callback's hook, once."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback

    def __call__(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        vars(self.callback).pop("on_exception", None)


def save_behind_own_hook(trainer: Trainer, pl_module: LightningModule, ran: Callable[[], None]) -> Callable[[], None]:
    """Have the callbacks that save at a batch's end do so behind the module's own ``on_train_batch_end``.

    Lightning calls the callbacks first, and what the module does there (an average, a rate) would be in no checkpoint.
    ``ran`` is called between the two. Returns what puts the hooks back.
    """
    savers = list(trainer.checkpoint_callbacks)
    own = pl_module.on_train_batch_end

    def on_train_batch_end(*batch: Any, **named: Any) -> None:
        own(*batch, **named)
        ran()
        for saver in savers:
            type(saver).on_train_batch_end(saver, trainer, pl_module, *batch, **named)

    for saver in savers:
        vars(saver)["on_train_batch_end"] = _does_nothing
    put_back = replace_methods(pl_module, on_train_batch_end=on_train_batch_end)

    def undo() -> None:
        put_back()
        for saver in savers:
            vars(saver).pop("on_train_batch_end", None)

    return undo


def _does_nothing(*_: Any, **__: Any) -> None: ...


def replace_methods(module: nn.Module, **functions: Callable[..., Any]) -> Callable[[], None]:
    """Have this one module use the functions for its methods of these names, and return what puts them back.

    For what no hook sees: a loss between ``training_step`` and its backward, say. Until they are put back, a copy or a
    pickle of the module has its own methods.
    """
    attributes = vars(module)
    own = {name: attributes[name] for name in functions if name in attributes}
    # copy.deepcopy and pickle ask the object, and not its class, how it is taken apart.
    taken_apart = attributes.setdefault("__reduce_ex__", _TakenApart(module))
    taken_apart.replaced |= functions.keys()
    taken_apart.own |= own
    attributes.update(functions)

    def put_back() -> None:
        for name in functions:
            attributes.pop(name, None)
            taken_apart.own.pop(name, None)
        attributes.update(own)
        taken_apart.replaced -= functions.keys()
        if not taken_apart.replaced:
            attributes.pop("__reduce_ex__", None)

    return put_back


class _TakenApart:
    """A module taken apart for a copy or a pickle, as if none of its methods were replaced."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced: set[str] = set()
        self.own: dict[str, Any] = {}
        """What the module itself, and not its class, had under these names."""

    def __call__(self, protocol: SupportsIndex) -> Any:
        parts = type(self.module).__reduce_ex__(self.module, protocol)
        if isinstance(parts, str) or len(parts) < 3 or not isinstance(parts[2], dict):
            return parts  # the class has its own way
        kept = {name: value for name, value in parts[2].items() if name not in self.replaced and value is not self}
        return (*parts[:2], kept | self.own, *parts[3:])
