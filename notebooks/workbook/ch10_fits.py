"""How chapter 10's exercises look at an answer: it is trained and counted, and then judged by a rehearsal as well."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from rehearse import rehearse

MakeRun = Callable[[], Any]
STILL = "what was counted is right, and a rehearsal still finds this:"


class Uneven(Exception):
    """The ranks have different numbers of batches: trained, they would wait for each other without an end."""


class Record(Callback):
    """What a fit is given and does."""

    def __init__(self) -> None:
        self.epochs: list[list[list[int]]] = []
        """The indices of each batch of each epoch; of batches without indices, their size."""
        self.rates: list[float] = []
        self.gradients: list[Tensor] = []
        """Those of each optimizer step, flat."""
        self.weights: list[list[Tensor]] = []
        """What each step has left."""
        self.counts: list[int] = []
        """The batches of an epoch on each rank."""
        self.samples = 0
        """Of the dataset."""
        self.rate_at_end = 0.0
        """That of a step after the last one."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # What a step was made with: the module's own hooks, which may divide a gradient, come after every callback's.
        trainer.optimizers[0].register_step_post_hook(partial(self._note_step, pl_module))
        self.samples = len(trainer.train_dataloader.dataset)
        if trainer.world_size > 1:
            own = sum(1 for _ in trainer.train_dataloader.batch_sampler)
            counts: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(counts, own)
            self.counts = counts
            if len(set(counts)) > 1:
                raise Uneven

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append([])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.epochs[-1].append(batch[2].tolist() if len(batch) == 3 else [len(batch[0])])

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient: where a sum and a count are returned, the sum comes first")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.rate_at_end = trainer.optimizers[0].param_groups[0]["lr"]

    def _note_step(self, pl_module: Any, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.gradients.append(torch.cat([p.grad.reshape(-1).double() for p in pl_module.parameters()]))
        self.weights.append([p.detach().clone() for p in pl_module.parameters()])


def fit(run: Any, callback: Callback) -> None:
    if not (isinstance(run, tuple | list) and len(run) == 3):
        values = f" of {len(run)} values" if isinstance(run, tuple | list) else ""
        raise ValueError(f"the function should return (trainer, model, data), got {type(run).__name__}{values}")
    trainer, model, data = run
    trainer.callbacks.append(callback)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data)


def fitted(run: Any) -> Record:
    record = Record()
    fit(run, record)
    return record


def fault_of_rehearsal(make_run: MakeRun) -> str | None:
    for finding in rehearse(*make_run()).findings:
        return f"{STILL} {finding.says}"
    return None
