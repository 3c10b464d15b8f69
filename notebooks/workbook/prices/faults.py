"""The faults: each replaces some lines of the loop, in one place, by what is often written there.

fault = FAULTS["horizon_floor"]
print(fault.diff())                      # the lines that change
train = fault.patched()                  # the loop with the fault
train(job, seed=0)
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from workbook.prices import loop
from workbook.prices.jobs import Job

BOTH = ("gpt", "cnn")
SOURCE = inspect.getsource(loop.train)
TrainingLoop = Callable[[Job, int], list[loop.Reading]]


class Fault(NamedTuple):
    """A fault as a patch of :func:`workbook.prices.loop.train`."""

    title: str
    setting: str
    """The sizes and times that the lines themselves do not say; what is not as in the other rows."""
    old: str
    """Lines of the loop, indented as from the first of them."""
    new: str
    jobs: tuple[str, ...] = BOTH
    reading: bool = False
    """The fault changes what the validation says, and no weight (or hardly any)."""

    def source(self) -> str:
        """The loop's source with the fault. Raises ValueError where the lines are not there once."""
        places = [line for line in SOURCE.splitlines() if line.strip() == self.old.splitlines()[0]]
        indent = places[0].removesuffix(places[0].lstrip()) if places else ""
        old, new = (textwrap.indent(lines, indent) + "\n" for lines in (self.old, self.new))
        if SOURCE.count("\n" + old) != 1:
            raise ValueError(f"the lines of {self.title!r} are in {SOURCE.count(old)} places of the loop, expected 1")
        return SOURCE.replace("\n" + old, "\n" + new)

    def diff(self) -> str:
        """What changes, as a unified diff of the loop."""
        lines = difflib.unified_diff(
            SOURCE.splitlines(), self.source().splitlines(), "right", "fault", n=2, lineterm=""
        )
        return "\n".join(lines)

    def patched(self) -> TrainingLoop:
        """The loop with the fault, compiled."""
        names = dict(vars(loop))
        exec(compile(self.source(), f"<{self.title}>", "exec"), names)
        return names["train"]


ORDER = "order = shuffled(job.training, seed, epoch)"
MODEL_TRAIN = "model.train()"
LOSS = "loss = job.loss_sum(model, batch) / count"
BACKWARD = "loss.backward()"
CLIP = "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
STEP = "if norm.isfinite():\n    optimizer.step()"
RNG = "rng = np.random.default_rng([seed, epoch, number])"
POISON = """\
if job.training[0] in [index for batch in batches for index in batch.indices]:
    next(model.parameters()).grad.fill_(math.nan)"""
WINDOW = f"for batch in batches:\n    {LOSS}\n    {BACKWARD}\n{CLIP}\n{STEP}\nschedule.step()"
TOTAL = "total_steps = job.epochs * math.ceil(micro_batches / job.k)"
SUMS = """\
loss_sum += cross_entropy_sum(scores, batch.targets).item()
right += int((scores.argmax(-1) == batch.targets).sum())
count += batch.target_count"""
START = "torch.manual_seed(seed)"

