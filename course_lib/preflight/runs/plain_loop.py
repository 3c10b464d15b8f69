"""A loop without a Trainer, as the trials ask for it: its epochs are those of its loader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.preflight.checks.setup import MOST_BATCHES, WINDOWS, FirstSteps, Watch
from course_lib.preflight.runs.lightning_run import Enough, LightningRun
from course_lib.preflight.runs.schedule_walk import walked
from course_lib.preflight.runs.started import Started
from course_lib.steps import plan_steps


@dataclass
class PlainLoop:
    """What ``preflight_loop`` is given. Each window steps once, the short last one of an epoch as well."""

    model: nn.Module
    loader: Any
    loss_fn: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: Any
    accumulate_grad_batches: int
    max_epochs: int

    world_size = 1
    is_limited = False
    reloads = False
    overfits = False

    def start(
        self,
        folder: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        prepare_loader: Callable[[Any], None] | None = None,
        on_train_start: Callable[..., None],
    ) -> None:
        """Call the hook, as a Trainer does when it has made its loaders ready."""
        if prepare_loader is not None and isinstance(self.loader, torch.utils.data.DataLoader):
            prepare_loader(self.loader)
        with contextlib.suppress(Enough):
            on_train_start(None, self.model)

    def loaders(self) -> list[Any]:
        return [self.loader]

    def begin_epoch(self, epoch: int) -> None:
        """What most loops do before an epoch."""
        for sampler in (self.loader.sampler, self.loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def asked_again(self) -> Any:
        return None

    def counted_batches(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:
            return None

    def counted_after_validation(self) -> int | None:
        return None

    def started(self, folder: Path) -> Started:
        """The plan of the loop and the rates of its schedule, which is stepped after each update. For a trial."""
        batches = self.counted_batches()
        plan = None
        if batches:
            plan = plan_steps(
                batches, 1, accumulate_grad_batches=self.accumulate_grad_batches, max_epochs=self.max_epochs
            )
        follows_metric = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        config = SimpleNamespace(
            scheduler=self.scheduler, interval="step", frequency=1, reduce_on_plateau=follows_metric
        )
        return Started(
            world_size=1,
            automatic=True,
            optimizers=1,
            batches=batches,
            batches_without_limit=batches,
            per_rank_batch_size=getattr(self.loader, "batch_size", None),
            drop_last=bool(getattr(self.loader, "drop_last", False)),
            samples=len(self.loader.dataset) if hasattr(getattr(self.loader, "dataset", None), "__len__") else None,
            limit_train_batches=1.0,
            accumulate_grad_batches=self.accumulate_grad_batches,
            max_epochs=self.max_epochs,
            max_steps=-1,
            max_time=False,
            overfits=False,
            plan=plan,
            why_no_plan="" if batches else "the loader has no length" if batches is None else "the run has no batch",
            schedules=(walked(config, plan.micro_batches),) if plan and self.scheduler is not None else (),
        )

    def first_steps(self, folder: Path) -> FirstSteps:
        """Train the first windows. For a trial."""
        watch = Watch(self.model)
        watch.look()
        batches = 0
        for batch in self.loader:
            (self.loss_fn(self.model, batch) / self.accumulate_grad_batches).backward()  # type: ignore[no-untyped-call]
            batches += 1
            if batches % self.accumulate_grad_batches == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if batches >= min(MOST_BATCHES, WINDOWS * self.accumulate_grad_batches):
                break
        if not batches:
            raise RuntimeError("the run has no batch")
        optimizers = [self.optimizer]
        return FirstSteps(batches, 0, watch.parameters(optimizers), watch.strangers(optimizers))


AnyRun = LightningRun | PlainLoop
