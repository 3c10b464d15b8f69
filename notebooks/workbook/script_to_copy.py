"""A training script to copy: a run that may be killed at any moment, and goes on by the command that started it.

    python train.py runs/first                          # one process
    torchrun --nproc-per-node=2 train.py runs/first     # two ranks; after a kill also another number of them
    python -m rehearse train:make_run       # is the run right? Before it costs a night

Replace the first half, a dataset and a `Task`, by your own; `script_to_copy_tokens.py` has those of a language model.
Where the samples grow during the run, a `SizeScheduleDataModule` takes the place of `Loaders`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from course_lib.callbacks import ExactAccumulation, ExactResume, SkipBadSteps, StepAudit, run_so_far
from course_lib.datasets import load_digits
from course_lib.resume import ResumableDataLoader
from course_lib.steps import plan_steps

# ------------------------------------------------------------------------------- the data and the model: your own


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Handwritten digits of 8 × 8 pixels; those that are trained on are shifted at random, and noisy."""

    def __init__(self, first: int, last: int, *, augmented: bool) -> None:
        images, labels = load_digits()
        self.images, self.labels, self.augmented = images[first:last], labels[first:last], augmented

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augmented:  # the same after a kill: the loader seeds each sample
            image = image.roll(int(torch.randint(-1, 2, ())), dims=-1) + 0.1 * torch.randn_like(image)
        return image, self.labels[index]


class Task:
    seed, epochs, num_workers = 0, 5, 2
    batch_size, window = 16, 2  # of a rank: samples of a micro-batch, micro-batches of an optimizer step
    save_every = 10  # optimizer steps: what a kill costs at most
    learning_rate, clip_norm = 0.01, 1.0

    @staticmethod
    def datasets() -> tuple[Any, Any]:
        """What is trained on, and what is validated on."""
        return Digits(0, 800, augmented=True), Digits(800, 1000, augmented=False)

    @staticmethod
    def net() -> nn.Module:
        """The network, with new weights."""
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    @staticmethod
    def loss_sum_and_count(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The sum of a batch's losses, and how many it is the sum of: samples, or the labels that count."""
        images, labels = batch
        return F.cross_entropy(net(images), labels, reduction="sum"), torch.tensor(len(labels), device=labels.device)


# ---------------------------------------------------------------------------------------- the training: to be copied


class Training(LightningModule):
    def __init__(self, task: type[Task]) -> None:
        super().__init__()
        self.task, self.net = task, task.net()

    def training_step(self, batch: Any) -> Any:
        loss_sum, count = self.task.loss_sum_and_count(self.net, batch)
        self.log("train_loss", (loss_sum / count).detach())
        return loss_sum, count

    def validation_step(self, batch: Any) -> None:
        loss_sum, count = self.task.loss_sum_and_count(self.net, batch)
        self.log("val_loss", loss_sum / count, batch_size=int(count), sync_dist=True)

    def configure_optimizers(self) -> Any:
        data: Loaders = self.trainer.datamodule  # type: ignore[attr-defined]
        run: dict[str, Any] = {"max_epochs": self.task.epochs, **run_so_far(self.trainer)}
        run |= {"accumulate_grad_batches": self.task.window, "world_size": self.trainer.world_size}
        plan = plan_steps(len(data.train_set), self.task.batch_size, **run)
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.task.learning_rate)
        schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * plan.progress(step))))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Loaders(LightningDataModule):
    def __init__(self, task: type[Task]) -> None:
        super().__init__()
        self.options: dict[str, Any] = dict(batch_size=task.batch_size, seed=task.seed, num_workers=task.num_workers)
        self.train_set, self.val_set = task.datasets()

    def train_dataloader(self) -> ResumableDataLoader:
        return ResumableDataLoader(self.train_set, shuffle=True, **self.options)

    def val_dataloader(self) -> ResumableDataLoader:
        return ResumableDataLoader(self.val_set, **self.options)


def make_run(
    folder: Path = Path("runs/check"), task: type[Task] = Task, callbacks: Sequence[Callback] = ()
) -> tuple[Trainer, Training, Loaders]:
    """The Trainer, the model and the data, for as many ranks as there are now."""
    seed_everything(task.seed, verbose=False)
    ranks, ranks_here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    saved = folder / "checkpoints"
    by_name: dict[str, Any] = {"enable_version_counter": False}  # also where the folder was moved: no last-v1.ckpt
    last = ModelCheckpoint(saved, every_n_train_steps=task.save_every, save_top_k=0, save_last=True, **by_name)
    best = ModelCheckpoint(saved, filename="best", monitor="val_loss", **by_name)
    trainer = Trainer(
        max_epochs=task.epochs, accumulate_grad_batches=task.window, gradient_clip_val=task.clip_norm,
        devices=ranks_here, num_nodes=ranks // ranks_here, strategy="ddp" if ranks > 1 else "auto",
        deterministic=True, logger=CSVLogger(folder, name="log"), log_every_n_steps=5,
        callbacks=[ExactAccumulation(), SkipBadSteps(journal=folder / "skipped.jsonl"), StepAudit(strict=True),
                   ExactResume(), last, best, *callbacks],
    )  # fmt: skip
    return trainer, Training(task), Loaders(task)


def main(task: type[Task] = Task) -> None:
    """Start the run of a folder, or go on with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints, the log and the journal of skipped steps are")
    folder = parser.parse_args().folder
    trainer, model, data = make_run(folder, task)
    last = folder / "checkpoints" / "last.ckpt"
    trainer.fit(model, datamodule=data, ckpt_path=last if last.exists() else None)
    trainer.save_checkpoint(last, weights_only=False)  # the run's end, wherever save_every falls


if __name__ == "__main__":
    main()
