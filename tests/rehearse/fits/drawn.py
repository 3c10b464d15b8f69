"""Runs that nobody wrote: right ones drawn from many pieces, and one fault planted in each.

``python -m tests.rehearse.fits.drawn SEED RUNS`` searches on, and prints what a rehearsal says wrongly.
"""

import math
import random
import sys
import tempfile
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, random_split

from course_lib.callbacks import SkipBadSteps, StepAudit
from course_lib.resume import ResumableDataLoader
from course_lib.samplers import ShuffledBatchSampler
from rehearse import rehearse
from tests.rehearse.fits.parts import Net, Points, quiet_trainer

BATCH = 8


@dataclass(frozen=True)
class Drawn:
    """A run in plain words; ``fault``: what is planted in it, or nothing."""

    body: str
    optimizer: str
    schedule: str
    window: int
    updates: int
    """Of an epoch."""
    epochs: int
    ends_by: str
    order: str
    workers: int
    persistent: bool
    augments: bool
    validates: bool
    every: int
    callbacks: tuple[str, ...]
    logger: bool
    precision: str
    clips: bool
    fault: str = ""

    @property
    def batches(self):
        return self.window * self.updates

    @property
    def samples(self):
        """Of the training: whole batches, but where a fault is to leave a rest."""
        return BATCH * self.batches + {"short last batch": 4 - BATCH, "last batch of one": 1}.get(self.fault, 0)

    def __str__(self):
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))


BODIES = ("plain", "batch norm", "dropout", "tied", "frozen", "frozen in evaluation mode", "attention")
SCHEDULES = (
    "none",
    "cosine",
    "one cycle",
    "linear to 0",
    "warm-up and cosine",
    "by epoch",
    "steps by epoch",
    "constant",
)
ORDERS = ("shuffled", "as it comes", "weighted", "subset", "drop_last", "random subset", "ours", "resumable")
CALLBACKS = ("rates", "stopping", "checkpoint", "every steps", "average", "skips", "audit")


def drawn(seed):
    """The right run of a seed."""
    draw = random.Random(seed)
    validates = draw.random() < 0.6
    run = Drawn(
        body=draw.choice(BODIES),
        optimizer=draw.choice(("SGD", "momentum", "AdamW", "groups")),
        schedule=draw.choice(SCHEDULES if not validates else (*SCHEDULES, "plateau")),
        window=draw.choice((1, 1, 2, 3)),
        updates=draw.randint(3, 6),
        epochs=draw.randint(2, 4),
        ends_by=draw.choice(("epochs", "epochs", "steps")),
        order=draw.choice(ORDERS),
        workers=draw.choice((0, 0, 1, 2)),
        persistent=draw.random() < 0.5,
        augments=draw.random() < 0.4,
        validates=validates,
        every=draw.choice((1, 1, 2)),
        callbacks=tuple(name for name in CALLBACKS if draw.random() < 0.25),
        logger=draw.random() < 0.5,
        precision=draw.choice(("32-true", "32-true", "bf16-mixed", "64-true")),
        clips=draw.random() < 0.3,
    )
    unfit = set()
    if not run.validates:
        unfit |= {"stopping"}
    if not run.logger:
        unfit |= {"rates"}
    if run.precision == "64-true":
        unfit |= {"average"}  # the copy is made before the weights are doubled
    return replace(run, callbacks=tuple(name for name in run.callbacks if name not in unfit))


# ------------------------------------------------------------------------------------------------------------ its parts


class Augmented(Points):
    """Points with noise: torch's, or one of a generator that each worker has a copy of."""

    def __init__(self, n, augments, own_generator):
        super().__init__(n)
        self.augments = augments
        self.generator = np.random.default_rng(1) if own_generator else None

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        if self.generator is not None:
            x = x + float(self.generator.normal())
        elif self.augments:
            x = x + torch.randn(4)
        return x, y, index


