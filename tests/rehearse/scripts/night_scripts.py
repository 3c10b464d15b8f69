"""A night as a script: its pieces, put together."""

from __future__ import annotations

import dataclasses
from string import Template
from textwrap import dedent, indent

from tests.rehearse.scripts.night_pieces import (
    ASIDES,
    AVERAGES,
    BEGINS,
    CLIPS,
    COMPILED_LOSSES,
    DATASETS,
    ENDS,
    FABRIC,
    HOOKS,
    LOADERS,
    LOOPS,
    LOSSES,
    MODELS,
    OPTIMIZERS,
    SCHEDULES,
    SCORES,
)
from tests.rehearse.scripts.nights import Night

HEAD = """
import contextlib
import copy
import dataclasses
import gc
import itertools
import os
import random

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

torch.manual_seed(0)
random.seed(0)
EPOCHS, STEPS, WINDOWS, ACCUMULATE, BATCH, SAMPLES = {numbers}
training = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,)))
validating = DataLoader(TensorDataset(torch.randn(10, 8), torch.randint(0, 3, (10,))), 4)
RANKS, GROUP = {ranks}
norms, seen, best = [], [], [float("inf")]
teacher = nn.Linear(8, 3).eval()


def smoothed(scores: torch.Tensor, y: torch.Tensor):
    return nn.functional.cross_entropy(scores, y, label_smoothing=0.1)


{compiled}
"""


LEAK = """
whole = TensorDataset(torch.randn(SAMPLES + 6, 8), torch.randint(0, 3, (SAMPLES + 6,)))
training = torch.utils.data.Subset(whole, range(SAMPLES))
leaking = DataLoader(torch.utils.data.Subset(whole, range(SAMPLES - 2, SAMPLES + 6)), 4)
"""


def script_of(night: Night) -> str:
    """The script, with its fault."""
    schedule = SCHEDULES[night.schedule][0]
    if night.fault == "schedule of micro-batches":
        schedule = schedule.replace("STEPS", "STEPS * ACCUMULATE")
    numbers = (night.epochs, night.steps, night.windows, night.accumulate, night.batch_size, night.samples)
    learned = night.loss == "learned weight"
    parts = [
        HEAD.format(
            numbers=", ".join(map(str, numbers)), compiled=COMPILED_LOSSES.get(night.loss, ""), ranks=_ranks(night)
        ),
        dedent(DATASETS[night.batches]),
        dedent(MODELS[night.model]),
        LEAK if night.fault == "validated on training" else "",
        dedent(LOADERS["shuffled" if night.fault == "dealt to each rank" else night.loader]),
        "trained = [parameter for parameter in model.parameters() if parameter.requires_grad]",
        "log_variance = nn.Parameter(torch.zeros(()))\ntrained.append(log_variance)" if learned else "",
        OPTIMIZERS[night.optimizer],
        "model.head = nn.Linear(16, 3)" if night.fault == "head replaced" else "",
        FABRIC if night.tool == "fabric" else "",
        f"schedule = {schedule}" if schedule else "",
        'scaler = torch.amp.GradScaler("cpu")' if night.precision == "scaler" else "",
        AVERAGES[night.average][0],
        HOOKS[night.hook],
        ASIDES[night.aside][0],
        _functions(night),
        _layout(night, _loaded(night) + _loop(night)),
    ]
    return "\n".join(part.strip("\n") for part in parts if part) + "\n"


def _ranks(night: Night) -> str:
    """The options of a DistributedSampler, and of the process group: with several ranks, the environment has both."""
    if night.ranks > 1:
        return "{}, {}"
    return 'dict(num_replicas=1, rank=0), dict(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)'


