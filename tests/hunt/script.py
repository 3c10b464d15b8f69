"""A drawn run as a script of its own: what the hunt plays is what it prints.

The script has ``life(rank, folder, number)``, which trains until the run is killed or ends. Pieces that a run does not
have leave no line in it.
"""

from __future__ import annotations

from tests.hunt.pieces import DrawnRun

NOISE = {
    "python": "random.random()",
    "numpy": "np.random.rand()",
    "torch": "torch.rand(()).item()",
}
SAVES = {
    "every step": "every_n_train_steps=1",
    "every other step": "every_n_train_steps=2",
    "every epoch": "save_on_train_epoch_end=True",
    "validation": "monitor='val'",
    "a time": "train_time_interval=datetime.timedelta(microseconds=1)",
    "an exception": "every_n_train_steps=2, save_on_exception=True",
}
AVERAGES = {
    "WeightAveraging": "WeightAveraging()",
    "EMAWeightAveraging": "EMAWeightAveraging(decay=0.9)",
    "StochasticWeightAveraging": "StochasticWeightAveraging(0.02, swa_epoch_start=0.6)",
}


def script_of(run: DrawnRun) -> str:
    """Python that defines ``life``, and plays all lives where it is run by itself."""
    validates = run.val_check_interval is not None or run.saves == "validation"
    parts = [_head(run), _samples(run), _module(run, validates), _dies(run), _life(run, validates), _tail(run)]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _head(run: DrawnRun) -> str:
    return f'''
"""A run that was drawn at random, and breaks a promise."""

import datetime
import json
import os
import random
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, default_collate

from course_lib import resume, samplers
from course_lib.callbacks import ExactAccumulation, ExactResume, SizeScheduleDataModule, SkipBadSteps, StepAudit
from course_lib.launch import run_ranks
from course_lib.resume import ResumableDataLoader
from course_lib.schedules import SizeSchedule

RUN = """{run!r}"""


class Killed(BaseException):
    """The end of a life."""
'''


def _samples(run: DrawnRun) -> str:
    draws = "".join(f"\n        x = x + {NOISE[name]}" for name in run.noise)
    asks = "\n        x = x + resume.epoch_of_this_batch()" if run.asks_epoch else ""
    bad = f"\n        self.x[{run.bad_sample}] = float('nan')" if run.bad_sample is not None else ""
    reads = any(kill.place == "loader" for kill in run.kills)
    dies = ""
    if reads:
        dies = """
        if self.dies_at == index:
            if self.dies_hard:
                os._exit(9)
            raise OSError("a sample cannot be read")"""
    text = f'''
class Samples(Dataset):
    dies_at, dies_hard = None, False

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn({run.samples}, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn({run.samples}, 1, generator=generator, dtype=torch.float64){bad}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):{dies}
        x = self.x[index]{draws}{asks}
        return x, self.y[index], index
'''
    if run.collate_draws:
        text += '''

def collate(samples):
    x, y, indices = default_collate(samples)
    return x + torch.rand(()).item(), y, indices
'''
    if run.sized:
        text += '''

def cut(sample, size):
    """The first features alone: what stands for a smaller image."""
    x, y, index = sample
    return torch.cat([x[:size], torch.zeros(3 - size, dtype=x.dtype)]), y, index
'''
    return text


def _module(run: DrawnRun, validates: bool) -> str:
    layers = ["nn.Linear(3, 4)"]
    layers += ["nn.BatchNorm1d(4)"] * run.batch_norm + ["nn.Dropout(0.5)"] * run.dropout + ["nn.Tanh()"]
    layers += ["nn.Linear(4, 1)"]
    freeze = "\n        self.net[0].requires_grad_(False)" if run.frozen else ""
    noise = "\n        x = x + torch.randn_like(x)" if run.noisy_forward else ""
    reduction, returned = ("sum", "loss, len(y)") if run.weighs_samples else ("mean", "loss")
    schedules = {
        "": "return optimizer",
        "cosine of steps": "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)",
        "step of epochs": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)",
        "one cycle": "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=400)",
    }
    interval = "epoch" if run.schedule == "step of epochs" else "step"
    returns = ""
    if run.schedule:
        returns = f'\n    return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": schedule, "interval": "{interval}"}}}}'
    optimizer = {"SGD": "torch.optim.SGD(trained, 0.1, momentum=0.9)", "AdamW": "torch.optim.AdamW(trained, 0.05)"}
    validation = '''

    def validation_step(self, batch):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]))
''' if validates else ""
    return f'''
def make_net():
    torch.manual_seed(0)
    return nn.Sequential({", ".join(layers)}).double()


def make_optimizer(net):
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = {optimizer[run.optimizer]}
    {schedules[run.schedule]}{returns}


class Module(LightningModule):
    def __init__(self, log):
        super().__init__()
        self.net, self.log_path, self.trained = make_net(), log, 0{freeze}

    def training_step(self, batch):
        x, y, indices = batch
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        line = dict(number=number, epoch=self.current_epoch, indices=indices.tolist(), x=x.tolist(), y=y.tolist())
        with open(self.log_path, "a") as file:
            print(json.dumps(line), file=file)
        self.trained += 1{noise}
        loss = nn.functional.mse_loss(self.net(x), y, reduction="{reduction}")
        for callback in self.trainer.callbacks:
            if isinstance(callback, Dies):
                callback.at("forward")
        return {returned}
{validation}
    def configure_optimizers(self):
        return make_optimizer(self.net)
'''


