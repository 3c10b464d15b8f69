"""The scripts of drawn runs, with a slot where a piece may stand. A line whose slots are all empty is left out."""

HEAD = '''
"""A run that was drawn at random."""

import datetime
import io
import itertools
import json
import os
import random
import signal
import tempfile
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, default_collate

from course_lib import resume, samplers
from course_lib.accumulation import accumulate, windows
from course_lib.callbacks import ExactAccumulation, ExactResume, SizeScheduleDataModule, SkipBadSteps, StepAudit
from course_lib.launch import run_ranks
from course_lib.resume import ResumableDataLoader
from course_lib.schedules import SizeSchedule
from course_lib.skipping import StepGuard

DEVICE = "$device"
DTYPE = $dtype


class Samples(Dataset):
    dies_at, dies_hard = None, False

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn($samples, 3, generator=generator, dtype=DTYPE)
        self.y = torch.randn($samples, 1, generator=generator, dtype=DTYPE)
        $bad_sample

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == self.dies_at:
            if self.dies_hard:
                os._exit(9)
            raise OSError("a sample cannot be read")
        x = self.x[index]
        $python_noise
        $numpy_noise
        $torch_noise
        $asks_epoch
        return x, self.y[index], index


def collate(samples):
    x, y, indices = default_collate(samples)
    $collate_noise
    return x, y, indices


def cut(sample, size):
    """The first features alone: what stands for a smaller image."""
    x, y, index = sample
    return torch.cat([x[:size], torch.zeros(3 - size, dtype=x.dtype)]), y, index


def make_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential($layers).to(DTYPE)


def make_optimizer(net):
    trained = $trained
    optimizer = $optimizer
    schedule = $schedule
    if schedule is None:
        return optimizer
    config = {"scheduler": schedule, "interval": "$interval", "frequency": $frequency, "monitor": "val"}
    return {"optimizer": optimizer, "lr_scheduler": config}


class Killed(BaseException):
    """The end of a life."""


def of_this_rank(kills, rank):
    """The kills as (micro_batch, place, hard); nothing ends this rank by a kill of another one."""
    return [(n, place if of_rank in (None, rank) else "never", hard) for n, place, hard, of_rank in kills]


def write(path, **line):
    with open(path, "a") as file:
        print(json.dumps(line), file=file)


def on_the_cpu(end):
    file = io.BytesIO()
    torch.save(end, file)
    return torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=False)


def newest(folder):
    paths = sorted(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return paths[-1] if paths else None
'''

TRAINER = '''
class Module(LightningModule):
    def __init__(self, log):
        super().__init__()
        self.net, self.log_path = make_net(), log
        $own_parts
        $frozen

    def training_step(self, batch):
        x, y, indices = batch
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        line = dict(number=number, epoch=self.current_epoch, indices=indices.tolist(), x=x.tolist(), y=y.tolist())
        write(self.log_path, **line)
        $noise
        $goes_by_metrics
        loss = nn.functional.mse_loss(self.net(x), y, reduction="$reduction")
        $own_loss
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        $logs_each_step
        self.may_die("forward")
        return $returned

    $own_hooks

    def on_train_epoch_start(self):
        if $thaws and self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            for part in self.net:
                part.train(not isinstance(part, nn.Dropout))

    def may_die(self, place):
        for callback in self.trainer.callbacks:
            if isinstance(callback, Dies):
                callback.at(place)

    def validation_step(self, batch):
        self.may_die("within validation")
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        $asks_length
        return make_optimizer(self.net)


class Draws(Callback):
    """As one does that takes samples of a model."""

    def on_train_start(self, *_):
        torch.rand(()), np.random.rand(), random.random()

    on_train_batch_end = on_validation_end = on_train_epoch_end = on_train_start


class Dies(Callback):
    """Ends this life at a place of its n-th micro-batch, or at the next such place."""

    micro_batch, place, hard, begun = 0, "never", False, 0

    def at(self, place):
        if place == "start" and self.begun == self.micro_batch:
            if self.place == "SIGTERM":
                signal.raise_signal(signal.SIGTERM)
            self.trainer.should_stop |= self.place == "told to stop"
        if place == self.place and self.begun >= self.micro_batch:
            if self.hard:
                os._exit(9)
            raise Killed

    def on_train_start(self, trainer, pl_module):
        self.trainer = trainer
        write(pl_module.log_path, resumed=trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        trainer.optimizers[0].register_step_pre_hook(lambda *_: self.at("within step"))
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.at("after step"))

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

    def on_train_end(self, trainer, pl_module):
        self.at("train end")


class SavesByHand(Checkpoint):
    """Where a reader might: at an epoch's start, and behind two of three micro-batches."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def save(self, trainer):
        trainer.save_checkpoint(self.folder / f"{len(list(self.folder.glob('*.ckpt'))):03}.ckpt")

    def on_train_epoch_start(self, trainer, pl_module):
        self.save(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 3 < 2:
            self.save(trainer)


def life(rank, folder, number, ranks, workers, kills):
    """Train from the newest checkpoint until this life ends."""
    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork", force=True)  # a worker that is spawned would import these classes
    # Each process has a seed of its own, but for one that begins from nothing, as the first did.
    seed_everything((100 * number if newest(folder) else 0) + rank, verbose=False)
    samples = Samples()
    held_out = DataLoader(list(zip(samples.x.nan_to_num(), samples.y)), 8)
    data = $data
    module, dies = Module(Path(folder, f"life-{number}-{rank}.jsonl")), Dies()
    trainer = Trainer(
        callbacks=[dies, $callbacks],
        $flags
        devices=ranks,
        strategy=$strategy if ranks > 1 else "auto",
        accelerator=DEVICE,
        logger=$logger,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    given = $given
    shorter = bool(kills) and kills[0][1] == "a shorter run"
    if shorter:
        trainer.fit_loop.max_epochs = 1
    for kill in of_this_rank(kills, rank):
        dies.micro_batch, dies.place, dies.hard = kill
    samples.dies_at = dies.micro_batch % len(samples) if dies.place == "loader" else None
    samples.dies_hard = dies.hard
    trainer.fit(module, **given, ckpt_path=newest(folder), weights_only=False)
    if shorter or dies.place == "told to stop" and trainer.should_stop:
        raise Killed
    return on_the_cpu(outcome(trainer, module))


def outcome(trainer, module):
    """What a run ends with."""
    averages = [callback._average_model for callback in trainer.callbacks if hasattr(callback, "_average_model")]
    monitors = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "monitor", "")]
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    # A validation rounds a finer average to the weights' precision as it puts it there; a run that was over makes none.
    precision = next(module.parameters()).dtype
    return dict(
        weights=module.state_dict(),
        optimizer=[optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
        rates=[group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        schedules=[one.state_dict().get("last_epoch") for one in schedules],
        average=[model.to(precision).state_dict() for model in averages if model is not None],
        counters=[trainer.global_step, trainer.current_epoch],
        audited=[callback.agrees for callback in trainer.callbacks if isinstance(callback, StepAudit)],
        best=[str(on_the_cpu(one.best_model_score)) for one in monitors],
    )
'''

