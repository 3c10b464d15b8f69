"""What checks may ask of a run, and what it says of itself when it has started.

A Trainer's run and a plain loop answer the same questions. Where a check cannot be made on one of them, the run says
why in ``cannot``. Everything here is called in the process of a trial (see ``copies``), unless it says otherwise.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from course_lib.steps import StepPlan, plan_steps
from rehearse._held_out import length_of
from rehearse.runs.loaders import cut_batches, deal_indices, indices_of, stop_workers
from rehearse.runs.walks import WalkedSchedule

Batch = tuple[int, ...]
"""The indices of a batch that was dealt; of a stream, a number for each sample's content."""
MOST_INDICES = 300_000
"""The largest dataset whose epochs are dealt in a few seconds."""
Found = TypeVar("Found")


class Enough(BaseException):
    """Ends a trial's training: what was wanted has been seen."""


class TrainingRun(ABC):
    """A run that has not begun, and the calls that trials make of it."""

    model: Any
    samples_tried = 0
    """Of each batch, in this process; 0: all. See :func:`with_few_samples`."""

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """Of a Trainer."""
        return ()

    @property
    def cannot(self) -> dict[str, str]:
        """The checks that cannot be made on such a run, and why."""
        return {}

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """As they are now: a data module, or a callback, may change them when the run starts."""

    @property
    @abstractmethod
    def window(self) -> int:
        """Micro-batches in the window that is going on."""

    @property
    @abstractmethod
    def batches_begun(self) -> int:
        """Micro-batches of the whole run, the one that is trained included."""

    @property
    @abstractmethod
    def optimizers(self) -> list[Optimizer]:
        """Those that it steps; asked when it has started."""

    @property
    def global_step(self) -> int:
        """What ``max_steps`` is held against."""
        return 0

    def schedules_of_its_own(self) -> list[Any]:
        """Schedules of its optimizers that the run itself does not step; asked when it has started."""
        return []

    def own_hooks(self, *names: str) -> list[tuple[Any, str]]:
        """Those of these hooks that the run's author has written, each behind the module or callback that has it."""
        return []

    def schedules_stepped(self) -> list[Any]:
        """Those that nobody but the run is to step."""
        return []

    @abstractmethod
    def started(self, folder: Path) -> Started:
        """A trial: what the run says of itself when it has started."""

    def _as_started(self) -> Started:
        """What both kinds of run say, without a plan."""
        loaders = self.loaders()
        loader = loaders[0] if len(loaders) == 1 else None
        sampler = getattr(loader, "batch_sampler", None)
        return Started(
            **vars(self.settings),
            optimizers=len(self.optimizers),
            batches=self.counted_batches(),
            batches_without_limit=length_of(loader),
            per_rank_batch_size=getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None),
            drop_last=bool(getattr(loader, "drop_last", False)),
            samples=length_of(getattr(loader, "dataset", None)),
        )

    @abstractmethod
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
        """Train, as one of ``world_size`` ranks (those of the run), until a hook raises :class:`Enough`.

        Loaders fetch in this process, but with ``workers``. ``prepare_loader`` is called with each training loader that
        is ready, and may return another to take its place. ``ckpt_path`` is resumed from. ``hooks`` are a Trainer's
        callback hooks by name, called after those of the run's own callbacks; a plain loop calls ``on_train_start``,
        ``on_train_batch_start``, ``on_before_optimizer_step`` and ``on_train_batch_end``. Other ranks are pretended:
        the process group says who this rank is, and its collectives return at once with what this rank gave. With
        ``averages`` the run's own DDP strategy wraps the model for that group; otherwise the model is trained as on
        one device. ``validates``: one epoch of two batches, and its validation, which is left out otherwise.
        """

    def at_start(self, folder: Path, look: Callable[[], Found], **options: Any) -> Found | None:
        """What ``look()`` returns when the run has started; None where it has no batch. ``options``: see start."""
        found: list[Found] = []

        def look_and_end(*_: Any) -> None:
            found.append(look())
            raise Enough

        self.start(folder, on_train_start=look_and_end, **options)
        return found[0] if found else None

    @abstractmethod
    def train_on(self, folder: Path, after_step: Callable[[], None]) -> None:
        """Train beyond the run's end, epoch after epoch, until ``after_step()`` raises :class:`Enough`.

        It is called after each micro-batch of a Trainer, and after each window of a plain loop.
        """

    # ------------------------------------------------------------------------------------------- the loaders, started

    @abstractmethod
    def loaders(self) -> list[Any]:
        """The training loaders, as they were made ready."""

    @abstractmethod
    def begin_epoch(self, epoch: int) -> None:
        """Do what the run does between two epochs and before one: its hooks, the loader again, set_epoch."""

    def asked_again(self) -> Any:
        """The training loader as the module or data module would make it now; None where it was given as a loader."""
        return None

    @abstractmethod
    def counted_batches(self) -> int | None:
        """The micro-batches that are counted in the epoch that has begun; None without a length."""

    def counted_after_validation(self) -> int | None:
        """The micro-batches that are counted when a validation within the epoch has ended; None without one."""
        return None

    def fetch_here(self, loader: Any) -> None:
        """Have a loader fetch in this process."""
        stop_workers(loader)

    def deal(self, loader: Any, workers: int = 0) -> None:
        """Have a loader deal indices in place of samples, in this process or with so many workers."""
        deal_indices(loader, workers)

    def read(self, batches: Iterator[Any], most: int | None = None) -> tuple[Batch, ...]:
        """The next batches that were dealt; all that come, by default."""
        return tuple(tuple(indices_of(batch)) for batch in islice(batches, most))

    def _ready(self, loader: Any, workers: bool, prepare: Callable[[Any], Any] | None) -> Any:
        if not isinstance(loader, DataLoader):
            return loader
        if not workers:
            stop_workers(loader)
        other = None if prepare is None else prepare(loader)
        ready = loader if other is None else other
        if self.samples_tried:
            cut_batches(ready, self.samples_tried)
        return ready

    # -------------------------------------------------------------------------------------------- the step by itself

    @abstractmethod
    def loss_of(self, model: Any, batch: Any) -> Tensor:
        """The loss of a batch, as the run makes it with its model or with a copy of it."""

    @abstractmethod
    def training_step(self, model: Any, batch: Any) -> Any:
        """What the model's step returns for a batch; what it logs is dropped."""

    # ------------------------------------------------------------------- callbacks and checkpoints, where there are any

    def validation(self) -> Validation | None:
        """What there is of one, and who monitors what; to be asked before a start. None where that is not known."""
        return None

    def saving(self, batches: int, window: int) -> Saving:
        """When the run saves, with so many micro-batches in an epoch and in a window."""
        return Saving()

    def turn_to_epoch(self, epoch: int) -> None:
        """Begin an epoch without its hooks, as a run does that is resumed within it."""
        raise NotImplementedError

    def read_on(self, most: int | None = None, *, begin: bool = False) -> tuple[Batch, ...]:
        """The next batches of an epoch; all that are left, by default. The first epoch begins by itself."""
        raise NotImplementedError

    def states(self) -> bytes:
        """Pickled: the states of the training loaders, and of the data module, as a checkpoint holds them."""
        raise NotImplementedError

    def load_states(self, states: bytes, epoch: int) -> None:
        """Before the start: resume the loaders from :meth:`states`, within an epoch."""
        raise NotImplementedError


