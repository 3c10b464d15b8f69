"""A loop without a Trainer, as the trials ask for it: its epochs are those of its loader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rehearse._held_out import length_of
from rehearse.runs.run import Enough, Settings, Started, TrainingRun, planned
from rehearse.runs.walks import walked


@dataclass
class PlainLoop(TrainingRun):
    """What ``rehearse_loop`` is given. Each window steps once, the short last one of an epoch as well."""

    model: nn.Module
    loader: Any
    loss_fn: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: Any
    batches_of_window: int
    epochs: int
    _begun: int = 0

    @property
    def cannot(self) -> dict[str, str]:
        return {
            "no_sync": "where a plain loop's ranks meet is its own code's",
            "bad_step": "a plain loop steps by its own code",
            "resume": "a plain loop saves and resumes by its own code",
        }

    @property
    def settings(self) -> Settings:
        return Settings(self.batches_of_window, self.epochs)

    @property
    def window(self) -> int:
        return self.batches_of_window

    @property
    def batches_begun(self) -> int:
        return self._begun

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def start(
        self, folder: Path, *, workers: bool = False, prepare_loader: Callable[[Any], Any] | None = None, **hooks: Any
    ) -> None:
        """Train an epoch until a hook raises :class:`Enough`; see :meth:`TrainingRun.start`."""

        def call(name: str, *arguments: Any) -> None:
            if name in hooks:
                hooks[name](None, self.model, *arguments)

        self.loader = self._ready(self.loader, workers, prepare_loader)
        self.optimizer.register_step_pre_hook(lambda optimizer, *_: call("on_before_optimizer_step", optimizer))
        with contextlib.suppress(Enough):
            call("on_train_start")
            self.optimizer.zero_grad()
            for number, batch in enumerate(self.loader):
                self._begun += 1
                call("on_train_batch_start", batch, number)
                self._backward(batch)
                if self._begun % self.window == 0 or self._begun == self.counted_batches():
                    self._step()
                call("on_train_batch_end", None, batch, number)

    def train_on(self, folder: Path, after_step: Callable[[], None]) -> None:
        self.loader = self._ready(self.loader, False, None)
        with contextlib.suppress(Enough):
            while self.counted_batches() != 0:
                for batch in self.loader:
                    self._begun += 1
                    self._backward(batch)
                    if self._begun % self.window == 0:
                        self._step()
                        after_step()

    def _backward(self, batch: Any) -> None:
        (self.loss_fn(self.model, batch) / self.window).backward()  # type: ignore[no-untyped-call]

    def _step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loaders(self) -> list[Any]:
        return [self.loader]

    def begin_epoch(self, epoch: int) -> None:
        """What most loops do before an epoch."""
        for sampler in (self.loader.sampler, self.loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def counted_batches(self) -> int | None:
        return length_of(self.loader)

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss_fn(model, batch)

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss_fn(model, batch)

    def started(self, folder: Path) -> Started:
        """The plan of the loop and the rates of its schedule, which is stepped after each update."""
        started = planned(self._as_started())
        if started.plan is None or self.scheduler is None:
            return started
        follows_metric = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        schedule = walked(self.scheduler, "step", 1, follows_metric, started.plan.micro_batches)
        return replace(started, schedules=(schedule,))
