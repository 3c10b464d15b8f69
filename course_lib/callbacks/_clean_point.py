"""A run at a clean point: between two windows, with nothing under way, so that it is small to keep.

What stands still until the next step (parameters, the optimizer's state) is not copied. What moves with each
micro-batch, or with a validation, is: counters, the loader's place, buffers, and what callbacks declare.

Lightning reads from its counters where a checkpoint was saved, and passes over what was to come next. Here a checkpoint
says it: behind which batch or epoch it was, and whether a validation waits; the loops and loaders are put there.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, is_dataclass
from operator import is_not
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loops.evaluation_loop import RestartStage
from torch import Tensor, nn

from course_lib._lightning import (
    AVERAGE,
    BATCHES_THAT_STEPPED,
    COMBINED_LOADER,
    DATA_FETCHER,
    EVALUATION_STAGE,
    RESTARTING,
    RESUMING,
    STATES_TO_LOAD,
    VALIDATION_IS_DUE,
    count_limited,
)
from course_lib.callbacks._trainer import callbacks_of_kind
from course_lib.resume import COUNTED_AGAIN, ResumableDataLoader

EPOCHS, BATCHES = "epoch_progress", "epoch_loop.batch_progress"
"""Where a fit loop's state has its counts of epochs and of micro-batches."""


class Parts:
    """What a run is made of, listed once an epoch: to walk through it costs more than to copy what moves."""

    def __init__(self, trainer: Any) -> None:
        self.module: nn.Module = trainer.lightning_module
        self.modules = list(self.module.named_modules(remove_duplicate=False))
        self.parameters = list(self.module.named_parameters())
        averages = [AVERAGE.of(one) for one in callbacks_of_kind(trainer, WeightAveraging)]
        self._written = [one for _, one in self.parameters]
        self._written += [one for average in averages if average is not None for one in average.parameters()]
        self._buffers = [
            (_joined(path, name), part._buffers, name)
            for path, part in self.modules
            for name in part._buffers.keys() - part._non_persistent_buffers_set
        ]
        self._copied: list[Tensor | None] = []
        self._copies: dict[str, Tensor] = {}
        self.counters = _counters_of(trainer.fit_loop)
        with_state = ((path, one) for path, one in self.modules if type(one).get_extra_state is not NO_EXTRA_STATE)
        self._with_extra_state = [(_joined(path, "_extra_state"), part) for path, part in with_state]

    def unstepped(self) -> dict[str, Any]:
        """What ``state_dict()`` has beside parameters, in copies that are good until the next call."""
        found = [of_part.get(name) for _, of_part, name in self._buffers]
        if len(found) != len(self._copied) or any(map(is_not, found, self._copied)):  # the first time, or one is new
            self._copied = found
            self._copies = {
                full_name: torch.empty_like(one)
                for (full_name, _, _), one in zip(self._buffers, found, strict=True)
                if one is not None
            }
        with torch.no_grad():  # as the optimizers do: so many clones would take three times as long
            if self._copies:
                torch._foreach_copy_([*self._copies.values()], [one for one in found if one is not None])
        return self._copies | {name: copy.deepcopy(part.get_extra_state()) for name, part in self._with_extra_state}

    def modes(self) -> dict[str, list[str]]:
        return {
            "frozen": [name for name, one in self.parameters if not one.requires_grad],
            "in_eval_mode": [name for name, one in self.modules if not one.training],
            "without_statistics": [name for name, one in self.modules if getattr(one, TRACKS, True) is False],
        }

    def writes(self) -> list[int]:
        """How often each parameter, and each of an average, has been written to."""
        return [one._version for one in self._written]


NO_EXTRA_STATE = nn.Module.get_extra_state
TRACKS = "track_running_stats"
"""Of BatchNorm; whoever freezes one may set it, as Lightning's BaseFinetuning."""
MODES = ("training", TRACKS)


