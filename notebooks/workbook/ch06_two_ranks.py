"""What chapter 06 looks through: a network that remembers its batches, in a real Trainer, on one rank or on several."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from course_lib.launch import RankError, run_ranks
from workbook.display import quiet_lightning, wrapped

Batches = list[list[int]]
QUIET: dict[str, Any] = dict(
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)
FLAG_OFF: dict[str, Any] = {"use_distributed_sampler": False}


class Recorder(LightningModule):
    """A network that learns nothing and remembers the indices of every batch."""

    def __init__(self, make_loader: Callable[[], Any]) -> None:
        super().__init__()
        self.make_loader = make_loader
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[int]]] = []

    def train_dataloader(self) -> Any:
        return self.make_loader()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, batch.tolist()))
        return self.weight * 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    make_batch_sampler: Callable[[], Any],
    num_samples: int,
    epochs: int = 1,
    loader: Any = DataLoader,
    loader_made: str = "in train_dataloader",
    ckpt_path: str | None = None,
    **flags: Any,
) -> list[Batches]:
    """Train on all ranks; return the batches that this rank was given in each epoch."""

    def make_loader() -> Any:
        return loader(range(num_samples), batch_sampler=make_batch_sampler())

    torch.manual_seed(0)  # alike on all ranks, as most scripts do
    quiet_lightning()
    devices, strategy = 1, "auto"
    if dist.is_initialized():
        devices, strategy = dist.get_world_size(), "ddp"
    ranks = {"devices": devices, "strategy": strategy}
    trainer = Trainer(**QUIET | ranks | {"max_epochs": epochs} | flags)
    model = Recorder(make_loader)
    if loader_made == "before fit":
        trainer.fit(model, make_loader(), ckpt_path=ckpt_path)
    else:
        trainer.fit(model, ckpt_path=ckpt_path)
    by_epoch: list[Batches] = [[] for _ in range(epochs)]
    for epoch, batch in model.seen:
        by_epoch[epoch].append(batch)
    return by_epoch


def fit_on_ranks(
    make_batch_sampler: Callable[[], Any],
    num_samples: int,
    ranks: int = 2,
    **options: Any,
) -> list[list[Batches]]:
    """What each rank was given: ``[rank][epoch]`` is a list of batches."""

    def on_rank(rank: int) -> list[Batches]:
        return fit(make_batch_sampler, num_samples, **options)

    return [result.value for result in run_ranks(on_rank, ranks)]


def outcome(make_batch_sampler: Callable[[], Any], num_samples: int, **options: Any) -> Any:
    """What each of two ranks was given, or the beginning of the error."""
    try:
        return fit_on_ranks(make_batch_sampler, num_samples, **options)
    except RankError as error:
        return wrapped(shorten(error.reports[0].error, 165, placeholder=" …"))


class EpochAsGradient(Recorder):
    """Its gradient is the number of the epoch: DDP averages those of the ranks."""

    def __init__(self, make_loader: Callable[[], Any]) -> None:
        super().__init__(make_loader)
        self.gradients: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx)
        return self.weight * float(self.current_epoch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(self.weight.grad.item())  # type: ignore[union-attr]


def three_epochs(
    rank: int, make_batch_sampler: Callable[[], Any], max_steps: int = -1
) -> tuple[list[int], list[float]]:
    """For each step of this rank: its epoch, and the gradient that DDP has averaged."""
    quiet_lightning()
    ends = {"max_epochs": 3, "max_steps": max_steps}
    trainer = Trainer(**QUIET | FLAG_OFF | {"devices": 2, "strategy": "ddp"} | ends)
    samples: Any = range(10)
    batch_sampler = make_batch_sampler()
    model = EpochAsGradient(lambda: DataLoader(samples, batch_sampler=batch_sampler))
    trainer.fit(model)
    return [epoch for epoch, _ in model.seen], model.gradients


def fit_both_ways(rank: int, make_batch_sampler: Callable[[], Any], num_samples: int) -> dict[str, Any]:
    """Three epochs without the Trainer's own sampler, and three under its default flags: the batches, or the error."""
    told: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {"flag off": FLAG_OFF, "default flags": {}}
    for name, flags in ways.items():
        try:
            told[name] = fit(make_batch_sampler, num_samples, epochs=3, **flags)
        except TypeError as error:
            told[name] = shorten(f"TypeError: {error}", 62, placeholder=" …")
    return told


def stream_of(index: int) -> str:
    """To which stream of the chapter's job an index belongs."""
    if index < 20:
        return "primary"
    return "secondary" if index >= 100 else "neither"


def as_asked(batches: Batches) -> int:
    """How many batches hold two samples of each stream, of 0 to 19 and of 100 on."""
    wanted = ["primary", "primary", "secondary", "secondary"]
    return sum(sorted(map(stream_of, batch)) == wanted for batch in batches)


def missing_and_twice(
    ranks: Sequence[Batches],
    expected: Collection[int],
) -> tuple[int, int]:
    """How many expected indices nobody has seen, and how many came more than once."""
    uses = Counter(index for batches in ranks for batch in batches for index in batch)
    missing = sum(uses[index] == 0 for index in expected)
    twice = sum(uses[index] > 1 for index in expected)
    return missing, twice


def summary(ranks: Sequence[Any], num_samples: int) -> str:
    """The result of a run in one line; ``ranks[rank][epoch]`` are batches, or ``ranks[rank]`` is an error."""
    if isinstance(ranks[0], str):
        return ranks[0]
    epochs = list(zip(*ranks, strict=True))
    counts = [missing_and_twice(epoch, range(num_samples)) for epoch in epochs]
    orders = {str(epoch) for epoch in epochs}
    missing, twice = zip(*counts, strict=True)
    return f"missing {list(missing)}, twice {list(twice)}, different orders: {len(orders)}"


def stop_and_resume(
    make_batch_sampler: Callable[[], Any],
    loader: Any,
    ranks: Sequence[int] = (2,),
    epochs: int = 1,
    callbacks: Sequence[Any] = (),
) -> tuple[list[Batches], list[list[list[Batches]]]]:
    """28 samples on two ranks, stopped after step 3 and resumed from the checkpoint.

    Returns what each rank was given before the stop, and for each number of ranks to go
    on with what they were given afterwards: ``[epoch][rank]``.
    """
    with tempfile.TemporaryDirectory() as folder:
        keep = ModelCheckpoint(folder, filename="stopped", every_n_train_steps=3)
        options: dict[str, Any] = dict(loader=loader)
        stop: dict[str, Any] = dict(max_steps=3, enable_checkpointing=True, callbacks=[keep, *callbacks])
        before = fit_on_ranks(make_batch_sampler, 28, **stop, **options)
        options |= dict(ckpt_path=str(Path(folder, "stopped.ckpt")), callbacks=[*callbacks])
        resumed = []
        for number in ranks:
            after = fit_on_ranks(make_batch_sampler, 28, number, epochs=epochs, **options)
            resumed.append([list(epoch) for epoch in zip(*after, strict=True)])
    return [of_rank[0] for of_rank in before], resumed