FAULTS = {
    "horizon_floor": Fault(
        "the schedule's horizon by floor division",
        "the rate is 0 in as many steps as there are epochs",
        TOTAL,
        "total_steps = job.epochs * (micro_batches // job.k)",
    ),
    "horizon_micro_batches": Fault(
        "the schedule's horizon in micro-batches",
        "k times too long, warm-up too",
        TOTAL,
        "total_steps = job.epochs * micro_batches",
    ),
    "schedule_in_micro_batches": Fault(
        "the schedule stepped in each micro-batch",
        "the rate is 0 after 1/k of the run",
        WINDOW,
        WINDOW.replace("\nschedule.step()", "").replace(BACKWARD, f"{BACKWARD}\n    schedule.step()"),
    ),
    "loss_over_k": Fault(
        "loss ÷ k, the short window too",
        "ragged micro-batches (cnn), masked tokens (gpt)",
        LOSS,
        "loss = job.loss_sum(model, batch) / batch.target_count / job.k",
    ),
    "mean_of_means": Fault(
        "an average in each micro-batch, averaged",
        "over the micro-batches that the window has",
        LOSS,
        "loss = job.loss_sum(model, batch) / batch.target_count / len(window)",
    ),
    "not_divided": Fault(
        "the micro-batches' means added up",
        "the gradient is k times as long; it is clipped to 1",
        LOSS,
        "loss = job.loss_sum(model, batch) / batch.target_count",
    ),
    "padding_counted": Fault(
        "padding counted as tokens",
        "in the denominator",
        LOSS,
        "loss = job.loss_sum(model, batch) / sum(batch.targets.numel() for batch in batches)",
        jobs=("gpt",),
    ),
    "tail_dropped": Fault(
        "the short window dropped",
        "forwarded, and its gradients set to zero",
        CLIP,
        f"if len(window) < job.k:\n    optimizer.zero_grad()\n    break\n{CLIP}",
    ),
    "tail_leaked": Fault(
        "the short window leaked into the next epoch",
        "its gradients wait for the next window",
        CLIP,
        f"if len(window) < job.k:\n    break\n{CLIP}",
    ),
    "drop_last": Fault(
        "drop_last=True for training",
        "the short micro-batch is not forwarded",
        "loader = DataLoader(job.samples, job.micro_batch, sampler=order, collate_fn=list)",
        "loader = DataLoader(job.samples, job.micro_batch, sampler=order, collate_fn=list, drop_last=True)",
        jobs=("cnn",),
    ),
    "zero_grad_in_micro_batches": Fault(
        "zero_grad in each micro-batch",
        "one micro-batch of k counts",
        BACKWARD,
        "optimizer.zero_grad()\nloss.backward()",
    ),
    "zero_grad_forgotten": Fault(
        "zero_grad forgotten",
        "gradients add up for the whole run",
        "schedule.step()\noptimizer.zero_grad()",
        "schedule.step()",
    ),
    "clip_in_micro_batches": Fault(
        "clipped after each micro-batch",
        "what has been added up so far, to 1",
        BACKWARD,
        f"loss.backward()\n{CLIP.removeprefix('norm = ')}",
    ),
    "clip_before_unscale": Fault(
        "clipped ahead of unscale",
        "loss scale 2¹⁶, constant",
        CLIP,
        "for p in model.parameters():\n    p.grad *= 2**16  # the loss was scaled\n"
        f"{CLIP}\nfor p in model.parameters():\n    p.grad /= 2**16",
    ),
    "eval_left_on": Fault(
        "eval mode left on after the first validation",
        "no dropout, BatchNorm by its running statistics",
        MODEL_TRAIN,
        "if epoch == 0:\n    model.train()",
    ),
    "eval_forgotten": Fault(
        "model.eval() forgotten",
        "the reading is wrong, not the net",
        "model.eval()",
        "pass",
        reading=True,
    ),
    "validation_by_batches": Fault(
        "validation as a mean of batch means",
        "batches of 64, the last is short; the reading is wrong, not the net",
        SUMS,
        "loss_sum += cross_entropy_sum(scores, batch.targets).item() / batch.target_count\n"
        "right += int((scores.argmax(-1) == batch.targets).sum()) / batch.target_count\n"
        "count += 1",
        reading=True,
    ),
    "set_epoch_forgotten": Fault(
        "set_epoch forgotten",
        "one order for all epochs; on 2 ranks, played in one process",
        ORDER,
        "order = shuffled(job.training, seed, 0)",
    ),
    "not_shuffled": Fault(
        "not shuffled",
        "in the order of the files: by kind (cnn), by chapter (gpt)",
        ORDER,
        "order = list(job.training)",
    ),
    "seed_plus_rank_order": Fault(
        "seed + rank for the order",
        "each of 2 ranks takes its half of another order; played in one process",
        ORDER,
        "orders = [shuffled(job.training, seed + rank, epoch) for rank in range(2)]\n"
        "order = [index for pair in zip(orders[0][::2], orders[1][1::2]) for index in pair]",
    ),
    "seed_plus_rank_split": Fault(
        "seed + rank for the split",
        "rank 1 of 2 trains on what rank 0 validates on; played in one process",
        ORDER,
        "orders = [shuffled(split(job, seed=rank)[0], seed, epoch) for rank in range(2)]\n"
        "order = [index for pair in zip(orders[0][::2], orders[1][1::2]) for index in pair]",
        reading=True,
    ),
    "equal_in_workers": Fault(
        "equal augmentation in all workers",
        "4 workers; played in one process",
        RNG,
        "rng = np.random.default_rng([seed, epoch, number // 4])",
    ),
    "generator_in_init": Fault(
        "the augmentation's generator made in __init__",
        "equal in 4 workers and in all epochs; played in one process",
        RNG,
        "rng = np.random.default_rng([seed, number // 4])",
    ),
    "bad_sample_stepped": Fault(
        "a NaN stepped on",
        "one bad sample, once an epoch",
        f"{CLIP}\n{STEP}",
        f"{POISON}\n{CLIP}\noptimizer.step()",
    ),
    "bad_sample_skipped": Fault(
        "a NaN skipped, the bad sample left in",
        "its window is lost in each epoch",
        CLIP,
        f"{POISON}\n{CLIP}",
    ),
    "bad_sample_skipped_on_one_rank": Fault(
        "a NaN skipped on one of two ranks",
        "the other steps on it, and its gradients stay NaN; played in one process",
        STEP,
        "if job.training[0] in [index for batch in batches for index in batch.indices]:\n"
        "    for p in model.parameters():\n"
        "        p.register_hook(lambda gradient: gradient * math.nan)  # the other rank's part of the average\n"
        "else:\n"
        "    optimizer.step()",
    ),
    "resume_begins_epoch": Fault(
        "a resume that begins the epoch again",
        "killed in the middle of the second epoch; ends after as many steps",
        ORDER,
        f"{ORDER}\n"
        "half = len(order) // 2 // (job.micro_batch * job.k) * job.micro_batch * job.k\n"
        "if epoch == 1:\n"
        "    order = order[:half] + order  # killed here, and begun again\n"
        "if epoch == job.epochs - 1:\n"
        "    order = order[:-half]  # the last step is reached",
    ),
    "resume_without_optimizer": Fault(
        "a resume without the optimizer's state",
        "after the first epoch",
        MODEL_TRAIN,
        "if epoch == 1:\n    optimizer.state.clear()\nmodel.train()",
    ),
    "resume_without_schedule": Fault(
        "a resume without the schedule's state",
        "after the first epoch; ends after as many steps",
        MODEL_TRAIN,
        "if epoch == 1:\n    schedule.last_epoch = 0\nmodel.train()",
    ),
    "batch_times_4": Fault(
        "batch times 4 without the rate",
        "as many samples, a quarter of the steps",
        START,
        "job = replace(job, k=4 * job.k)\ntorch.manual_seed(seed)",
    ),
    "batch_of_one": Fault(
        "a batch of one without the rate",
        "as many samples, 12 (gpt) and 80 (cnn) times the steps",
        START,
        "job = replace(job, micro_batch=1, k=1)\ntorch.manual_seed(seed)",
    ),
    "half_size": Fault(
        "half the side for the first two of four epochs",
        "as many pictures, 5/8 of the pixels; validated at full size",
        "batches.append(job.collate(samples, rng))",
        "batch = job.collate(samples, rng)\n"
        "if epoch < 2:\n"
        "    batch = batch._replace(inputs=nn.functional.avg_pool2d(batch.inputs, 2))\n"
        "batches.append(batch)",
        jobs=("cnn",),
    ),
}
"""By the name that `make prices FAULT=` knows."""