def _dies(run: DrawnRun) -> str:
    return '''
class Dies(Callback):
    """Ends this life at a place of its n-th micro-batch."""

    def __init__(self, micro_batch, place, hard):
        self.micro_batch, self.place, self.hard, self.begun = micro_batch, place, hard, 0

    def at(self, place):
        if place == self.place and self.begun >= self.micro_batch:
            if self.hard:
                os._exit(9)
            raise Killed

    def on_train_start(self, trainer, pl_module):
        with open(pl_module.log_path, "a") as file:
            print(json.dumps(dict(resumed=trainer.fit_loop.epoch_loop.batch_progress.total.ready)), file=file)
        self.handles = [
            trainer.optimizers[0].register_step_pre_hook(lambda *_: self.at("within step")),
            trainer.optimizers[0].register_step_post_hook(lambda *_: self.at("after step")),
        ]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.begun += 1
        self.at("start")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.at("before step")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.at("end")

    def on_train_epoch_end(self, trainer, pl_module):
        self.at("epoch end")

    def on_validation_start(self, trainer, pl_module):
        self.at("validation")
'''


def _life(run: DrawnRun, validates: bool) -> str:
    listed = [AVERAGES.get(name, "StepAudit(strict=True)" if name == "StepAudit" else f"{name}()") for name in run.callbacks]
    if run.windows_by_epoch:
        listed.append(f"GradientAccumulationScheduler({{0: {run.accumulate_grad_batches}, 1: 3}})")
    by_hand = run.saves == "by hand"
    listed.append("SavesByHand(folder)" if by_hand else f"ModelCheckpoint(folder, save_top_k=-1, {SAVES[run.saves]})")
    flags = {
        "accumulate_grad_batches": None if run.windows_by_epoch else run.accumulate_grad_batches,
        "max_epochs": run.max_epochs,
        "max_steps": run.max_steps if run.max_steps != -1 else None,
        "limit_train_batches": run.limit_train_batches,
        "val_check_interval": run.val_check_interval,
        "gradient_clip_val": 0.5 if run.clip else None,
        "limit_val_batches": None if validates else 0,
    }
    shown = "".join(f"\n        {name}={value!r}," for name, value in flags.items() if value not in (None, 1, 1.0) or value == 0 and name == "limit_val_batches" or (name == "max_epochs" or name == "val_check_interval") and value is not None)
    saves_by_hand = '''
class SavesByHand(Callback):
    """Where a reader might: at an epoch's start, and behind every third micro-batch."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer):
        trainer.save_checkpoint(Path(self.folder, f"{len(list(Path(self.folder).glob('*.ckpt'))):03}.ckpt"))

    def on_train_epoch_start(self, trainer, pl_module):
        self.save(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 3 == 1:
            self.save(trainer)


''' if by_hand else ""
    held_out = ""
    if validates:
        held_out = "held_out = DataLoader([(x, y) for x, y in zip(samples.x.nan_to_num(), samples.y)], 8)\n    "
    data = _data(run, validates)
    strategy = '\n        devices=ranks,\n        strategy="ddp" if ranks > 1 else "auto",' if max(run.ranks) > 1 else ""
    return saves_by_hand + f'''
def newest(folder):
    paths = sorted(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return paths[-1] if paths else None


def life(rank, folder, number, ranks, workers, kills):
    """Train from the newest checkpoint until this life ends; more kills than one: with the same objects again."""
    torch.set_num_threads(1)
    torch.manual_seed(100 * number + rank)  # each process has a seed of its own
    samples = Samples()
    {held_out}{data}
    module = Module(Path(folder, f"life-{{number}}-{{rank}}.jsonl"))
    dies = Dies(0, "never", False)
    average = None
    trainer = Trainer(
        callbacks=[dies, {", ".join(listed)}],{shown}{strategy}
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    given = {"dict(datamodule=data)" if run.sized else "dict(train_dataloaders=data" + (", val_dataloaders=held_out)" if validates else ")")}
    for kill in [*kills, None]:
        if kill is not None:
            dies.micro_batch, dies.place, dies.hard, dies.begun = *kill, 0
        else:
            dies.place = "never"
        samples.dies_at = kill[0] % len(samples) if kill and kill[1] == "loader" else None
        samples.dies_hard = bool(kill and kill[2])
        try:
            trainer.fit(module, **given, ckpt_path=newest(folder), weights_only=False)
            break
        except (Killed, OSError, RuntimeError) as error:
            if not (isinstance(error, Killed) or "a sample cannot be read" in str(error)) or len(kills) < 2:
                raise
    return outcome(trainer, module)


def outcome(trainer, module):
    """What a run ends with."""
    schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    averages = [callback._average_model for callback in trainer.callbacks if hasattr(callback, "_average_model")]
    audits = [callback.agrees for callback in trainer.callbacks if isinstance(callback, StepAudit)]
    return dict(
        weights=module.state_dict(),
        optimizer=[optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
        rates=[group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        schedules=[state["last_epoch"] for state in schedules],
        average=[model.state_dict() for model in averages if model is not None],
        counters=[trainer.global_step, trainer.current_epoch],
        audited=audits,
    )
'''