def _functions(night: Night) -> str:
    scores = {"called apart": "head(body(x).relu())", "output object": "model(x).scores"}
    within = 'with torch.autocast("cpu", torch.bfloat16):\n' if night.precision else ""
    loss = dedent(LOSSES[night.loss]).strip()
    if night.model == "loss inside" and night.loss == "cross entropy":
        loss = "return model(x, y)[1]"
    decorated = "@torch.no_grad()\n" if night.validation == "decorated" else ""
    around = {"no_grad": "with torch.no_grad():", "inference_mode": "with torch.inference_mode():"}
    over = "leaking" if night.fault == "validated on training" else night.over
    look = f"for x, y in {over}:\n{indent(SCORES[night.score], '    ')}"
    if within_mode := around.get(night.validation, "with torch.no_grad():" if not decorated else ""):
        look = within_mode + "\n" + indent(look, "    ")
    after = "" if night.fault == "eval left on" else "model.train()\n"
    validate = f"model.eval()\ntotal = 0.0\n{look}\n{after}return total / len(validating)"
    return (
        f"def scores_of(x):\n    return {scores.get(night.model, 'model(x)')}\n\n"
        f"def loss_of(x, y):\n{indent(within + indent(loss, '    ' if within else ''), '    ')}\n\n"
        f"{decorated}def validate():\n{indent(validate, '    ')}\n"
    )


def _states(night: Night) -> dict[str, str]:
    states = {"model": "model", "optimizer": "optimizer"}
    if night.save == "the model":
        return {"model": "model"}
    if SCHEDULES[night.schedule][0]:
        states["schedule"] = "schedule"
    if night.precision == "scaler":
        states["scaler"] = "scaler"
    return states


def _saved(night: Night) -> str:
    if not night.save:
        return ""
    states = ", ".join(f"{name}={one}.state_dict()" for name, one in _states(night).items())
    return f'torch.save(dict({states}, epoch=epoch), "last.pt")'


def _loaded(night: Night) -> str:
    if night.save != "each epoch":
        return "first_epoch = 0\n"
    loads = "\n".join(f'    {name}.load_state_dict(states["{name}"])' for name in _states(night))
    return (
        f'first_epoch = 0\nif os.path.exists("last.pt"):\n    states = torch.load("last.pt")\n{loads}\n'
        '    first_epoch = states["epoch"] + 1\n'
    )


def _zeroed(night: Night) -> str:
    if night.zero == "model":
        return "model.zero_grad()"
    if night.zero == "by hand":
        return "for parameter in model.parameters():\n    parameter.grad = None"
    return f"optimizer.zero_grad({'set_to_none=False' if night.to_zeros else ''})"


def _scheduled(night: Night, by: str) -> str:
    _, of, _ = SCHEDULES[night.schedule]
    of = {"stepped by epoch": "epoch", "stepped by step": "step"}.get(night.fault, of)
    if of == by == "hand":
        return "for group in optimizer.param_groups:\n    group['lr'] = 0.1 * 0.5**epoch"
    if of != by:
        return ""
    step = "schedule.step(score)" if by == "validation" else "schedule.step()"
    return f"{step}\n{step}" if night.fault == "stepped twice" else step


def _step(night: Night) -> str:
    """What a window ends with."""
    clip = CLIPS[night.clip]
    lines = [clip, "optimizer.step()"]
    if night.precision == "scaler":
        lines = ["scaler.unscale_(optimizer)" if clip else "", clip, "scaler.step(optimizer)", "scaler.update()"]
    if night.zero not in ("before the forward", "before the backward") and _zeroes(night):
        lines.append(_zeroed(night))
    lines += [_scheduled(night, "step"), AVERAGES[night.average][1], ASIDES[night.aside][1]]
    return "\n".join(line for line in lines if line)


def _zeroes(night: Night) -> bool:
    return night.fault not in ("no zero_grad", "zeroed in each micro-batch")


