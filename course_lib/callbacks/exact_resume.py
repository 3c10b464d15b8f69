"""A run that is killed anywhere, any number of times, and resumed ends as the run that was not.

A Trainer's checkpoint has neither the gradients that a window has gathered so far nor the state of the random
generators, and what it was saved ahead of is passed over. The rule: *a checkpoint holds the run at its last clean
point, wherever it is asked for; what came after that is done again; the random numbers of a micro-batch are a function
of the seed, its number and the rank.*

    Trainer(accumulate_grad_batches=8, callbacks=[ExactResume(), ModelCheckpoint(...)]).fit(
        model, ResumableDataLoader(dataset, batch_size=16, shuffle=True), ckpt_path=path
    )
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import LBFGS

from course_lib._generators import seed_generators
from course_lib._lightning import COMBINED_LOADER, LAST_BATCH_REACHED, RESULTS, SHOULD_ACCUMULATE
from course_lib.callbacks import _clean_point, _refused_resumes
from course_lib.callbacks._clean_point import BATCHES, CleanPoint, Parts, plain_attributes, put_modes
from course_lib.callbacks._other_ranks import since_ranks
from course_lib.callbacks._replaced_methods import (
    ignoring_arguments,
    in_turn,
    replace_hook,
    replace_methods,
    save_nothing_for_the_exception,
)
from course_lib.callbacks._trainer import (
    callbacks_of_kind,
    finders_of,
    has_trained,
    longest_window,
    refuse_another_lightning,
    refuse_stochastic_averaging,
)

VERSION = 3
"""Of what this callback puts into a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint from which the run cannot be resumed as if it had not been stopped."""


class ExactResume(Callback):
    """Checkpoints from which a run goes on as if it had not been stopped, wherever they were taken.

    **Clean points** lie behind each batch that ends with an optimizer's step, behind the validation that follows such a
    batch, and behind each epoch's end. A checkpoint that is asked for elsewhere (inside a window, in a validation, for
    an exception, SIGTERM, ``max_time``) holds the last of them, and the run that resumes does again what came after.
    Callbacks that save are called behind the module's own hooks. The global generators of Python, NumPy and torch are
    seeded ahead of each micro-batch, by the run's first seed (``torch.initial_seed()``), its number and the rank.

    **Held**, also on other ranks: parameters, buffers, ``get_extra_state``; what is frozen or in eval mode; optimizers
    and schedules; ``state_dict`` of callbacks and data module; the training loader's place, of a
    :class:`~course_lib.resume.ResumableDataLoader` or another with a state (of torch's DataLoader at an epoch's end);
    what was logged last. Nothing else: a resume names attributes of the module that training had moved. (Make them
    buffers.) What the module's ``on_save_checkpoint`` adds is as of the save.

    **Refused** before training (MisconfigurationException): manual optimization, or a strategy that accumulates by its
    own count; loaders of several lengths, but in the mode ``"min_size"``; LBFGS with windows; two ``WeightAveraging``,
    or a ``StochasticWeightAveraging``; a ``ReduceLROnPlateau`` by steps.

    **Refused at a resume** (CheckpointError, or with ``strict=False`` a warning): a checkpoint of the middle of an
    update, ahead of the first clean point, inside a window of a run without this callback, or of another version; in
    windows of another length; a loader that does not know its place; within an epoch, a monitor that goes by its
    training metrics' mean; a batch-size or learning-rate finder; a Trainer that has trained before.
    """

    _parts: Parts

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self._replaced = ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._point: CleanPoint | None = None
        self._stands = False
        """At the clean point: nothing but callbacks that save has come since."""
        self._stepping = False
        """Between a window's last backward and the clean point behind its step."""
        self._averages_are_in = False
        """Of WeightAveraging: in the module, for a validation, or for good behind the run."""
        self._seed: int | None = None
        self._since_ranks: dict[str, int] | None = None
        self._to_go_on: dict[str, Any] | None = None
        """What the checkpoint says, with its loops, until the run has been put there."""
        self._attributes: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------------- clean points

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _refuse_what_saves_no_point(trainer, pl_module)
            self._forget()
            self._since_ranks = {"world_size": trainer.world_size, "steps_done": 0, "samples_done": 0}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_loaders_and_schedules(trainer)
        self.go_on(trainer, pl_module)
        if self._seed is None:
            self._seed = trainer.strategy.broadcast(torch.initial_seed())
        self._parts, self._attributes = Parts(trainer), plain_attributes(pl_module)
        self._be_behind_the_hooks(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)
        self._parts = Parts(trainer)
        _clean_point.count_batches_again(trainer)  # one epoch may be longer than another
        self._seed_generators(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._leave(trainer)
        self._seed_generators(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._stepping = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)

    on_train_epoch_end = on_validation_start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)
        self._averages_are_in = bool(callbacks_of_kind(trainer, WeightAveraging))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._averages_are_in and trainer.validating:
            for averaging in callbacks_of_kind(trainer, WeightAveraging):
                averaging.on_validation_epoch_end(trainer, pl_module)
        if self._is_within_an_update(trainer):  # the last good file is kept
            save_nothing_for_the_exception(trainer)
        self._end(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._to_go_on is not None:  # resumed behind its last step: Lightning has returned before training began
            for averaging in callbacks_of_kind(trainer, WeightAveraging):
                if not self._to_go_on["between_epochs"]:
                    averaging.on_train_epoch_end(trainer, pl_module)
                averaging.on_train_end(trainer, pl_module)
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        _clean_point.ask_the_loops_again(trainer)
        self._replaced.close()

    def _come_to(self, trainer: Trainer, **where: Any) -> None:
        self._point = CleanPoint.of(trainer, self._parts, self.state_key, **where)
        self._stands, self._stepping = True, False
        self._seed_generators(trainer)

    def _leave(self, trainer: Trainer) -> None:
        _clean_point.ask_the_loops_again(trainer)
        if self._stands and self._point is not None:
            self._point.see_what_was_saved(trainer)
        self._stands = False

    def _end_batch(self, trainer: Trainer) -> None:
        if not SHOULD_ACCUMULATE.of(trainer.fit_loop.epoch_loop)():
            self._come_to(trainer, validation_waits=_clean_point.validation_is_due(trainer))

    def _end_validation(self, trainer: Trainer) -> None:
        point, begun = self._point, trainer.fit_loop.epoch_loop.batch_progress.total.ready
        # One that is made because the run has been told to stop is none of the run that goes on.
        if point is not None and point.validation_waits and not point.stopping and point.micro_batches == begun:
            self._come_to(trainer, modes=point.modes)

    def _end_epoch(self, trainer: Trainer, step_schedules: Callable[[str, bool], None]) -> None:
        """Ahead of the callbacks that save there; where none does, when Lightning steps the schedules that go by it."""
        if self._stands or not LAST_BATCH_REACHED.of(trainer.fit_loop.epoch_loop)():
            return
        step_schedules("epoch", True)
        self._come_to(trainer, between_epochs=True)

    def _seed_generators(self, trainer: Trainer) -> None:
        if self._seed is not None:
            seed_generators(self._seed, trainer.fit_loop.epoch_loop.batch_progress.total.ready, trainer.global_rank)

    def _be_behind_the_hooks(self, trainer: Trainer, module: LightningModule) -> None:
        """Come to clean points behind the module's hooks, which Lightning calls last, and have callbacks save there."""
        savers, averages = trainer.checkpoint_callbacks, callbacks_of_kind(trainer, WeightAveraging)
        begin = ignoring_arguments(self._begin, trainer)
        begins: dict[str, Any] = {"on_train_start": in_turn(module.on_train_start, begin)}
        for hook, come_to in (("on_train_batch_end", self._end_batch), ("on_validation_end", self._end_validation)):
            save = [functools.partial(getattr(saver, hook), trainer, module) for saver in savers]
            begins[hook] = in_turn(getattr(module, hook), ignoring_arguments(come_to, trainer), *save)
        self._replaced.callback(replace_methods(module, **begins))

        step_schedules = trainer.fit_loop.epoch_loop.update_lr_schedulers
        end_epoch = ignoring_arguments(self._end_epoch, trainer, step_schedules)
        for saver in savers:
            self._replace(saver, "on_train_batch_end", in_turn())
            self._replace(saver, "on_validation_end", in_turn())
            self._replace(saver, "on_train_epoch_end", in_turn(end_epoch, saver.on_train_epoch_end))
        for averaging in averages:
            for hook, are_in in (("on_validation_epoch_start", True), ("on_validation_epoch_end", False)):
                note = ignoring_arguments(setattr, self, "_averages_are_in", are_in)
                self._replace(averaging, hook, in_turn(getattr(averaging, hook), note))

        def step_schedules_once(interval: str, update_plateau_schedulers: bool) -> None:
            if interval == "epoch" and update_plateau_schedulers:
                end_epoch()
            else:
                step_schedules(interval, update_plateau_schedulers)

        self._replace(trainer.fit_loop.epoch_loop, "update_lr_schedulers", step_schedules_once)

    def _replace(self, holder: Any, name: str, function: Callable[..., Any]) -> None:
        self._replaced.callback(replace_hook(holder, name, function))

    def _begin(self, trainer: Trainer) -> None:
        """Behind all that the hooks of a run's start do."""
        if trainer.fit_loop.epoch_loop.restarting:  # within an epoch, whose start is not called again
            for windows in callbacks_of_kind(trainer, GradientAccumulationScheduler):
                windows.on_train_epoch_start(trainer)
        self._seed_generators(trainer)

    # ------------------------------------------------------------------------------------------------- a checkpoint

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        point = self._point
        if point is None:
            return
        within_update = self._is_within_an_update(trainer)
        if within_update:
            rank_zero_warn(
                "this checkpoint is saved in the middle of an update, and a resume will refuse it. Save in a callback "
                "that derives from lightning.pytorch.callbacks.Checkpoint: ExactResume calls those at clean points"
            )
        attributes = plain_attributes(pl_module)
        gathered = (one for one in RESULTS.of(trainer.fit_loop.epoch_loop).values() if one.meta.on_epoch)
        names = [name for one in gathered for name in (one.meta.name, one.meta.forked_name(on_step=False))]
        checkpoint["callbacks"][self.state_key]["point"] = {
            "between_epochs": point.between_epochs,
            "validation_waits": point.validation_waits,
            "within_update": within_update,
            "stopped_early": point.stopped_early,
            "logged": {name: one.detach().cpu() for name, one in point.logged.items() if one.numel() == 1},
            "gathered": [] if point.between_epochs else names,
            "windows": trainer.accumulate_grad_batches,
            "modes": point.modes,
            "moved": [name for name, one in attributes.items() if self._attributes.get(name) != one],
        }
        point.put_into(checkpoint, trainer, self._parts, stands=self._stands)

    def _is_within_an_update(self, trainer: Trainer) -> bool:
        point = self._point
        return point is not None and (self._stepping or self._averages_are_in or point.has_moved(self._parts))

    def state_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "seed": self._seed, "since_ranks": self._since_ranks, "point": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seed = state_dict["seed"]

    # ------------------------------------------------------------------------------------------------- a resume

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if finders_of(trainer):
            if own and not own.get("point"):
                return  # what a finder puts back when it has found: nothing is trained yet
            self._refuse(trainer, "a finder of batch sizes or rates would train ahead of what is resumed: leave it out")
        if has_trained(trainer):
            self._refuse(trainer, "this Trainer has trained before, and keeps what no checkpoint sets: make a new one")
        loops = copy.deepcopy(checkpoint["loops"]["fit_loop"])
        _clean_point.say_that_batches_are_counted_again(checkpoint)
        self._since_ranks = since_ranks(checkpoint, trainer.world_size)
        if own is None:
            self._refuse(trainer, _refused_resumes.begun_window(trainer, checkpoint))
            return
        if (version := own.get("version", 1)) != VERSION:
            self._refuse(
                trainer,
                f"this checkpoint is of version {version} of ExactResume, and this is version {VERSION}: resume it "
                "with the course_lib that saved it",
            )
            return
        self._refuse(trainer, _refused_resumes.why_refused(trainer, own["point"], loops))
        self._to_go_on = own["point"] and own["point"] | {"loops": loops}

    def go_on(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put a run that is resumed where it was: once, when this or another callback first asks where that is."""
        if self._to_go_on is None:
            return
        self._parts = Parts(trainer)
        own, self._to_go_on = self._to_go_on, None
        where = {"between_epochs": own["between_epochs"], "validation_waits": own["validation_waits"]}
        self._refuse(trainer, _refused_resumes.why_a_monitor_cannot_go_on(trainer, own["gathered"]))
        # Not as a Trainer tells it, which has counted the epoch's batches for the ranks that there are now.
        is_over = own["between_epochs"] or own["loops"][BATCHES]["is_last_batch"]
        self._refuse(trainer, _refused_resumes.why_loaders_are_elsewhere(trainer, is_over=is_over))
        _clean_point.put_loaders(trainer, between_epochs=own["between_epochs"], is_over=is_over)
        device = trainer.strategy.root_device
        trainer.callback_metrics.update({name: value.to(device) for name, value in own["logged"].items()})
        if own["stopped_early"] and callbacks_of_kind(trainer, EarlyStopping):
            trainer.should_stop = True
            rank_zero_warn(
                "an EarlyStopping had ended this run, and it ends here as well, without another batch. To train on, "
                "resume it without that callback"
            )
        if others := put_modes(self._parts, own["modes"]):
            rank_zero_warn(
                f"{_some(others)} had been frozen or unfrozen, or put into another mode, since the run began, and "
                "ExactResume puts that back. To train other parameters from here on, do it in on_train_epoch_start"
            )
        if own["moved"]:
            rank_zero_warn(
                f"training had moved {_some(own['moved'])}, which no checkpoint holds: here that is what __init__ has "
                "made. Where training goes by it, make it a buffer, or give it back from get_extra_state"
            )
        self._point = CleanPoint.of(trainer, self._parts, self.state_key, loops=own["loops"], **where)
        _clean_point.put_loops(trainer, **where)

    def _refuse(self, trainer: Trainer, why: str) -> None:
        if why and self.strict:
            save_nothing_for_the_exception(trainer)  # least of all over what was refused
            raise CheckpointError(why)
        if why:
            rank_zero_warn(why)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if names[3:] else "")


def _refuse_what_saves_no_point(trainer: Any, module: LightningModule) -> None:
    refuse_another_lightning("ExactResume", trainer)
    if not module.automatic_optimization or trainer.strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            "ExactResume needs a Trainer that decides when to step: automatic optimization, and a strategy that does "
            f"not accumulate by its own count, got {type(trainer.strategy).__name__}"
        )
    refuse_stochastic_averaging("ExactResume", trainer)
    if len(averages := callbacks_of_kind(trainer, WeightAveraging)) > 1:
        raise MisconfigurationException(
            f"{' and '.join(type(one).__name__ for one in averages)} in one run: a checkpoint has room for the average "
            "of one, and in a validation each would put the other's away. Take one"
        )


def _refuse_loaders_and_schedules(trainer: Any) -> None:
    loaders = COMBINED_LOADER.of(trainer.fit_loop).flattened
    lengths = [math.inf if (length := sized_len(loader)) is None else length for loader in loaders]
    resumable = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
    if len(set(lengths)) > 1 and resumable and trainer.num_training_batches > min(lengths):
        raise MisconfigurationException(
            f"a CombinedLoader reads a {type(resumable[0]).__name__} beside a loader of another length (batches: "
            f"{', '.join(map(str, lengths))}), and goes on behind the end of the shorter one, which would be resumed "
            'in another pass. Take the mode "min_size", or one TwoStreamBatchSampler over both'
        )
    if (longest := longest_window(trainer)) > 1 and any(
        isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers
    ):
        raise MisconfigurationException(
            f"LBFGS evaluates the loss many times a step, and of a window of {longest} micro-batches a Trainer repeats "
            "the last one only: the gradient would be none of the window's. Take accumulate_grad_batches=1 and larger "
            "batches, or another optimizer"
        )
    if any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise MisconfigurationException(
            'a ReduceLROnPlateau with interval="step" is stepped behind what a checkpoint of its step holds: take '
            '"epoch"'
        )