class Body(Net):
    """A Net with one of the bodies, and the schedule of its run."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        layers = {
            "batch norm": [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU()],
            "dropout": [nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU()],
            "tied": [nn.Linear(4, 8), Tied(8), nn.Tanh()],
            "attention": [nn.Linear(4, 8), Attention()],
        }
        frozen = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)]
        self.body = nn.Sequential(*layers.get(run.body, frozen if run.body.startswith("frozen") else [*self.body]))
        if run.body.startswith("frozen"):
            self.body.requires_grad_(False)

    def on_train_epoch_start(self):
        if self.run.body == "frozen in evaluation mode":
            self.body.eval()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        if self.run.validates:
            self.log("val_loss", super().training_step(batch, batch_idx))

    def configure_optimizers(self):
        run = self.run
        held = [p for p in self.parameters() if p.requires_grad]
        if run.fault == "head without optimizer":
            held = [p for p in held if all(p is not its for its in self.head.parameters())]
        if run.optimizer == "groups":
            optimizer = torch.optim.AdamW([{"params": held[:1], "lr": 1e-2}, {"params": held[1:]}], lr=1e-3)
        elif run.optimizer == "AdamW":
            optimizer = torch.optim.AdamW(held, lr=1e-3)
        else:
            optimizer = torch.optim.SGD(held, lr=1e-2, momentum=0.9 if run.optimizer == "momentum" else 0.0)
        schedule = self.scheduled(optimizer)
        return optimizer if schedule is None else {"optimizer": optimizer, "lr_scheduler": schedule}

    def scheduled(self, optimizer):
        name, steps = self.run.schedule, self.run.updates * self.run.epochs
        epochs = self.run.epochs
        if self.run.fault == "horizon too long":
            steps, epochs = 3 * steps, 3 * epochs
        if name == "plateau":
            plateau = schedules.ReduceLROnPlateau(optimizer)
            return {"scheduler": plateau, "monitor": "val_loss", "frequency": self.run.every}
        rates = [group["lr"] for group in optimizer.param_groups]
        warm = max(1, steps // 4)
        made = {
            "cosine": lambda: schedules.CosineAnnealingLR(optimizer, steps),
            "one cycle": lambda: schedules.OneCycleLR(optimizer, rates, steps),
            "linear to 0": lambda: schedules.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps)),
            "warm-up and cosine": lambda: schedules.SequentialLR(
                optimizer,
                [schedules.LinearLR(optimizer, 0.1, 1.0, warm), schedules.CosineAnnealingLR(optimizer, steps - warm)],
                [warm],
            ),
            "by epoch": lambda: schedules.CosineAnnealingLR(optimizer, epochs),
            "steps by epoch": lambda: schedules.StepLR(optimizer, 1, 0.5),
            "constant": lambda: schedules.LambdaLR(optimizer, lambda _: 1.0),
        }
        if name == "none":
            return None
        return {"scheduler": made[name](), "interval": "epoch" if "epoch" in name else "step"}


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width):
        super().__init__()
        self.there, self.back = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.back.weight = self.there.weight

    def forward(self, x):
        return self.back(torch.tanh(self.there(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, None])[:, 0]


class OneOrder(Sampler):
    """Shuffles, by one seed for all epochs."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=torch.Generator().manual_seed(0)).tolist())


class Data(LightningDataModule):
    def __init__(self, run):
        super().__init__()
        self.run = run
        whole = Augmented(run.samples + 16, run.augments, run.fault == "own generator")
        seeded = torch.Generator().manual_seed(0)
        self.training, self.validating = random_split(whole, [run.samples, 16], seeded)
        if run.fault == "validates what it trains":
            self.validating = torch.utils.data.Subset(whole, [*self.validating.indices, *self.training.indices[:8]])

    def train_dataloader(self):
        run, samples = self.run, self.run.samples
        workers = {"num_workers": run.workers, "persistent_workers": run.persistent and run.workers > 0}
        if run.fault == "one order":
            return DataLoader(self.training, BATCH, sampler=OneOrder(samples), **workers)
        if run.order == "weighted":
            chosen = torch.utils.data.WeightedRandomSampler(torch.ones(samples), samples)
        elif run.order == "random subset":
            chosen = SubsetRandomSampler(range(samples))
        elif run.order in ("ours", "resumable"):
            sampler = ShuffledBatchSampler(samples, BATCH)
            made = DataLoader if run.order == "ours" else ResumableDataLoader
            return made(self.training, batch_sampler=sampler, **workers)
        else:
            options = {"shuffle": run.order != "as it comes", "drop_last": run.order == "drop_last"}
            return DataLoader(self.training, BATCH, **options, **workers)
        return DataLoader(self.training, BATCH, sampler=chosen, **workers)

    def val_dataloader(self):
        return DataLoader(self.validating, BATCH) if self.run.validates else []


