"""What the small runs have in common: the samples, a model, a Trainer that says nothing, and a callback that records.

A script in ``faults`` has one sentence that says what goes wrong, ``CHECK`` (the check that must find it),
``make_run()`` and ``make_twin()``, the right version of the same run. Both return ``(trainer, model, data)``, or, where
``LOOP`` is true, the arguments of ``rehearse_loop``. ``seen(*run)`` runs it and returns what it does: ``WRONG`` in the
faulty run and ``RIGHT`` in its twin. ``RANKS = 2`` says that this takes two ranks. The scripts in ``right`` have a
``make_run()`` alone.
"""

import importlib
import logging
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).parent
ACCELERATOR = "cpu"
"""Of the Trainers of all scripts."""


def scripts(folder: str) -> list[str]:
    """The names of the scripts in ``faults`` or ``right``, in their order."""
    return sorted(path.stem for path in (HERE / folder).glob("[0-9]*.py"))


def script(folder: str, name: str) -> ModuleType:
    return importlib.import_module(f"tests.rehearse.fits.{folder}.{name}")


class Points(Dataset):
    """Sample ``i`` is ``(x, y, i)``: four numbers, their target, and the index, so that a batch can be read."""

    def __init__(self, n: int = 64):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Net(LightningModule):
    """Two layers, a mean squared error, and plain SGD."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class SummedOverLabels(Net):
    """Its loss is four times the sum over the labels of a micro-batch; ``labels`` counts those of a window."""

    labels = 0

    def training_step(self, batch, batch_idx):
        x, y, indices = batch
        labelled = indices % 3 > 0
        self.labels = self.labels + labelled.sum()
        return 4 * (nn.functional.mse_loss(self(x), y, reduction="none").mean(1) * labelled).sum()


class Scheduled(Net):
    """A Net whose rate follows ``schedule(optimizer)``, stepped at each ``interval``."""

    def __init__(self, schedule, interval: str = "step"):
        super().__init__()
        self.schedule, self.interval = schedule, interval

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": self.interval},
        }


def loader(n: int = 64, batch_size: int = 8, **options) -> DataLoader:
    """Points in a new order in each epoch."""
    return DataLoader(Points(n), batch_size, **{"shuffle": True} | options)


def quiet_trainer(**flags) -> Trainer:
    """A Trainer on that accelerator, without logger, checkpoints, progress bar and model summary, for three epochs."""
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    length = {} if "max_steps" in flags or "max_epochs" in flags else {"max_epochs": 3}
    return Trainer(accelerator=ACCELERATOR, **quiet | length | flags)


class Record(Callback):
    """What a fit does: the ``samples`` and the number of ``batches`` of each epoch, its ``rates`` and ``updates``."""

    def __init__(self):
        self.samples: list[list[int]] = []
        self.batches: list[int] = []
        self.rates: list[float] = []
        self.updates = 0

    def on_fit_start(self, trainer, pl_module):
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self.count)

    def count(self, *_):
        self.updates += 1

    def on_train_epoch_start(self, trainer, pl_module):
        self.samples.append([])
        self.batches.append(0)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not self.batches:  # resumed within an epoch
            self.on_train_epoch_start(trainer, pl_module)
        self.batches[-1] += 1
        if isinstance(batch, (list, tuple)) and len(batch) == 3:
            self.samples[-1] += batch[2].tolist()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.optimizers:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    @property
    def final_percent(self) -> int:
        """The last rate in % of the highest."""
        return round(100 * self.rates[-1] / max(self.rates))


def fitted(trainer: Trainer, model: LightningModule, data: Any) -> Record:
    """The record of a real fit."""
    record = Record()
    trainer.callbacks.append(record)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data)
    return record


class Loop(NamedTuple):
    """What a plain loop does: the rate after each update, and the samples of each epoch."""

    rates: list[float]
    samples: list[list[int]]

    @property
    def final_percent(self) -> int:
        return round(100 * self.rates[-1] / max(self.rates))


def looped(model, loader, loss_fn, optimizer, *, scheduler=None, accumulate_grad_batches=1, max_epochs=1) -> Loop:
    """The loop that ``rehearse_loop`` takes the arguments of, as chapter 04 writes it: short windows step as well."""
    rates, samples = [], []
    for _ in range(max_epochs):
        samples.append([])
        for i, batch in enumerate(loader):
            samples[-1] += batch[2].tolist()
            (loss_fn(model, batch) / accumulate_grad_batches).backward()
            if (i + 1) % accumulate_grad_batches == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
    return Loop(rates, samples)


def mean_squared_error(model: nn.Module, batch) -> torch.Tensor:
    """The loss of a plain loop."""
    x, y, _ = batch
    return nn.functional.mse_loss(model(x), y)


def plain_net() -> nn.Module:
    """The net of a plain loop."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def rank_and_world() -> tuple[int, int]:
    """Of this process, also where no process group exists."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank gives, on each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
