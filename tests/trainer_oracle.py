"""A real Trainer that counts: what the plans are held against."""

import logging
import warnings
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Counted(NamedTuple):
    totals: tuple[int, int, int]
    """Optimizer steps, epochs of which every batch ran, micro-batches."""
    samples_per_step: list[int]


class CountingModule(LightningModule):
    """One weight; counts by the optimizer's own hook, not by a Trainer's counter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches_in_epoch = {}
        self.samples_per_step = []
        self.waiting = 0

    def training_step(self, batch):
        epoch = self.trainer.current_epoch
        ran, _ = self.batches_in_epoch.get(epoch, (0, 0))
        self.batches_in_epoch[epoch] = (ran + 1, self.trainer.num_training_batches)
        self.waiting += len(batch)
        return (self.weight * batch.float()).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.count_step)
        return optimizer

    def count_step(self, *_):
        self.samples_per_step.append(self.waiting)
        self.waiting = 0


def quiet_trainer(**flags):
    saves = any(isinstance(callback, Checkpoint) for callback in flags.get("callbacks", ()))
    quiet = dict(logger=False, enable_checkpointing=saves, enable_progress_bar=False, enable_model_summary=False)
    return Trainer(accelerator="cpu", **quiet | flags)


def count_real_fit(
    num_samples,
    batch_size,
    *,
    accumulate_grad_batches=1,
    drop_last=False,
    max_epochs=None,
    max_steps=-1,
    limit_train_batches=1.0,
    callbacks=(),
    **flags,
) -> Counted:
    """Fit a CountingModule; further flags go to the Trainer.

    A batch size of ``{epoch: size}`` is a loader that a hook makes anew in every epoch.
    """
    sizes = batch_size if isinstance(batch_size, dict) else {0: batch_size}

    def make_loader():
        size = sizes[max(epoch for epoch in sizes if epoch <= trainer.current_epoch)]
        return DataLoader(range(num_samples), size, shuffle=False, drop_last=drop_last)

    callbacks = list(callbacks)
    if isinstance(accumulate_grad_batches, dict):
        callbacks.append(GradientAccumulationScheduler(dict(accumulate_grad_batches)))
        accumulate_grad_batches = 1
    model = CountingModule()
    trainer = quiet_trainer(
        accumulate_grad_batches=accumulate_grad_batches,
        max_epochs=max_epochs,
        max_steps=max_steps,
        limit_train_batches=limit_train_batches,
        callbacks=callbacks,
        reload_dataloaders_every_n_epochs=1 if len(sizes) > 1 else 0,
        **flags,
    )
    model.train_dataloader = make_loader
    trainer.fit(model)
    ran = model.batches_in_epoch.values()
    return Counted(
        (len(model.samples_per_step), sum(n == of for n, of in ran), sum(n for n, _ in ran)),
        model.samples_per_step,
    )


def random_case(rng, world_size=1) -> dict:
    """Arguments that plan_steps and count_real_fit share."""

    def schedule(largest, first):
        if rng.random() < 2 / 3:
            return rng.randint(1, largest)
        return first | {rng.randint(1, 3): rng.randint(1, largest) for _ in range(2)}

    case = {
        "num_samples": rng.randint(1, 40 * world_size),
        "batch_size": schedule(10, {0: rng.randint(1, 10)}),
        "accumulate_grad_batches": schedule(7, {}),
        "drop_last": rng.random() < 0.5,
        "max_epochs": rng.choice([None, 0, 1, 2, 4]),
        "max_steps": rng.choice([-1, 0, 1, 2, 3, 5, 9]),
        "limit_train_batches": rng.choice([1.0, 1.0, 0, 1, 2, 5, 100, 0.4, 0.75, 0.99]),
    }
    if case["max_epochs"] is None and case["max_steps"] == -1:
        case["max_epochs"] = 3
    if isinstance(case["limit_train_batches"], float):
        # A Trainer refuses a share that rounds down to 0 of some batches; a plan says that nothing trains.
        sizes = case["batch_size"].values() if isinstance(case["batch_size"], dict) else [case["batch_size"]]
        if min(case["num_samples"] // world_size // size for size in sizes) < 3:
            case["limit_train_batches"] = 1.0
    return case