def made(run):
    """``(trainer, model, data)`` of a run that was drawn."""
    monitor = "val_los" if run.fault == "monitors what nobody logs" else "val_loss" if run.validates else "train_loss"
    of_name = {
        "rates": lambda: LearningRateMonitor(),
        "stopping": lambda: EarlyStopping("val_loss"),
        "checkpoint": lambda: ModelCheckpoint(monitor=monitor),
        "every steps": lambda: ModelCheckpoint(every_n_train_steps=run.updates),
        "average": lambda: EMAWeightAveraging(),
        "skips": lambda: SkipBadSteps(),
        "audit": lambda: StepAudit(),
    }
    folder = tempfile.gettempdir()
    steps = run.updates * run.epochs
    length = {"max_epochs": run.epochs} if run.ends_by == "epochs" else {"max_epochs": -1, "max_steps": steps}
    if run.fault == "steps cut short":
        length = {"max_epochs": run.epochs, "max_steps": steps - 1}
    if run.fault == "one batch an epoch":
        length |= {"limit_train_batches": 1}
    trainer = quiet_trainer(
        **length,
        accumulate_grad_batches=run.window,
        callbacks=[of_name[name]() for name in run.callbacks],
        enable_checkpointing=bool({"checkpoint", "every steps"} & set(run.callbacks)),
        logger=CSVLogger(folder) if run.logger else False,
        default_root_dir=folder,
        check_val_every_n_epoch=run.every,
        precision=run.precision,
        gradient_clip_val=1.0 if run.clips else None,
    )
    return trainer, Body(run), Data(run)


# -------------------------------------------------------------------------------------------------------- what is wrong

AT_STEPS = ("cosine", "one cycle", "linear to 0", "warm-up and cosine", "by epoch")
FAULTS = {
    "horizon too long": ("horizon", {"schedule": AT_STEPS}),
    "head without optimizer": ("setup", {"body": ("plain", "batch norm", "dropout")}),
    "monitors what nobody logs": ("setup", {"callbacks": (("checkpoint",),), "validates": (True,), "every": (1,)}),
    "steps cut short": ("length", {"ends_by": ("epochs",), "schedule": ("none", "constant")}),
    "one batch an epoch": ("length", {"ends_by": ("epochs",), "schedule": ("none", "constant"), "window": (1,)}),
    "short last batch": ("window", {"window": (2, 3), "order": ("shuffled", "as it comes"), "body": BODIES[:5]}),
    "last batch of one": (
        "setup",
        {
            "window": (1,),
            "order": ("shuffled", "as it comes"),
            "body": ("batch norm",),
            "schedule": ("none", "constant"),
        },
    ),
    "own generator": ("workers", {"workers": (2,)}),
    "one order": ("order", {"order": ("shuffled",)}),
    "validates what it trains": ("dealing", {"validates": (True,)}),
}


def faulty(run, seed):
    """The same run with a fault, and the check that must find it."""
    draw = random.Random(math.prod((seed + 1, 7919)))
    fault = draw.choice(sorted(FAULTS))
    check, needs = FAULTS[fault]
    fitting = {name: draw.choice(values) for name, values in needs.items() if getattr(run, name) not in values}
    other = replace(run, fault=fault, **fitting)
    if fault == "one order" and not other.validates and "stopping" in other.callbacks:
        other = replace(other, callbacks=())
    if fault == "last batch of one":  # with a batch more, it would save within an epoch
        other = replace(other, callbacks=tuple(name for name in other.callbacks if name != "every steps"))
    return other, check


def wrong_of(run, check=""):
    """What a rehearsal says wrongly of a run; empty where it is right."""
    trainer, model, data = made(run)
    report = rehearse(trainer, model, data)
    found = [finding.check for finding in report.findings]
    if found == ([check] if check else []) and not report.failed and bool(report.ok) == (not check):
        return ""
    return f"{run}\n{report}"


def main(seed, runs):
    wrong = 0
    for number in range(seed, seed + runs):
        run = drawn(number)
        for one, check in ((run, ""), faulty(run, number)):
            told = wrong_of(one, check)
            wrong += bool(told)
            print(number, check or "right", one.fault, "WRONG\n" + told if told else "", flush=True)
    print(f"{2 * runs} runs, {wrong} of them judged wrongly")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
