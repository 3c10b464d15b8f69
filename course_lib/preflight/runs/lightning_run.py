"""A Trainer's run in the process of a trial: it is put on the CPU, made silent, and started up to a point.

Nothing here imports Lightning: its classes are asked from the Trainer that is given, which comes from ``lightning`` or
from ``pytorch_lightning``.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

WRITING = {"Checkpoint", "ProgressBar", "ModelSummary", "EarlyStopping", "Preflight"}
"""Callbacks that a trial leaves out, by the names of their classes: they write, print, or wait for a validation."""


class Enough(BaseException):
    """Ends a trial's fit: what was wanted has been seen."""


@dataclass
class LightningRun:
    """What is given to ``Trainer.fit``, and the calls that trials make of it."""

    trainer: Any
    model: Any
    data: Any

    @property
    def world_size(self) -> int:
        return int(self.trainer.world_size)

    def start(
        self,
        folder: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        prepare_loader: Callable[[Any], Any] | None = None,
        ckpt_path: Path | None = None,
        averages: bool = False,
        **hooks: Callable[..., None],
    ) -> None:
        """Fit, as one of ``world_size`` ranks, until a hook raises :class:`Enough`.

        ``prepare_loader`` is called with each training loader that the Trainer has made ready, and may return another
        to take its place. ``ckpt_path`` is resumed from. ``hooks`` are callback hooks by name, called after those of
        the run's own callbacks. Other ranks are pretended: the process group says who this rank is, and its
        collectives return at once with what this rank gave. With ``averages`` the run's own DDP strategy wraps the
        model for that group; otherwise the model is trained as on one device.
        """
        self._calm_down(folder)
        self._become_rank(rank, world_size, averages)
        if prepare_loader is not None:
            self._prepare_loaders_by(prepare_loader)
        self.trainer.callbacks.append(Probe(hooks))
        if hasattr(self.data, "prepare_data") and hasattr(self.data, "train_dataloader"):
            how = {"datamodule": self.data}
        elif self.data is not None:
            how = {"train_dataloaders": self.data}
        else:
            how = {}
        if ckpt_path is not None:
            how |= {"ckpt_path": ckpt_path, "weights_only": False}
        try:
            self.trainer.fit(self.model, **how)
        except Enough:
            return

    def _calm_down(self, folder: Path) -> None:
        trainer = self.trainer
        module = _module_of(trainer)
        trainer.callbacks[:] = [callback for callback in trainer.callbacks if not is_any_of(callback, WRITING)]
        if trainer.loggers:
            trainer.loggers = [importlib.import_module(f"{module}.loggers.logger").DummyLogger()]
        trainer._default_root_dir = str(folder)
        trainer.num_sanity_val_steps = 0
        trainer.limit_val_batches = 0
        trainer._data_connector.prepare_data = lambda: None  # it may download, and write

    def _become_rank(self, rank: int, world_size: int, averages: bool) -> None:
        trainer = self.trainer
        connector, module = trainer._accelerator_connector, _module_of(trainer)
        forget_process_group()
        if world_size > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
            groups: Any = dist.distributed_c10d._world.pg_map
            groups[dist.group.WORLD] = ("fake", PretendedStore())
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
            strategy.cluster_environment = PretendedEnvironment(rank, world_size)
            strategy._launcher = None  # nobody else is to be started
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

        trainer._data_connector._requires_distributed_sampler = requires_distributed_sampler
        sampler_arguments = {"num_replicas": world_size, "rank": rank} if world_size > 1 else None
        as_rank = {"distributed_sampler_kwargs": sampler_arguments, "num_devices": world_size}
        # These two are properties of the class, which asks the strategy's type.
        trainer.__class__ = type(type(trainer).__name__, (type(trainer),), as_rank)

    def _prepare_loaders_by(self, prepare_loader: Callable[[Any], Any]) -> None:
        connector = self.trainer._data_connector
        as_lightning = connector._prepare_dataloader

        def prepared(dataloader: Any, *arguments: Any, **options: Any) -> Any:
            loader = as_lightning(dataloader, *arguments, **options)
            if not isinstance(loader, torch.utils.data.DataLoader):
                return loader
            other = prepare_loader(loader)
            return loader if other is None else other

        connector._prepare_dataloader = prepared

    def loaders(self) -> list[Any]:
        """The training loaders as the Trainer made them again, when it has started."""
        combined = self.trainer.fit_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def begin_epoch(self, epoch: int) -> None:
        """Do what the Trainer does between two epochs and before one: its hooks, the loader again, set_epoch."""
        if epoch > 0:
            self.trainer.fit_loop.epoch_progress.current.processed = epoch
            self.call_hooks("on_train_epoch_end")
        self.turn_to_epoch(epoch)
        self.call_hooks("on_train_epoch_start")

    def turn_to_epoch(self, epoch: int) -> None:
        """Begin an epoch without its hooks, as a run does that is resumed within it."""
        loop = self.trainer.fit_loop
        loop.epoch_progress.current.processed = loop.epoch_progress.current.completed = epoch
        loop.setup_data()
        for loader in self.loaders():
            importlib.import_module(type(loop).__module__)._set_sampler_epoch(loader, epoch)

    def call_hooks(self, name: str) -> None:
        """Call a hook of all callbacks and of the module, as far as they go."""
        calls = importlib.import_module(f"{_module_of(self.trainer)}.trainer.call")
        with contextlib.suppress(Exception):  # it may want what only a whole epoch leaves behind
            calls._call_callback_hooks(self.trainer, name)
            calls._call_lightning_module_hook(self.trainer, name)

    def asked_again(self) -> Any:
        """The training loader as the module or data module would make it now; None where it was given as a loader."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        if not loop._data_source.is_module():
            return None
        loader = loop._data_source.dataloader()
        process = importlib.import_module(type(loop).__module__)._process_dataloader
        return process(trainer, trainer.state.fn, trainer.state.stage, loader)

    def counted_batches(self) -> int | None:
        """The micro-batches that the Trainer counts in the epoch that it has begun; None without a length."""
        batches = self.trainer.fit_loop.max_batches
        return None if math.isinf(batches) else int(batches)

    def counted_after_validation(self) -> int | None:
        """The micro-batches that the Trainer counts when a validation within the epoch has ended; None without one."""
        trainer, batches = self.trainer, self.counted_batches()
        every = trainer.val_check_batch
        if batches is None or not isinstance(every, int) or every >= batches:
            return None
        self.call_hooks("on_validation_end")
        return self.counted_batches()

    @property
    def max_epochs(self) -> int:
        """``-1`` without a limit; without the epoch that StochasticWeightAveraging adds, in which nothing steps."""
        for callback in self.trainer.callbacks:
            if is_any_of(callback, {"StochasticWeightAveraging"}):
                return int(getattr(callback, "_max_epochs", self.trainer.max_epochs))
        return -1 if self.trainer.max_epochs is None else int(self.trainer.max_epochs)

    @property
    def accumulate_grad_batches(self) -> int | dict[int, int]:
        """Micro-batches in a window, or what a GradientAccumulationScheduler says by epoch."""
        for callback in self.trainer.callbacks:
            if is_any_of(callback, {"GradientAccumulationScheduler"}):
                return dict(callback.scheduling)
        return int(self.trainer.accumulate_grad_batches)

    @property
    def accumulates_exactly(self) -> bool:
        """Whether ``training_step`` returns a sum and its count, for ExactAccumulation."""
        return any(is_any_of(callback, {"ExactAccumulation"}) for callback in self.trainer.callbacks)

    @property
    def reloads(self) -> bool:
        return bool(self.trainer.reload_dataloaders_every_n_epochs)

    @property
    def overfits(self) -> bool:
        return bool(self.trainer.overfit_batches)

    @property
    def is_limited(self) -> bool:
        """Whether the Trainer trains a part of each epoch only; 1 is one batch, 1.0 is all."""
        limit = self.trainer.limit_train_batches
        return not isinstance(limit, float) or limit != 1.0


class Probe:
    """A callback made of the hooks that are given."""

    state_key = _legacy_state_key = "preflight"

    def __init__(self, hooks: dict[str, Callable[..., None]]) -> None:
        self._hooks = hooks

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "state_dict":
            return dict
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return self._hooks.get(name, nothing)
        raise AttributeError(name)


def nothing(*_: Any, **__: Any) -> None:
    return None


@dataclass
class PretendedEnvironment:
    """A cluster in which this process is one of several that exist already."""

    rank: int
    size: int
    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    def world_size(self) -> int:
        return self.size

    def global_rank(self) -> int:
        return self.rank

    def local_rank(self) -> int:
        return self.rank

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        """It is known."""

    def set_global_rank(self, rank: int) -> None:
        """It is known."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """They are pretended."""

    def teardown(self) -> None:
        """Nothing was set up."""


class PretendedStore:
    """A process group's store in which all other ranks have set what this one sets."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._last = b""

    def set(self, key: str, value: str | bytes) -> None:
        self._last = value if isinstance(value, bytes) else value.encode()
        self._values[key] = self._last

    def get(self, key: str) -> bytes:
        return self._values.get(key, self._last)

    def wait(self, keys: list[str], timeout: object = None) -> None:
        """Nothing is waited for."""

    def check(self, keys: list[str]) -> bool:
        return True