@dataclass(frozen=True)
class Settings:
    """What a run is told, in a Trainer's words; the defaults are those of a plain loop."""

    accumulate_grad_batches: int | dict[int, int]
    """Micro-batches in a window; a dict says it by epoch."""
    max_epochs: int
    """``-1`` without a limit, as ``max_steps``."""
    max_steps: int = -1
    max_time: bool = False
    limit_train_batches: int | float = 1.0
    """1 is one batch, 1.0 is all."""
    limits_others: bool = False
    """Whether its validation, test or prediction is a number of batches, too: it is short by choice."""
    overfits: bool = False
    """Whether it trains on the same few batches."""
    reloads: bool = False
    """Whether the loader is made again between epochs."""
    automatic: bool = True
    """Whether windows step by these settings, and not by the module's own code."""
    world_size: int = 1
    tried_world_sizes: tuple[int, ...] = (1,)
    """The numbers of ranks that its batches can be dealt to, beside its own."""
    finds_unused: bool = False
    """Whether DDP is told to look for unused parameters."""
    precision: str = "32-true"

    @property
    def is_limited(self) -> bool:
        """Whether a part of each epoch is trained only."""
        return not isinstance(self.limit_train_batches, float) or self.limit_train_batches != 1.0

    @property
    def ends_with_its_epochs(self) -> bool:
        """Whether nothing but the number of its epochs ends the run."""
        return self.max_steps == -1 and not self.is_limited


