"""Really run a script and count what it does: ``python counter.py OUT.json train.py [its arguments]``.

The oracle of the lapse. It computes everything, and shares no code with what it is held against.
"""

import functools
import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data import DataLoader, dataloader
from torch.utils.data.distributed import DistributedSampler

counts: Counter[str] = Counter()
rates: list[list[float]] = []
deep: Counter[str] = Counter()
optimizers: list[Optimizer] = []
evaluating = True


def within(name, function):
    @functools.wraps(function)
    def inner(*arguments, **options):
        deep[name] += 1
        try:
            return function(*arguments, **options)
        finally:
            deep[name] -= 1

    return inner


def counting(kind, name, label, guard=None):
    function = vars(kind)[name]
    if hasattr(function, "is_counted"):
        return
    run = within(guard, function) if guard else function

    @functools.wraps(function)
    def counted(*arguments, **options):
        counts[label] += not (guard and deep[guard])
        return run(*arguments, **options)

    counted.is_counted = True
    setattr(kind, name, counted)


def step_begins(optimizer, *_):
    deep["step"] += 1


def step_ends(optimizer, *_):
    deep["step"] -= 1
    if not any(optimizer is known for known in optimizers):
        optimizers.append(optimizer)
    counts["optimizer steps"] += not deep["step"]
    rates.append([float(group["lr"]) for group in optimizer.param_groups])


def count_forwards():
    call = nn.Module.__call__

    def called(module, *arguments, **options):
        global evaluating
        if deep["module"] or deep["backward"] or next(module.parameters(), None) is None:
            return call(module, *arguments, **options)
        training = module.training and (torch.is_grad_enabled() or deep["checkpoint"] > 0)
        counts["forwards in training" if training else "forwards in evaluation"] += 1
        counts["validations"] += not (training or evaluating)
        evaluating = not training
        deep["module"] += 1
        try:
            return call(module, *arguments, **options)
        finally:
            deep["module"] -= 1

    nn.Module.__call__ = called


def count_everything():
    register_optimizer_step_pre_hook(step_begins)
    register_optimizer_step_post_hook(step_ends)
    backward = torch.autograd.backward
    inner = within("backward", backward)

    @functools.wraps(backward)
    def counted_backward(*arguments, **options):
        counts["backward passes"] += not deep["backward"]
        return inner(*arguments, **options)

    torch.autograd.backward = counted_backward
    CheckpointFunction.forward = staticmethod(within("checkpoint", CheckpointFunction.forward))
    begin = lr_scheduler.LRScheduler._initial_step
    lr_scheduler.LRScheduler._initial_step = within("schedule", begin)
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and "step" in vars(kind):
            counting(kind, "step", "scheduler steps", guard="schedule")
    counting(Optimizer, "zero_grad", "zero_grad")
    counting(nn.Module, "zero_grad", "zero_grad")
    counting(DistributedSampler, "set_epoch", "set_epoch")
    make = DataLoader.__init__

    @functools.wraps(make)  # Lightning reads its signature
    def made(loader, *arguments, **options):
        make(loader, *arguments, **options)
        for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
            for kind in type(sampler).__mro__:
                if "set_epoch" in vars(kind):
                    counting(kind, "set_epoch", "set_epoch")

    DataLoader.__init__ = made
    advance = dataloader._BaseDataLoaderIter.__next__

    def delivered(iterator):
        batch = advance(iterator)
        counts["batches"] += 1
        return batch

    dataloader._BaseDataLoaderIter.__next__ = delivered
    save = torch.save

    @functools.wraps(save)
    def saved(*arguments, **options):
        counts["saves"] += 1
        save(*arguments, **options)

    torch.save = saved
    try:
        import safetensors.torch
    except ImportError:
        pass
    else:
        counting(safetensors.torch, "serialize_file", "saves")
    count_forwards()


def really_counted(out, script, arguments):
    """Run the script in this process, which then has to end, and write down what it did."""
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    count_everything()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    Path(out).write_text(json.dumps({"counts": counts, "rates": rates}))


if __name__ == "__main__":
    _, out, script, *arguments = sys.argv
    really_counted(out, script, arguments)
