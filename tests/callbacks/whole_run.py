"""One small run that has everything: BatchNorm, dropout, clipping, a schedule, a bad sample, skips, an audit, saves."""

import datetime
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from course_lib.callbacks import (
    CheckpointError,
    ExactAccumulation,
    ExactResume,
    SizeScheduleDataModule,
    SkipBadSteps,
    StepAudit,
)
from course_lib.resume import ResumableDataLoader
from course_lib.schedules import SizeSchedule
from tests.trainer_oracle import quiet_trainer

BAD_SAMPLE = 7
EPOCHS = 3


class Killed(BaseException):
    """Nothing of the run comes after it but what a Trainer saves on an exception."""


class Samples(Dataset):
    def __init__(self, n):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 6, generator=generator)
        self.y = torch.randint(3, (n,), generator=generator)
        self.x[BAD_SAMPLE] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def cut(sample, size):
    """Only the first features of a sample: what stands for the size of an image."""
    x, y, index = sample
    return torch.cat([x[:size], torch.zeros(len(x) - size)]), y, index


class Everything(LightningModule):
    def __init__(self, steps):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        self.steps = steps
        self.samples = []

    def training_step(self, batch):
        x, y, indices = batch
        self.samples.append(indices.tolist())
        loss_sum = nn.functional.cross_entropy(self.net(x), y, reduction="sum")
        self.maybe_die("forward")
        return loss_sum, len(y)

    def validation_step(self, batch):
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.net(x), y))

    def maybe_die(self, place):
        for callback in self.trainer.callbacks:
            if isinstance(callback, Dies):
                callback.at(place)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Dies(Callback):
    """Raises Killed at a place of the n-th micro-batch of this process, or calls what is given."""

    PLACES = ("start", "forward", "before step", "within step", "after step", "end", "validation")

    def __init__(self, micro_batch, place, how=None):
        self.micro_batch, self.place = micro_batch, place
        self.how = how
        self.begun = 0

    def at(self, place):
        if (self.begun, place) == (self.micro_batch, self.place):
            if self.how is not None:
                self.how()
            else:
                raise Killed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.begun += 1
        self.at("start")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.at("before step")

    def on_train_start(self, trainer, pl_module):
        trainer.optimizers[0].register_step_pre_hook(lambda *_: self.at("within step"))
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.at("after step"))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.at("end")

    def on_validation_start(self, trainer, pl_module):
        self.at("validation")


SAVES = {
    "every step": dict(every_n_train_steps=1, filename="{step}"),
    "every epoch": dict(filename="{epoch}"),
    "validation": dict(monitor="val", filename="{epoch}-{step}"),
    "a time": dict(train_time_interval=datetime.timedelta(microseconds=1)),
    "an exception": dict(save_on_exception=True, every_n_train_steps=2),
}


def train(
    folder, *, saves="every step", ckpt_path=None, dies=None, k=4, n=46, batch_size=3, sized=False, seed=0, workers=0,
    callbacks=None, steps=12, **flags,
):  # fmt: skip
    """Train to the end, and return the module, the Trainer and the audit. ``seed`` is that of the process."""
    torch.manual_seed(seed)
    module, samples, audit = Everything(steps), Samples(n), StepAudit()
    if callbacks is None:
        callbacks = [ExactAccumulation(), SkipBadSteps(), ExactResume()]
    checkpoints = ModelCheckpoint(folder, save_top_k=-1, **SAVES[saves])
    flags = dict(max_epochs=EPOCHS, accumulate_grad_batches=k, gradient_clip_val=0.7, val_check_interval=3) | flags
    if sized:
        schedule = SizeSchedule({0: (3, 4), 1: (6, 3)}, accumulate_grad_batches=flags.pop("accumulate_grad_batches"))
        data = SizeScheduleDataModule(samples, schedule, cut, seed=3, num_workers=workers)
        flags |= dict(val_check_interval=1.0, limit_val_batches=0)
        given = dict(datamodule=data)
    else:
        loader = ResumableDataLoader(samples, batch_size=batch_size, shuffle=True, seed=3, num_workers=workers)
        held_out = TensorDataset(samples.x[20:30], samples.y[20:30])
        given = dict(train_dataloaders=loader, val_dataloaders=DataLoader(held_out, 4))
    trainer = quiet_trainer(
        callbacks=[*([dies] if dies else []), *callbacks, audit, checkpoints],
        **flags,
    )
    trainer.fit(module, ckpt_path=ckpt_path, weights_only=False, **given)
    return module, trainer, audit


def newest(folder):
    paths = sorted(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return paths[-1] if paths else None


def resume(folder, refused, **arguments):
    """Go on from the newest checkpoint that is not refused, and keep the sentences of those that are."""
    while path := newest(folder):
        try:
            return train(folder, ckpt_path=path, **arguments)
        except CheckpointError as error:
            refused.append(str(error))
            path.unlink()
    return train(folder, **arguments)


def state_of(module):
    return [tensor.clone() for tensor in module.state_dict().values()]


def same(state, other):
    return all(torch.equal(a, b) for a, b in zip(state, other, strict=True))
