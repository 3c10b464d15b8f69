"""A drawn run as a script of its own: what the hunt plays is what it prints.

The script has ``life(rank, folder, number, ranks, workers, kills)``, which trains until the run is killed or ends.
"""

from __future__ import annotations

import re
from string import Template
from typing import NamedTuple

from tests.hunt.pieces import DrawnRun
from tests.hunt.templates import HEAD, LOOP, TAIL, TRAINER

OPTIMIZERS = {
    "SGD": "torch.optim.SGD(trained, 0.1, momentum=0.9)",
    "AdamW": "torch.optim.AdamW(trained, 0.05)",
    "fused AdamW": "torch.optim.AdamW(trained, 0.05, fused=True, amsgrad=True)",
    "RMSprop": "torch.optim.RMSprop(trained, 0.02, momentum=0.5)",
    "Adagrad": "torch.optim.Adagrad(trained, 0.1)",
}
GROUPS = "[dict(params=trained[:1], lr=0.02), dict(params=trained[1:])]"
SCHEDULES = {
    "": "None",
    "cosine of steps": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)",
    "warm-up, then cosine": "torch.optim.lr_scheduler.SequentialLR(optimizer, ["
    "torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), "
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)], [3])",
    "every other step": "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
    "step of epochs": "torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)",
    "every other epoch": "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)",
    "plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)",
    "one cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=400)",
}
SAVES = {
    "every step": "every_n_train_steps=1",
    "every other step": "every_n_train_steps=2",
    "every epoch": "save_on_train_epoch_end=True",
    "validation": "monitor='val'",
    "a time": "train_time_interval=datetime.timedelta(microseconds=1)",
    "an exception": "every_n_train_steps=2, save_on_exception=True",
}
LOOP_SAVES = {"every step": "True", "every other step": "updates % 2 == 0", "validation": "updates % 3 == 0"}
"""All other ways are a loop's: at every epoch's end."""
CALLBACKS = {
    "ExactResume": "ExactResume()",
    "ExactAccumulation": "ExactAccumulation()",
    "SkipBadSteps": "SkipBadSteps()",
    "StepAudit": "StepAudit(strict=True)",
    "WeightAveraging": "WeightAveraging()",
    "EMAWeightAveraging": "EMAWeightAveraging(decay=0.9)",
    "EMAWeightAveraging of epochs": "EMAWeightAveraging(decay=0.9, update_every_n_steps=3, update_starting_at_epoch=0)",
}
BESIDE = {
    "a log": {"log_every_n_steps": 1},
    "no sanity check": {"num_sanity_val_steps": 0},
    "no inference mode": {"inference_mode": False},
}
CALLBACKS_BESIDE = {
    "a log": "LearningRateMonitor()",
    "a timer": "Timer(interval='step')",
    "a checkpoint of an exception": "OnExceptionCheckpoint(Path(folder, 'exception'))",
    "a callback that draws": "Draws()",
}


class OwnCode(NamedTuple):
    """Lines of a module."""

    parts: str = ""
    loss: str = ""
    at_batchs_end: str = ""
    hooks: str = ""


OWN_CODE = {
    "averages": OwnCode(
        "self.average = AveragedModel(self.net)",
        "loss = loss + 0.1 * nn.functional.mse_loss(self.net(x), self.average(x).detach())",
        "self.average.update_parameters(self.net)",
    ),
    "counts": OwnCode(
        "self.forwards = 0",
        "self.forwards += 1; loss = loss * (1 + 0.1 * self.forwards)",
        hooks="""
def get_extra_state(self):
    return self.forwards

def set_extra_state(self, state):
    self.forwards = state
""".strip(),
    ),
    "warms up": OwnCode(
        hooks="""
def optimizer_step(self, epoch, batch_idx, optimizer, closure):
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * min(1, (self.trainer.global_step + 1) / 5)
    super().optimizer_step(epoch, batch_idx, optimizer, closure)
""".strip()
    ),
    "clips": OwnCode(
        hooks="""
def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
    nn.utils.clip_grad_norm_(self.parameters(), 0.3)
""".strip()
    ),
    "draws": OwnCode(at_batchs_end="torch.rand(()), np.random.rand(), random.random()"),
}
LOGGED_LAST = (
    "0.1 * sum(one.nan_to_num().clamp(-1, 1) for name, one in sorted(self.trainer.callback_metrics.items()) "
    "if name != 'loss')"  # an epoch's mean, of which a checkpoint within the epoch has nothing
)


def script_of(run: DrawnRun) -> str:
    """Python that defines ``life``, and plays all lives where it is run by itself."""
    parts = [(HEAD, _head(run)), (TRAINER, _trainer(run)) if run.trainer else (LOOP, _loop(run)), (TAIL, _tail(run))]
    return "\n\n\n".join(_filled(template.strip("\n"), slots) for template, slots in parts) + "\n"