_forgotten: list[Any] = []


def forget_process_group() -> None:
    """Have no process group in this process any more, without ending it: its threads did not come along in a fork."""
    if not dist.is_initialized():
        return
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    _forgotten.append((dict(world.pg_map), c10d.GroupMember.WORLD))  # destroyed, a group would wait for its threads
    c10d._update_default_pg(None)
    for groups in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        groups.clear()
    world.tags_to_pg.clear()
    world.pg_coalesce_state.clear()
    world.group_count = 0
    c10d._unregister_all_process_groups()


def seed_as_another_process(number: int) -> None:
    """Seed the global generators as they would be in a process that was started without a seed."""
    seeds = np.random.SeedSequence([2026, number]).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # noqa: NPY002
    torch.manual_seed(int(seeds[2]))


def is_trainer(trainer: Any) -> bool:
    return _module_of(trainer) != ""


def _module_of(trainer: Any) -> str:
    """``"lightning.pytorch"`` or ``"pytorch_lightning"``; empty for anything that is no Trainer."""
    for cls in type(trainer).__mro__:
        module = cls.__module__
        if cls.__name__ == "Trainer" and module.endswith(".trainer.trainer"):
            return str(module.removesuffix(".trainer.trainer"))
    return ""


def is_any_of(callback: Any, names: set[str]) -> bool:
    return any(cls.__name__ in names for cls in type(callback).__mro__)
