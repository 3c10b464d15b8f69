"""The training script to copy: all that the book has, in one run that may be killed at any moment.

    python ch09_training_script.py runs/digits                                  # one process
    torchrun --nproc-per-node=2 ch09_training_script.py runs/digits             # two ranks
    torchrun --nnodes=2 ... --nproc-per-node=1 ch09_training_script.py runs/digits   # on each of two nodes

The same command starts a run and goes on with it, on as many ranks as there are now. The rule: *what decides the run is
planned, what happens to it is counted, and a checkpoint holds both.*

First the data and the model, which you replace by your own; then the training, which you copy.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from course_lib.callbacks import (
    ExactAccumulation,
    ExactResume,
    SizeScheduleDataModule,
    SkipBadSteps,
    StepAudit,
    run_so_far,
)
from course_lib.datasets import load_digits
from course_lib.memory import find_batch_sizes
from course_lib.schedules import SizeSchedule
from course_lib.steps import plan_steps

# ------------------------------------------------------------------------------------------------------------ the data

NUM_SAMPLES = 187
UNLABELLED = -100
"""The label of a sample that has none: it is in the batch, and not in the loss."""
BAD_SAMPLE = 7
"""Its image has a pixel that is NaN."""

Sample = tuple[Tensor, int, int]
"""Image, label, and the sample's number."""


def load_samples(num_samples: int = NUM_SAMPLES, *, bad: bool = True) -> list[Sample]:
    """Digits of 8 × 8 pixels; every fourth has no label, and one has a pixel that is NaN."""
    images, labels = load_digits()
    labels[::4] = UNLABELLED
    if bad:
        images[BAD_SAMPLE, 0, 3, 3] = math.nan
    return [(images[i], int(labels[i]), i) for i in range(num_samples)]


def render(sample: Sample, side: int) -> Sample:
    """The sample with ``side`` × ``side`` pixels."""
    image, label, number = sample
    larger = F.interpolate(image[None], size=(side, side), mode="bilinear", align_corners=False)
    return larger[0], label, number


# ----------------------------------------------------------------------------------------------------------- the model


def digit_net() -> nn.Module:
    """Two convolutions with BatchNorm; for square images of any side."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(2), MeanOfPixels(), nn.Dropout(0.1), nn.Linear(16, 10),
    )  # fmt: skip


class MeanOfPixels(nn.Module):
    """The mean of each channel, of shape (samples, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


# -------------------------------------------------------------------------------------------------------- the training

SIDES = {0: 8, 1: 12, 2: 16}
"""Pixels a side, from which epoch on."""
BUDGET_BYTES = 200_000
"""What a training step of one rank may hold."""
BATCH_SIZES = {8: 20, 12: 9, 16: 5}
"""By pixels a side: what :func:`find_batch_sizes_within` finds for the budget. Found once and written down, as a run
that is resumed on another machine must not find another answer."""
EPOCHS, WINDOW, SAVE_EVERY = 3, 4, 2
"""A window has as many micro-batches; a checkpoint is written after as many optimizer steps."""


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = digit_net()

    def training_step(self, batch: Sequence[Tensor]) -> Any:
        images, labels, _ = batch
        loss_sum = F.cross_entropy(self.net(images), labels, reduction="sum", ignore_index=UNLABELLED)
        return loss_sum, (labels != UNLABELLED).sum()

    def configure_optimizers(self) -> Any:
        data, ranks = self.trainer.datamodule, self.trainer.world_size  # type: ignore[attr-defined]
        run: dict[str, Any] = {"max_epochs": self.trainer.max_epochs, **run_so_far(self.trainer)}
        self.plan = plan_steps(len(data.dataset), data.schedule, world_size=ranks, **run)
        optimizer = AdamW(self.parameters(), lr=0.01)
        schedule = LambdaLR(optimizer, lambda n: 0.5 * (1 + math.cos(math.pi * self.plan.progress(n))))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(
    folder: Path, callbacks: Sequence[Callback] = (), *,
    sides: Mapping[int, int] = SIDES, max_epochs: int = EPOCHS,
) -> Trainer:  # fmt: skip
    """Start the run of a folder, or go on with it, on as many ranks as there are now."""
    seed_everything(0, verbose=False)
    ranks, ranks_here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    schedule = SizeSchedule.from_batch_sizes(sides, BATCH_SIZES, accumulate_grad_batches=WINDOW)
    data = SizeScheduleDataModule(load_samples(), schedule, render, seed=1)
    trainer = Trainer(
        max_epochs=max_epochs, gradient_clip_val=1.0, deterministic=True, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        devices=ranks_here, num_nodes=ranks // ranks_here, strategy="ddp" if ranks > 1 else "auto",
        callbacks=[ExactAccumulation(), SkipBadSteps(journal=folder / "skipped.jsonl"),
                   StepAudit(strict=True), ExactResume(), *callbacks,
                   ModelCheckpoint(folder, every_n_train_steps=SAVE_EVERY, save_last=True)],
    )  # fmt: skip
    trainer.fit(Digits(), datamodule=data, ckpt_path="last", weights_only=False)
    return trainer


# --------------------------------------------------------------------------------------------- before, and from a shell


def find_batch_sizes_within(budget_bytes: int) -> dict[int, int]:
    """By pixels a side: the largest batch of which a training step on the CPU stays within a budget."""
    net = digit_net()

    def batch_of(batch_size: int, side: int) -> tuple[Tensor, Tensor]:
        return torch.ones(batch_size, 1, side, side), torch.zeros(batch_size, dtype=torch.long)

    found = find_batch_sizes(SIDES.values(), net, batch_of, AdamW(net.parameters()), limit_bytes=budget_bytes)
    return {side: fitted.batch_size for side, fitted in found.items()}


def hash_of(weights: Iterable[Tensor]) -> str:
    """Equal for weights that are equal, bit for bit."""
    digest = hashlib.sha256()
    for tensor in weights:
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints and the journal are")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    arguments = parser.parse_args()
    trainer = train(arguments.folder, max_epochs=arguments.epochs)
    if trainer.is_global_zero:
        print(f"weights {hash_of(trainer.lightning_module.state_dict().values())}")


if __name__ == "__main__":
    main()