class Monitor(NamedTuple):
    """Who waits for a value that is to be logged."""

    who: str
    name: str
    strict: bool
    """Whether it raises where the value is not there."""
    every_epochs: int = 0
    """How often it asks; 0 where that is not at the ends of epochs."""


class Validation(NamedTuple):
    """What a run says of its validation before it starts."""

    exists: bool = False
    """Whether there is a validation step."""
    may_be_given: bool = False
    """Whether its data may be given to the fit, so that it is not known here."""
    every_epochs: int | None = 1
    """Epochs between two validations; None where they are counted in batches."""
    monitors: tuple[Monitor, ...] = ()


class Saving(NamedTuple):
    """When a run saves."""

    at_all: bool = False
    setting: str = ""
    """The setting that has the run save within an epoch; empty where none does."""
    epoch: int = 0
    batch: int = 0
    """Micro-batches of that epoch that are done at the first save within one."""
    inside_window: bool = False
    """Whether the run may save inside a window as well."""


def with_few_samples(run: TrainingRun, trial: Callable[[Path], Found], samples: int) -> Callable[[Path], Found]:
    """The trial, with so many samples in each batch: a step takes as long as its samples do."""

    def few(folder: Path) -> Found:
        run.samples_tried = samples
        return trial(folder)

    return few


def seed_as_another_process(number: int) -> None:
    """Seed the global generators as they would be in a process that was started without a seed."""
    seeds = np.random.SeedSequence([2026, number]).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # noqa: NPY002
    torch.manual_seed(int(seeds[2]))


# --------------------------------------------------------------------------------- what a run says when it has started


@dataclass(frozen=True)
class Started(Settings):
    """A started run on rank 0, in plain values."""

    optimizers: int = 1
    batches: int | None = None
    """Micro-batches of an epoch on one rank; None where the loader has no length."""
    batches_without_limit: int | None = None
    per_rank_batch_size: int | None = None
    drop_last: bool = False
    samples: int | None = None
    batches_by_epoch: tuple[int, ...] = ()
    """Where the loader is made again in each epoch, the micro-batches of each."""
    plan: StepPlan | None = None
    why_no_plan: str = ""
    other_plans: dict[str, StepPlan] = field(default_factory=dict)
    """What the run would be without a setting that cuts it short, by the setting's name."""
    schedules: tuple[WalkedSchedule, ...] = ()
    """Those that a Trainer steps; of a plain loop, the one that it was given."""
    own_schedules: tuple[WalkedSchedule, ...] = ()
    """Others of the run's optimizers, which nobody but the module's own code can step."""


def planned(started: Started, planner: Any = None) -> Started:
    """With its plan and those without a setting that cuts it short; ``planner``: a batch sampler's own, or None."""
    why = _why_no_plan(started)
    if why:
        return replace(started, why_no_plan=why)
    others = {}
    if started.max_steps != -1 and started.max_epochs != -1:
        others["max_steps"] = replace(started, max_steps=-1)
    whole = started.batches_without_limit
    if whole not in (None, started.batches):
        others["limit_train_batches"] = replace(started, batches=whole, limit_train_batches=1.0)
    plans = {name: _plan(other, planner) for name, other in others.items()}
    return replace(started, plan=_plan(started, planner), other_plans=plans)


def _why_no_plan(started: Started) -> str:
    if not started.automatic:
        return "with manual optimization, the module's own code decides when to step"
    if started.batches is None:
        return "the loader has no length"
    if started.batches == 0:
        return "the run has no batch"
    if started.max_epochs == -1 and started.max_steps == -1:
        return "neither max_epochs nor max_steps ends this run"
    return ""


def _plan(started: Started, planner: Any) -> StepPlan:
    stops: dict[str, Any] = {"max_epochs": started.max_epochs, "max_steps": started.max_steps}
    if planner is not None and not started.overfits:
        plan: StepPlan = planner(limit_train_batches=started.limit_train_batches, **stops)
        return plan
    assert started.batches is not None
    if len(set(started.batches_by_epoch)) > 1:
        # So many samples that each epoch's batches are all full: only their number counts here.
        samples = math.lcm(*started.batches_by_epoch)
        sizes = {epoch: samples // batches for epoch, batches in enumerate(started.batches_by_epoch)}
        return plan_steps(samples, sizes, accumulate_grad_batches=started.accumulate_grad_batches, **stops)
    # Each batch counts as one sample: how many samples are in it is not asked here.
    return plan_steps(started.batches, 1, accumulate_grad_batches=started.accumulate_grad_batches, **stops)