def _filled(template: str, slots: dict[str, object]) -> str:
    lines = []
    for line in template.splitlines():
        names = re.findall(r"\$(\w+)", line)
        if line.strip().startswith("$") and not any(slots[name] for name in names):
            continue
        lines.append(Template(line).substitute(slots))
    return "\n".join(lines)


def _head(run: DrawnRun) -> dict[str, object]:
    layers = ["nn.Linear(3, 4)", *["nn.BatchNorm1d(4)"] * run.batch_norm, *["nn.Dropout(0.5)"] * run.dropout]
    return {
        "samples": run.samples,
        "dtype": "torch.float32" if run.precision else "torch.float64",  # autocast leaves float64 as it is
        "device": run.device,
        "bad_sample": "" if run.bad_sample is None else f"self.x[{run.bad_sample}] = float('nan')",
        "python_noise": "x = x + random.random()" if "python" in run.noise else "",
        "numpy_noise": "x = x + np.random.rand()" if "numpy" in run.noise else "",
        "torch_noise": "x = x + torch.rand(()).item()" if "torch" in run.noise else "",
        "asks_epoch": "x = x + resume.epoch_of_this_batch()" if run.asks_epoch else "",
        "collate_noise": "x = x + torch.rand(()).item()" if run.collate_draws else "",
        "layers": ", ".join([*layers, "nn.Tanh()", "nn.Linear(4, 1)"]),
        "trained": "list(net.parameters())" if run.thaws else "[one for one in net.parameters() if one.requires_grad]",
        "optimizer": OPTIMIZERS[run.optimizer].replace("(trained", f"({GROUPS}" if run.groups else "(trained"),
        "schedule": SCHEDULES[run.schedule],
        "interval": "epoch" if "epoch" in run.schedule or "plateau" in run.schedule else "step",
        "frequency": 2 if "every other" in run.schedule else 1,
    }


def _trainer(run: DrawnRun) -> dict[str, object]:
    callbacks = [CALLBACKS[name] for name in run.callbacks]
    flags = {"max_epochs": run.max_epochs}
    if run.windows_by_epoch:
        callbacks.append(f"GradientAccumulationScheduler({run.window_lengths})")
    elif run.accumulate_grad_batches > 1:
        flags["accumulate_grad_batches"] = run.accumulate_grad_batches
    if run.stops_early:
        # Validations within a window see the same weights.
        patience = 4 if run.val_check_interval is not None else 1
        callbacks.append(f"EarlyStopping('val', patience={patience}, check_on_train_epoch_end=False)")
    if run.validates and run.saves != "validation":
        # Ahead of what saves at an epoch's end: a checkpoint knows nothing of the hooks behind its own.
        callbacks.append("ModelCheckpoint(Path(folder, 'best'), monitor='val')")
    if run.saves_the_best:
        kept = "save_top_k=2, save_last=True, save_on_train_epoch_end=True"
        callbacks.append(f"ModelCheckpoint(Path(folder, 'two'), monitor='loss', {kept})")
    callbacks += [CALLBACKS_BESIDE[name] for name in run.beside if name in CALLBACKS_BESIDE]
    for name in run.beside:
        flags |= BESIDE.get(name, {})
    by_hand = run.saves == "by hand"
    callbacks.append(
        "SavesByHand(folder)" if by_hand else f"ModelCheckpoint(folder, save_top_k=-1, {SAVES[run.saves]})"
    )
    if run.precision:
        flags["precision"] = run.precision
    if run.max_steps != -1:
        flags["max_steps"] = run.max_steps
    if run.limit_train_batches is not None:
        flags["limit_train_batches"] = run.limit_train_batches
    if run.val_check_interval is not None:
        flags["val_check_interval"] = run.val_check_interval
    if run.validates_every != 1:
        flags["check_val_every_n_epoch"] = run.validates_every
    if run.clip:
        flags["gradient_clip_val"] = 0.5
    if run.clip and run.clips_values:
        flags["gradient_clip_algorithm"] = "value"
    if not run.validates:
        flags["limit_val_batches"] = 0
    sums = run.weighs_samples
    held_out = ", val_dataloaders=held_out" if run.validates else ""
    return {
        "frozen": "self.net[0].requires_grad_(False)" if run.frozen else "",
        "thaws": run.thaws,
        "asks_length": "self.trainer.estimated_stepping_batches" if run.asks_length else "",
        "noise": "x = x + torch.randn_like(x)" if run.noisy_forward else "",
        "goes_by_metrics": f"x = x + {LOGGED_LAST}" if run.goes_by_metrics else "",
        "logs_each_step": "self.log('of this one', loss, sync_dist=True)" if run.goes_by_metrics else "",
        **_own_code(run),
        "reduction": "sum" if sums else "mean",
        "strategy": f"DDPStrategy({run.strategy})",
        "logger": "CSVLogger(folder)" if "a log" in run.beside else "False",
        "returned": "(loss, len(y))" if sums else "loss",
        "callbacks": ", ".join(callbacks),
        "flags": " ".join(f"{name}={value!r}," for name, value in flags.items()),
        "data": _data(run, held_out),
        "given": "dict(datamodule=data)" if run.sized else f"dict(train_dataloaders=data{held_out})",
    }