LOOP = '''
class Unusable(Exception):
    """The loss's own: the loop goes on with the next window."""


def summed_loss(model, batch):
    $refuses_a_sample
    return nn.functional.mse_loss(model(batch[0].to(DEVICE)), batch[1].to(DEVICE), reduction="sum")


def cannot_be_used(act):
    try:
        act()
    except Unusable:
        return True
    return False


def life(rank, folder, number, ranks, workers, kills):
    """Train from the saved state until this life ends."""
    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork", force=True)  # a worker that is spawned would import these classes
    torch.manual_seed(100 * number + rank)  # each process has a seed of its own
    samples = Samples()
    data = $data
    net = make_net().to(DEVICE)
    $frozen
    model = nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
    made = make_optimizer(net)
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    schedule = made["lr_scheduler"]["scheduler"] if isinstance(made, dict) else None
    keeps = dict(net=net, optimizer=optimizer, loader=data)
    if schedule is not None:
        keeps["schedule"] = schedule
    $guard
    path, log = Path(folder, "state.ckpt"), Path(folder, f"life-{number}-{rank}.jsonl")
    done = updates = begun = 0
    micro_batch, place, hard = [*of_this_rank(kills, rank), (0, "never", False)][0]
    samples.dies_at = micro_batch % len(samples) if place == "loader" else None
    samples.dies_hard = hard

    def at(here):
        if here == place and begun >= micro_batch:
            if hard:
                os._exit(9)
            raise Killed

    def save():
        if rank == 0:
            state = {name: thing.state_dict() for name, thing in keeps.items()}
            torch.save(dict(state, done=done, updates=updates), path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)

    def begin(batch):
        nonlocal done, begun
        done, begun = done + 1, begun + 1
        at("start")
        x, y, indices = batch
        write(log, number=done, epoch=epoch, indices=indices.tolist(), x=x.tolist(), y=y.tolist())

    if path.exists():
        state = torch.load(path, weights_only=True)
        for name, thing in keeps.items():
            thing.load_state_dict(state[name])
        done, updates = state["done"], state["updates"]
    write(log, resumed=done)
    while data.batch_sampler.epoch < $max_epochs:
        epoch = data.batch_sampler.epoch
        for window in windows(data, $k):
            optimizer.zero_grad()
            for batch in window:
                begin(batch)
                $backward_of_a_mean
                at("forward")
            $backward_of_a_window
            $passes_a_window_over
            at("before step")
            $clip
            $step
            $step_of_the_schedule
            updates += 1
            at("after step")
            if $saves:
                save()
            at("end")
        at("epoch end")
    end = dict(
        weights={f"net.{name}": value for name, value in net.state_dict().items()},
        optimizer=optimizer.state_dict()["state"],
        rates=[group["lr"] for group in optimizer.param_groups],
        counters=[done, updates, $guards_counters],
    )
    return on_the_cpu(end)
'''

TAIL = """
if __name__ == "__main__":
    kills, lives = $kills, $lives
    whole, stopped = tempfile.mkdtemp(), tempfile.mkdtemp()
    [end, *_] = run_ranks(life, $first_ranks, args=(whole, 0, $first_ranks, $first_workers, []))
    print("uninterrupted:", end.value["weights"]["net.0.weight"][0])
    for number, ranks, workers in lives:
        try:
            [end, *_] = run_ranks(life, ranks, args=(stopped, number, ranks, workers, kills[number : number + 1]))
            print("stopped and resumed:", end.value["weights"]["net.0.weight"][0])
        except RuntimeError as error:
            print("a life ended:", str(error).splitlines()[0])
"""