def _data(run: DrawnRun, validates: bool) -> str:
    options = "num_workers=workers"
    if any(run.workers):
        options += ", **({} if workers == 0 else dict(persistent_workers=" + f"{run.persistent}, prefetch_factor={run.prefetch_factor}))"
    if run.collate_draws:
        options += ", collate_fn=collate"
    n, b, tail = run.samples, run.batch_size, run.tail
    if run.sized:
        more = ", val_dataloaders=held_out" if validates else ""
        stages = f"{{0: (2, {b + 1}), 1: (3, {b})}}"
        return (
            f"schedule = SizeSchedule({stages})\n    data = SizeScheduleDataModule(samples, schedule, cut, "
            f"shuffle={run.shuffle}, seed=3, tail={tail!r}{more}, {options})"
        )
    if not run.sampler:
        return (
            f"data = ResumableDataLoader(samples, {b}, shuffle={run.shuffle}, drop_last={tail == 'drop'}, seed=3, {options})"
        )
    made = {
        "ShuffledBatchSampler": f"ShuffledBatchSampler({n}, {b}, shuffle={run.shuffle}, seed=3, tail={tail!r})",
        "TwoStreamBatchSampler": f"TwoStreamBatchSampler(range({n - n // 3}), range({n - n // 3}, {n}), {b}, 1, "
        f"shuffle={run.shuffle}, seed=3, tail={tail!r})",
        "ShardedBatchSampler": f"ShardedBatchSampler(BatchSampler(RandomSampler(range({n})), {b}, False), "
        f"seed=3, tail={tail!r})",
        "ShardedBatchSampler, split": f"ShardedBatchSampler(BatchSampler(RandomSampler(range({n})), {b * max(run.ranks)}, "
        f"False), split=True, seed=3, tail={tail!r})",
    }
    return f"sampler = samplers.{made[run.sampler]}\n    data = ResumableDataLoader(samples, batch_sampler=sampler, {options})"


def _tail(run: DrawnRun) -> str:
    lives = [(number, run.ranks_of(number), run.workers_of(number)) for number in range(len(run.kills) + 1)]
    kills = [(kill.micro_batch, kill.place, kill.hard) for kill in run.kills]
    return f'''
if __name__ == "__main__":
    import tempfile

    kills, lives = {kills}, {lives}
    whole, stopped = tempfile.mkdtemp(), tempfile.mkdtemp()
    [end, *_] = run_ranks(life, {run.ranks[0]}, args=(whole, 0, {run.ranks[0]}, {run.workers[0]}, []))
    print("uninterrupted:", end.value["weights"]["net.0.weight"][0])
    for number, ranks, workers in lives:
        try:
            [end, *_] = run_ranks(life, ranks, args=(stopped, number, ranks, workers, kills[number : number + 1]))
            print("stopped and resumed:", end.value["weights"]["net.0.weight"][0])
        except RuntimeError as error:
            print("a life ended:", str(error).splitlines()[0])
'''