def _own_code(run: DrawnRun) -> dict[str, object]:
    pieces = [OWN_CODE[name] for name in run.own_code]
    at_batchs_end = [piece.at_batchs_end for piece in pieces if piece.at_batchs_end]
    hooks = [piece.hooks for piece in pieces if piece.hooks]
    if at_batchs_end:
        hooks.append("\n    ".join(["def on_train_batch_end(self, outputs, batch, batch_idx):", *at_batchs_end]))
    return {
        "own_parts": "; ".join(piece.parts for piece in pieces if piece.parts),
        "own_loss": "; ".join(piece.loss for piece in pieces if piece.loss),
        "own_hooks": "\n\n".join(hooks).replace("\n", "\n    "),
    }


def _loop(run: DrawnRun) -> dict[str, object]:
    guarded, k = "SkipBadSteps" in run.callbacks, run.accumulate_grad_batches
    backward = "guard.backward" if guarded else "torch.Tensor.backward"
    mean = f"{backward}(nn.functional.mse_loss(model(batch[0].to(DEVICE)), batch[1].to(DEVICE)) / {k})"
    window = f"accumulate(model, window, summed_loss, lambda batch: len(batch[1]), backward={backward})"
    clip = ", max_norm=0.5" if run.clip else ""
    raises = run.unusable is not None
    leave = "guard.abandon(); continue" if guarded else "continue"
    return {
        "data": _loader(run),
        "frozen": "net[0].requires_grad_(False)" if run.frozen else "",
        "guard": f"guard = keeps['guard'] = StepGuard(model, optimizer, scheduler=schedule{clip})" if guarded else "",
        "max_epochs": run.max_epochs,
        "k": k,
        "backward_of_a_mean": "" if run.weighs_samples else mean,
        "backward_of_a_window": window if run.weighs_samples and not raises else "",
        "passes_a_window_over": f"if cannot_be_used(lambda: {window}): {leave}" if raises else "",
        "refuses_a_sample": f"if {run.unusable} in batch[2]: raise Unusable" if raises else "",
        "clip": "nn.utils.clip_grad_norm_(net.parameters(), 0.5)" if run.clip and not guarded else "",
        "step": "guard.step()" if guarded else "optimizer.step()",
        "step_of_the_schedule": "schedule.step()" if run.schedule and not guarded else "",
        "saves": LOOP_SAVES.get(run.saves, "window.number == window.number_of_windows"),
        "guards_counters": "guard.updates, guard.skipped" if guarded else "",
    }


def _data(run: DrawnRun, held_out: str) -> str:
    if run.sized:
        return _sized_data(run, held_out)
    return _loader(run)


def _sized_data(run: DrawnRun, held_out: str) -> str:
    stages = f"SizeSchedule({{0: (2, {run.batch_size + 1}), 1: (3, {run.batch_size})}})"
    order = f"shuffle={run.shuffle}, seed=3, tail={run.tail!r}"
    return f"SizeScheduleDataModule(samples, {stages}, cut, {order}{held_out}, {_loader_options(run)})"


def _loader(run: DrawnRun) -> str:
    n, b, options = run.samples, run.batch_size, _loader_options(run)
    order = f"shuffle={run.shuffle}, seed=3, tail={run.tail!r}"
    if run.sampler == "":
        drop_last = run.tail == "drop"
        return f"ResumableDataLoader(samples, {b}, shuffle={run.shuffle}, drop_last={drop_last}, seed=3, {options})"
    if run.sampler == "ShuffledBatchSampler":
        sampler = f"ShuffledBatchSampler({n}, {b}, {order})"
    elif run.sampler == "TwoStreamBatchSampler":
        first = n - n // 3
        sampler = f"TwoStreamBatchSampler(range({first}), range({first}, {n}), {b}, 1, {order})"
    else:
        drawn = f"BatchSampler(RandomSampler(range({n})), {b}, False)"
        sampler = f"ShardedBatchSampler({drawn}, seed=3, tail={run.tail!r})"
    return f"ResumableDataLoader(samples, batch_sampler=samplers.{sampler}, {options})"


def _loader_options(run: DrawnRun) -> str:
    options = "collate_fn=collate, num_workers=workers" + ", pin_memory=True" * (run.device != "cpu")
    if any(run.workers):
        of_workers = f"persistent_workers={run.persistent}, prefetch_factor={run.prefetch_factor}"
        options += f", **(dict({of_workers}) if workers else {{}})"
    return options


def _tail(run: DrawnRun) -> dict[str, object]:
    return {
        "kills": [kill.arguments for kill in run.kills],
        "lives": [(number, run.ranks_of(number), run.workers_of(number)) for number in range(len(run.kills) + 1)],
        "first_ranks": run.ranks[0],
        "first_workers": run.workers[0],
    }