def _counters_of(fit_loop: Any) -> list[dict[str, Any]]:
    """The attributes of all counters that the loops' state is made of, which count on in them."""
    names = [name for name in fit_loop.state_dict() if not name.endswith("state_dict")]
    counters = [functools.reduce(getattr, name.split("."), fit_loop) for name in names]
    for counter in counters:  # and of those that they are made of
        counters += [one for one in vars(counter).values() if is_dataclass(one)]
    return [vars(one) for one in counters]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


@dataclass(frozen=True)
class CleanPoint:
    between_epochs: bool
    """Behind an epoch's end; else behind a batch of it, or behind the validation that followed."""
    validation_waits: bool
    """Whether a validation is due behind that batch, and was not over."""
    stopping: bool
    """Whether the run had been told to stop."""
    stopped_early: bool
    """Whether an EarlyStopping had told it."""
    micro_batches: int
    """All that the run had begun by then."""
    counts: list[dict[str, Any]]
    """What stood in the loops' counters."""
    batches_that_stepped: int
    loaders: dict[str, Any]
    resumed_loops: dict[str, Any] | None
    """The loops' state in the checkpoint from which the run has just been resumed, until it has gone on."""
    epoch_and_step: dict[str, int]
    module: dict[str, Any]
    """Buffers and extra state, by their names in ``state_dict()``."""
    settings: list[list[dict[str, Any]]]
    """What each optimizer's groups have beside parameters, as rates."""
    schedules: list[dict[str, Any]]
    callbacks: dict[str, Any]
    datamodule: dict[str, Any] | None
    logged: dict[str, Any]
    modes: dict[str, list[str]]
    """The parameters that are frozen, the modules in eval mode, and those that track no statistics."""
    writes: list[int]

    @classmethod
    def of(
        cls,
        trainer: Any,
        parts: Parts,
        own_key: str,
        *,
        between_epochs: bool = False,
        validation_waits: bool = False,
        loops: dict[str, Any] | None = None,
        modes: dict[str, list[str]] | None = None,
    ) -> CleanPoint:
        """Where the run stands now. ``own_key``: the callback that asks, whose state is none of it; ``loops``: those of
        the checkpoint that it has just been resumed from; ``modes``: as they were ahead of a validation."""
        return cls(
            between_epochs,
            validation_waits,
            bool(trainer.should_stop),
            stopped_early=bool(trainer.should_stop)
            and any(map(_has_stopped, callbacks_of_kind(trainer, EarlyStopping))),
            micro_batches=trainer.fit_loop.epoch_loop.batch_progress.total.ready,
            counts=[one.copy() for one in parts.counters],
            batches_that_stepped=BATCHES_THAT_STEPPED.of(trainer.fit_loop.epoch_loop),
            loaders=_copied(trainer.fit_loop.on_save_checkpoint()),
            resumed_loops=loops,
            epoch_and_step={"epoch": trainer.current_epoch, "global_step": trainer.global_step},
            module=parts.unstepped(),
            settings=[[_copied(_settings(group)) for group in one.param_groups] for one in trainer.optimizers],
            schedules=[_copied(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
            callbacks=_states(one for one in trainer.callbacks if one.state_key != own_key),
            datamodule=_copied(trainer.datamodule and trainer.datamodule.state_dict()),
            logged=dict(trainer.callback_metrics),
            modes=modes or parts.modes(),
            writes=parts.writes(),
        )

    def has_moved(self, parts: Parts) -> bool:
        """Whether a parameter, or an average, has been written to since: no checkpoint can be set back to here."""
        return self.writes != parts.writes()

    def see_what_was_saved(self, trainer: Any) -> None:
        """Behind the checkpoints that are saved here: their callbacks know of them."""
        self.callbacks.update(_states(trainer.checkpoint_callbacks))

    def put_into(self, checkpoint: dict[str, Any], trainer: Any, parts: Parts, *, stands: bool) -> None:
        """Have a checkpoint hold the run as it was here. ``stands``: it is here, and callbacks that save are at it."""
        checkpoint |= self.epoch_and_step | {"lr_schedulers": self.schedules}
        checkpoint["loops"]["fit_loop"] = self.resumed_loops or self._loops(trainer.fit_loop, parts)
        # Where WeightAveraging has saved already, state_dict is the average.
        state = checkpoint.get("current_model_state", checkpoint["state_dict"])
        state.update({name: _copied(value) for name, value in self.module.items() if name in state})
        savers = {one.state_key for one in trainer.checkpoint_callbacks} if stands else set()
        _put(checkpoint["callbacks"], {key: one for key, one in self.callbacks.items() if key not in savers})
        if trainer.datamodule is not None:
            _put(checkpoint, {type(trainer.datamodule).__qualname__: self.datamodule})
        for optimizer, groups in zip(checkpoint["optimizer_states"], self.settings, strict=True):
            del optimizer["param_groups"][len(groups) :]  # what a fine-tuner has added since, it adds again
            for group, settings in zip(optimizer["param_groups"], groups, strict=True):
                group.update(settings)

    def _loops(self, fit_loop: Any, parts: Parts) -> dict[str, Any]:
        """Their state, with each batch and epoch that had begun counted as over, or as not begun: none in between."""
        now = [one.copy() for one in parts.counters]
        _put_counts(parts, self.counts)
        loops: dict[str, Any] = fit_loop.state_dict()
        _put_counts(parts, now)
        loops["state_dict"] = self.loaders
        for counts in (loops[BATCHES]["total"], loops[BATCHES]["current"]):
            counts["started"] = counts["processed"] = counts["completed"] = counts["ready"]
        for counts in (loops[EPOCHS]["total"], loops[EPOCHS]["current"]):
            over = counts["processed"] if self.between_epochs else counts["started"] - 1
            counts["ready"] = counts["started"] = over + (not self.between_epochs)
            counts["processed"] = counts["completed"] = over
        # Where the loop does not come by again at the place where it counts this batch, it counts here.
        comes_by = self.between_epochs or self.validation_waits or loops[BATCHES]["is_last_batch"]
        loops["epoch_loop.state_dict"][BATCHES_THAT_STEPPED.name] = self.batches_that_stepped + (not comes_by)
        return loops


def _put_counts(parts: Parts, counts: list[dict[str, Any]]) -> None:
    for counter, of_counter in zip(parts.counters, counts, strict=True):
        counter.update(of_counter)


def _states(callbacks: Any) -> dict[str, Any]:
    return {one.state_key: _copied(one.state_dict()) for one in callbacks}


def _put(into: dict[str, Any], states: dict[str, Any]) -> None:
    """Lightning saves no state that is empty."""
    for key, state in states.items():
        into.pop(key, None)
        into |= {key: state} if state else {}


def _has_stopped(callback: EarlyStopping) -> bool:
    return callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(state: Any) -> Any:
    """A copy that training does not move, on the same device."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    return state if isinstance(state, bool | int | float | str | None) else copy.deepcopy(state)


def put_modes(parts: Parts, modes: dict[str, list[str]]) -> list[str]:
    """Freeze and unfreeze as it was at a clean point; returns the names of what was otherwise."""
    before = parts.modes()
    for name, parameter in parts.parameters:
        parameter.requires_grad = name not in modes["frozen"]
    for name, part in parts.modules:
        part.training = name not in modes["in_eval_mode"]
        if hasattr(part, TRACKS):
            setattr(part, TRACKS, name not in modes["without_statistics"])
    return sorted({name for kind, names in modes.items() for name in set(names) ^ set(before[kind])})


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, words and tensors of a module that no ``state_dict`` has; of a tensor, how often it was written to."""
    values: dict[str, Any] = {}
    for path, part in module.named_modules():
        unsaved = {name: part._buffers[name] for name in part._non_persistent_buffers_set}
        for name, value in (*vars(part).items(), *unsaved.items()):
            if isinstance(value, Tensor):
                values[_joined(path, name)] = (id(value), value._version)
            elif isinstance(value, bool | int | float | str) and not name.startswith("_") and name not in MODES:
                values[_joined(path, name)] = value
    return values


# ------------------------------------------------------------------------------- a Trainer that is put at a clean point


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