def _micro_batch(night: Night) -> str:
    """With ``x``, ``y`` and ``number``, which counts the micro-batches."""
    if night.optimizer == "LBFGS":
        closure = "optimizer.zero_grad()\nloss = loss_of(x, y)\nloss.backward()\nreturn loss"
        lines = ["def closure():", indent(closure, "    "), "optimizer.step(closure)", _scheduled(night, "step")]
        return "\n".join(line for line in (*lines, AVERAGES[night.average][1], ASIDES[night.aside][1]) if line)
    divided = night.accumulate > 1 and night.fault != "loss not divided"
    loss = "loss = loss_of(x, y)" + (" / ACCUMULATE" if divided else "")
    backward = "scaler.scale(loss).backward()" if night.precision == "scaler" else "loss.backward()"
    if night.tool == "fabric":
        backward = "fabric.backward(loss)"
    zero = ""
    if night.fault == "zeroed in each micro-batch":
        zero = _zeroed(night)
    elif night.zero in ("before the forward", "before the backward") and _zeroes(night):
        zero = _zeroed(dataclasses.replace(night, zero=""))
        if night.accumulate > 1:
            zero = f"if number % ACCUMULATE == 0:\n    {zero}"
    lines = [loss, zero, backward] if night.zero == "before the backward" else [zero, loss, backward]
    if night.accumulate > 1:
        lines += ["if (number + 1) % ACCUMULATE == 0:", indent(_step(night), "    ")]
    else:
        lines.append(_step(night))
    if night.model == "wrapped" and night.accumulate > 1:
        at = lines.index(loss)
        lines[at], lines[at + 1 :] = "", lines[at + 1 :]
        lines[lines.index(backward)] = (
            "with contextlib.nullcontext() if (number + 1) % ACCUMULATE == 0 else model.no_sync():\n"
            f"    {loss}\n    {backward}"
        )
    return "\n".join(line for line in lines if line)


def _loop(night: Night) -> str:
    body = _micro_batch(night)
    if night.validation == "within an epoch":
        body += "\nif number % 3 == 2:\n    score = validate()"
    sets_epoch = night.loader == "distributed" and night.fault not in ("set_epoch never called", "dealt to each rank")
    without_tail = f"itertools.islice(loader, {night.windows * night.accumulate - 1})"
    epoch_begins = [
        "torch.manual_seed(0)" if night.fault == "seeded in each epoch" else "",
        dedent(LOADERS[night.loader]).strip() if night.fresh else "",
        BEGINS.get(night.model, ""),
        "distributed.set_epoch(epoch)" if sets_epoch else "",
        "model.train()" if night.fault != "eval left on" else "",
        _scheduled(night, "hand"),
    ]
    epoch_ends = [
        "score = validate()" if night.validation not in ("", "within an epoch") else "",
        ENDS[night.end],
        _scheduled(night, "epoch"),
        _scheduled(night, "validation"),
        _saved(night),
        "if epoch + 1 == int(os.environ.get('UNTIL', EPOCHS)):\n    break" if night.resumed else "",
    ]
    begins, ends = ("\n".join(line for line in lines if line) for lines in (epoch_begins, epoch_ends))
    loop = Template(dedent(LOOPS[night.walk])).substitute(
        loader=without_tail if night.fault == "tail lost" else "loader",
        batch={"pairs": "x, y", "numpy": "x, y", "dict": "batch"}[night.batches],
        unpacked={"dict": 'x, y = batch["x"], batch["y"]'}.get(night.batches, ""),
        total="EPOCHS * WINDOWS * ACCUMULATE",
        **{name: f"<{name}>" for name in ("begins", "body", "ends")},
    )
    lines = []
    for line in loop.strip().splitlines():
        name = line.strip().strip("<>")
        text = {"begins": begins, "body": body, "ends": ends}.get(name, line.strip())
        lines.append(indent(text, line[: len(line) - len(line.lstrip())]))
    return "\n".join(line for line in lines if line.strip()) + "\n"


def _layout(night: Night, loop: str) -> str:
    if night.layout == "function":
        return f'def main():\n{indent(loop, "    ")}\nif __name__ == "__main__":\n    main()\n'
    if night.layout == "class":
        fit = f"def fit(self):\n{indent(loop, '    ')}"
        return f"class Training:\n{indent(fit, '    ')}\nTraining().fit()\n"
    return loop
