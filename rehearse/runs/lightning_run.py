"""A Trainer's run in the process of a trial: it is put on the CPU, made silent, and started up to a point.

Nothing here imports Lightning: its classes are asked from the Trainer that is given, which comes from ``lightning`` or
from ``pytorch_lightning``. Its insides are touched here, and as little as possible in the checks.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rehearse import _lightning
from rehearse._checkpoints import Saves, is_any_of, is_by_the_author, is_lightnings, saves_of
from rehearse._held_out import length_of
from rehearse.runs.hooks import Probe, nothing
from rehearse.runs.loaders import cut_batches, read, stop_workers
from rehearse.runs.pretended_ranks import join_pretended_group, pretended_environment
from rehearse.runs.run import (
    Batch,
    Enough,
    Settings,
    Started,
    planned,
    seed_as_another_process,
)
from rehearse.runs.walks import schedules_alive, walked

Found = TypeVar("Found")
WRITING = {"Checkpoint", "ProgressBar", "ModelSummary", "EarlyStopping", "Rehearsal"}
"""Callbacks that a trial leaves out, by the names of their classes: they write, print, or wait for a validation."""
SHORT_EPOCH = 2
"""Batches of training, and of its validation, where a whole epoch is tried."""
MOST_EPOCHS = 50
"""Epochs for which a loader that is made again in each is asked for its length."""


@dataclass
class LightningRun:
    """What is given to ``Trainer.fit``."""

    trainer: Any
    model: Any
    data: Any
    val_dataloaders: Any = None
    saves: Sequence[Saves] = ()
    """When it saves, once it has started: a trial leaves out the callbacks that say so."""
    samples_tried: int = 0
    """Of each batch, in this process; 0: all. See ``few_samples``."""
    _limit_val_batches: int | float = 1.0
    """As it was given, once it has started: a trial leaves out the validation."""

    @property
    def cannot_count_averages(self) -> str:
        """Why it is not seen where the ranks average; empty where it is."""
        strategy = self.trainer.strategy
        if self.trainer.world_size == 1 or is_any_of(strategy, {"DDPStrategy"}):
            return ""
        return f"{type(strategy).__name__} averages by itself, and not as DDP"

    def start(
        self,
        folder: Path,
        *,
        rank: int = 0,
        world_size: int | None = None,
        workers: bool = False,
        prepare_loader: Callable[[Any], Any] | None = None,
        ckpt_path: Path | None = None,
        averages: bool = False,
        validates: bool = False,
        **hooks: Callable[..., None],
    ) -> None:
        """Fit, as one of ``world_size`` ranks (those of the run), until a hook raises :class:`Enough`.

        Loaders fetch in this process, but with ``workers``. ``prepare_loader`` is called with each training loader that
        is ready, and may return another to take its place. ``ckpt_path`` is resumed from. ``hooks`` are callback hooks
        by name, called after those of the run's own callbacks. Other ranks are pretended: the process group says who
        this rank is, and its collectives return at once with what this rank gave. With ``averages`` the run's own DDP
        strategy wraps the model for that group; otherwise the model is trained as on one device. ``validates``: one
        epoch of two batches, and its validation, which is left out otherwise.
        """
        self.saves = saves_of(self.trainer, self.model)
        self._limit_val_batches = self.trainer.limit_val_batches
        self._calm_down(folder, validates)
        self._become_rank(rank, self.trainer.world_size if world_size is None else world_size, averages)
        self._prepare_loaders_by(prepare_loader, workers)
        self.trainer.callbacks.append(Probe(hooks))
        if self.has_data_module and hasattr(self.data, "train_dataloader"):
            how = {"datamodule": self.data}
        else:
            how = {"train_dataloaders": self.data, "val_dataloaders": self.val_dataloaders}
        if ckpt_path is not None:
            how |= {"ckpt_path": ckpt_path, "weights_only": False}
        with contextlib.suppress(Enough):
            self.trainer.fit(self.model, **how)

    def at_start(self, folder: Path, look: Callable[[], Found], **options: Any) -> Found | None:
        """What ``look()`` returns when the run has started; None where it has no batch. ``options``: see start."""
        found: list[Found] = []

        def look_and_end(*_: Any) -> None:
            found.append(look())
            raise Enough

        self.start(folder, on_train_start=look_and_end, **options)
        return found[0] if found else None

    @property
    def has_data_module(self) -> bool:
        return hasattr(self.data, "prepare_data")

    def _calm_down(self, folder: Path, validates: bool) -> None:
        trainer = self.trainer
        module = _module_of(trainer)
        trainer.callbacks[:] = [callback for callback in trainer.callbacks if not is_any_of(callback, WRITING)]
        if trainer.loggers:
            silent = importlib.import_module(f"{module}.loggers.logger").DummyLogger
            of_folder = {"save_dir": str(folder), "log_dir": str(folder), "root_dir": str(folder)}
            trainer.loggers = [type("SilentLogger", (silent,), of_folder)()]
        _lightning.ROOT_FOLDER.put(trainer, str(folder))
        trainer.num_sanity_val_steps = 0
        if validates:
            self._shorten_the_epoch()
        else:
            trainer.limit_val_batches = 0
        _lightning.DATA_CONNECTOR.of(trainer).prepare_data = lambda: None  # it may download, and write

    def _shorten_the_epoch(self) -> None:
        trainer = self.trainer
        trainer.limit_train_batches = SHORT_EPOCH
        trainer.limit_val_batches = SHORT_EPOCH if trainer.limit_val_batches else 0
        trainer.check_val_every_n_epoch, trainer.val_check_interval = 1, 1.0
        _lightning.VALIDATION_SECONDS.put(trainer, None)
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 1, -1

    def _become_rank(self, rank: int, world_size: int, averages: bool) -> None:
        trainer = self.trainer
        connector, module = _lightning.ACCELERATOR_CONNECTOR.of(trainer), _module_of(trainer)
        join_pretended_group(rank, world_size)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        if "PL_GLOBAL_SEED" not in os.environ:
            seed_as_another_process(rank)
        strategies = importlib.import_module(f"{module}.strategies")
        accelerators = importlib.import_module(f"{module}.accelerators")
        precisions = importlib.import_module(f"{module}.plugins.precision")
        precision = trainer.strategy.precision_plugin
        if type(precision).__name__ in ("MixedPrecision", "FSDPPrecision", "DeepSpeedPrecision"):
            precision = precisions.Precision()
        accelerator = accelerators.CPUAccelerator()
        if averages:
            strategy = trainer.strategy
            strategy.precision_plugin = precision
            strategy.accelerator, strategy.parallel_devices = accelerator, [torch.device("cpu")] * world_size
            strategy.cluster_environment = pretended_environment(rank, world_size)
            _lightning.LAUNCHER.put(strategy, None)  # nobody else is to be started
        else:
            strategy = strategies.SingleDeviceStrategy("cpu", accelerator, precision_plugin=precision)
            strategy.global_rank = strategy.local_rank = rank
            strategy.world_size = world_size
        wants_sampler = connector.use_distributed_sampler and world_size > 1
        connector.strategy = strategy

        def requires_distributed_sampler(loader: Any) -> bool:
            own = isinstance(loader.sampler, torch.utils.data.DistributedSampler)
            stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
            return wants_sampler and not own and not stream

        _lightning.WANTS_DISTRIBUTED_SAMPLER.put(_lightning.DATA_CONNECTOR.of(trainer), requires_distributed_sampler)
        sampler_arguments = {"num_replicas": world_size, "rank": rank} if world_size > 1 else None
        as_rank = {"distributed_sampler_kwargs": sampler_arguments, "num_devices": world_size}
        # These two are properties of the class, which asks the strategy's type.
        trainer.__class__ = type(type(trainer).__name__, (type(trainer),), as_rank)

    def _prepare_loaders_by(self, prepare: Callable[[Any], Any] | None, workers: bool) -> None:
        connector = _lightning.DATA_CONNECTOR.of(self.trainer)
        as_lightning = _lightning.PREPARE_LOADER.of(connector)

        def prepared(dataloader: Any, *arguments: Any, **options: Any) -> Any:
            loader = as_lightning(dataloader, *arguments, **options)
            if not isinstance(loader, torch.utils.data.DataLoader):
                return loader
            if not workers:
                stop_workers(loader)
            other = None if prepare is None else prepare(loader)
            ready = loader if other is None else other
            if self.samples_tried:
                cut_batches(ready, self.samples_tried)
            return ready

        _lightning.PREPARE_LOADER.put(connector, prepared)

    # ----------------------------------------------------------------------------------------------------- its settings

    @property
    def settings(self) -> Settings:
        trainer = self.trainer
        max_epochs = trainer.max_epochs
        accumulate_grad_batches: int | dict[int, int] = self.window
        for callback in trainer.callbacks:
            if is_any_of(callback, {"StochasticWeightAveraging"}):  # it adds an epoch, in which nothing steps
                max_epochs = _lightning.EPOCHS_BEFORE_AVERAGING.of_set(callback, max_epochs)
            if is_any_of(callback, {"GradientAccumulationScheduler"}):
                accumulate_grad_batches = dict(callback.scheduling)
        ddp = _lightning.DDP_OPTIONS.of(trainer.strategy) if is_any_of(trainer.strategy, {"DDPStrategy"}) else {}
        others = self._limit_val_batches, trainer.limit_test_batches, trainer.limit_predict_batches
        return Settings(
            accumulate_grad_batches=accumulate_grad_batches,
            max_epochs=-1 if max_epochs is None else int(max_epochs),
            max_steps=int(trainer.max_steps),
            max_time=any(type(callback).__name__ == "Timer" for callback in trainer.callbacks),
            limit_train_batches=trainer.limit_train_batches,
            limits_others=any(isinstance(limit, int) and limit > 0 for limit in others),
            overfits=bool(trainer.overfit_batches),
            reloads=bool(trainer.reload_dataloaders_every_n_epochs),
            automatic=bool(getattr(self.model, "automatic_optimization", True)),
            world_size=int(trainer.world_size),
            finds_unused=bool(ddp.get("find_unused_parameters") or ddp.get("static_graph")),
            precision=str(trainer.precision),
        )

    @property
    def window(self) -> int:
        return int(self.trainer.accumulate_grad_batches)

    @property
    def batches_begun(self) -> int:
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.trainer.optimizers)

    @property
    def global_step(self) -> int:
        return int(self.trainer.global_step)

    # ----------------------------------------------------------------------------------------------------- its loaders

    def loaders(self) -> list[Any]:
        """The training loaders, as they were made ready."""
        combined = _lightning.COMBINED_LOADER.of(self.trainer.fit_loop)
        return [] if combined is None else list(combined.flattened)

    def begin_epoch(self, epoch: int) -> None:
        """Do what the run does between two epochs and before one: its hooks, the loader again, set_epoch."""
        if epoch > 0:
            loop = self.trainer.fit_loop
            loop.epoch_progress.current.processed = epoch
            # Some hooks seed by the number of micro-batches so far.
            loop.epoch_loop.batch_progress.total.ready += self.counted_batches() or 1
            self.call_hooks("on_train_epoch_end")
        self.turn_to_epoch(epoch)
        self.call_hooks("on_train_epoch_start")

    def turn_to_epoch(self, epoch: int) -> None:
        """Begin an epoch without its hooks, as a run does that is resumed within it."""
        loop = self.trainer.fit_loop
        loop.epoch_progress.current.processed = loop.epoch_progress.current.completed = epoch
        loop.setup_data()
        for loader in self.loaders():
            _lightning.TURN_SAMPLER.of(importlib.import_module(type(loop).__module__))(loader, epoch)

    def call_hooks(self, name: str) -> None:
        """Call a hook of all callbacks and of the module, as far as they go."""
        module = importlib.import_module(f"{_module_of(self.trainer)}.trainer.call")
        calls = [private.of(module) for private in (_lightning.CALL_CALLBACKS, _lightning.CALL_MODULE)]
        with contextlib.suppress(Exception):  # it may want what only a whole epoch leaves behind
            for call in calls:
                call(self.trainer, name)

    def asked_again(self) -> Any:
        """The training loader as the module or data module would make it now; None where it was given as a loader."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        source = _lightning.DATA_SOURCE.of(loop)
        if not source.is_module():
            return None
        process = _lightning.PROCESS_LOADER.of(importlib.import_module(type(loop).__module__))
        return process(trainer, trainer.state.fn, trainer.state.stage, source.dataloader())

    def counted_batches(self) -> int | None:
        """The micro-batches that are counted in the epoch that has begun; None without a length."""
        batches = self.trainer.fit_loop.max_batches
        return None if math.isinf(batches) else int(batches)

    def counted_after_validation(self) -> int | None:
        """The same when a validation within the epoch has ended; None without one."""
        trainer, batches = self.trainer, self.counted_batches()
        every = trainer.val_check_batch
        if batches is None or not isinstance(every, int) or every >= batches:
            return None
        self.call_hooks("on_validation_end")
        return self.counted_batches()

    def read_on(self, most: int | None = None, *, begin: bool = False) -> tuple[Batch, ...]:
        """Read what the Trainer has begun: another ``iter`` would begin the epoch again."""
        fetcher = _lightning.DATA_FETCHER.of(self.trainer.fit_loop)
        if begin:
            iter(fetcher)
        return read((batch for batch, _, _ in iter(lambda: next(fetcher, None), None)), most)

    def states(self) -> bytes:
        """Pickled: the states of the training loaders, and of the data module, as a checkpoint holds them."""
        module = self.data.state_dict() if self.has_data_module else {}
        combined = _lightning.COMBINED_LOADER.of(self.trainer.fit_loop)
        return pickle.dumps((_lightning.LOADER_STATES.of(combined)(), module))

    def load_states(self, states: bytes, epoch: int) -> None:
        """Before the start: resume the loaders from :meth:`states`, within an epoch."""
        loaders, module = pickle.loads(states)
        loop = self.trainer.fit_loop
        loop.epoch_progress.current.processed = loop.epoch_progress.current.completed = epoch
        _lightning.STATES_TO_LOAD.put(loop, loaders)
        _lightning.RESTARTING.put(loop, True)
        if module:
            self.data.load_state_dict(module)

    # ---------------------------------------------------------------------------------------------- the step by itself

    def training_step(self, model: Any, batch: Any) -> Any:
        step = type(model).training_step
        arguments = (batch, 0)[: len(inspect.signature(step).parameters) - 1]
        own = {name: vars(model)[name] for name in ("log", "log_dict") if name in vars(model)}
        model.__dict__.update(log=nothing, log_dict=nothing)
        try:
            return step(model, *arguments)
        finally:
            for name in ("log", "log_dict"):
                model.__dict__.pop(name)
            model.__dict__.update(own)

    def loss_of(self, model: Any, batch: Any) -> Tensor:
        """With ExactAccumulation, ``training_step`` returns a sum and its count, as a pair or in a dict."""
        model.trainer = self.trainer
        output = self.training_step(model, batch)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if any(is_any_of(callback, {"ExactAccumulation"}) for callback in self.trainer.callbacks):
            if isinstance(output, Mapping):
                return loss / output["count"]
            if isinstance(output, tuple | list):
                return output[0] / output[1]
        if not isinstance(loss, Tensor):
            raise ValueError(f"training_step gave {type(loss).__name__} for one big batch")
        return loss

    # ------------------------------------------------------------------------------------------- what it says, started

    def started(self, folder: Path) -> Started:
        started = self.at_start(folder, self._with_schedules)
        # A fit of 0 batches returns before training starts; it has made its loaders by then.
        return started if started is not None else self._with_plans()

    def _with_schedules(self) -> Started:
        started = self._with_plans()
        plans = [plan for plan in (started.plan, *started.other_plans.values()) if plan]
        batches = max([1, *(plan.micro_batches for plan in plans)])
        epochs = max([1, *(plan.epochs_completed + 1 for plan in plans)])
        schedules = []
        for config in self.trainer.lr_scheduler_configs if started.automatic else ():
            interval, calls = str(config.interval), epochs if config.interval == "epoch" else batches
            told = interval, int(config.frequency), bool(config.reduce_on_plateau)
            schedules.append(walked(config.scheduler, *told, calls))
        if not plans and started.batches and started.max_epochs > 0:
            batches = started.batches * started.max_epochs
        own = [walked(schedule, "step", 1, False, batches) for schedule in self.schedules_of_its_own()]
        return replace(started, schedules=tuple(schedules), own_schedules=tuple(own))

    def schedules_of_its_own(self) -> list[Any]:
        """Schedules of its optimizers that the run itself does not step; asked when it has started."""
        stepped = {id(c.scheduler) for c in self.trainer.lr_scheduler_configs} if self.settings.automatic else set()
        return [schedule for schedule in schedules_alive(self.optimizers) if id(schedule) not in stepped]

    def own_hooks(self, *names: str) -> list[tuple[Any, str]]:
        """Those of these hooks that the run's author has written, each behind the module or callback that has it."""
        of_model = [(self.model, name) for name in names if not is_lightnings(self.model, name)]
        return of_model + [
            (callback, name)
            for callback in self.trainer.callbacks
            for name in names
            if is_by_the_author(str(getattr(callback, name, nothing).__module__))
        ]

    def schedules_stepped(self) -> list[Any]:
        """Those that nobody but the run is to step."""
        if not self.settings.automatic or not is_lightnings(self.model, "lr_scheduler_step"):
            return []
        return [config.scheduler for config in self.trainer.lr_scheduler_configs]

    def _with_plans(self) -> Started:
        loaders = self.loaders()
        loader = loaders[0] if len(loaders) == 1 else None
        sampler = getattr(loader, "batch_sampler", None)
        started = Started(
            **vars(self.settings),
            optimizers=len(self.optimizers),
            batches=self.counted_batches(),
            batches_without_limit=length_of(loader),
            per_rank_batch_size=getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None),
            drop_last=bool(getattr(loader, "drop_last", False)),
            samples=length_of(getattr(loader, "dataset", None)),
        )
        if started.reloads and started.automatic and started.batches and 1 < started.max_epochs <= MOST_EPOCHS:
            started = replace(started, batches_by_epoch=tuple(self._counted_by_epoch(started.max_epochs)))
        samplers = [getattr(loader, "batch_sampler", None) for loader in self.loaders()]
        return planned(started, getattr(samplers[0], "plan", None) if len(samplers) == 1 else None)

    def _counted_by_epoch(self, epochs: int) -> Iterator[int]:
        for epoch in range(epochs):
            self.begin_epoch(epoch)
            yield max(1, int(self.trainer.fit_loop.max_batches))


def is_trainer(trainer: Any) -> bool:
    return _module_of(trainer) != ""


def _module_of(trainer: Any) -> str:
    """``"lightning.pytorch"`` or ``"pytorch_lightning"``; empty for anything that is no Trainer."""
    for cls in type(trainer).__mro__:
        module = cls.__module__
        if cls.__name__ == "Trainer" and module.endswith(".trainer.trainer"):
            return str(module.removesuffix(".trainer.trainer"))
    return ""
