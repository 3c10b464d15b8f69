"""One run, what is counted in it, and the record of the runs that are done."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import platform
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from workbook.prices import faults, jobs, loop
from workbook.prices.faults import FAULTS
from workbook.prices.jobs import JOBS, Batch, Job

RIGHT = "right"
"""The name of the loop without a fault."""


class Run(NamedTuple):
    """A training that has ended: a line of the record."""

    job: str
    fault: str
    seed: int
    loss: float
    """Of the last validation, in nats: for a character, or a picture."""
    accuracy: float
    samples_lost: int
    """Of all samples of all epochs: those that no update used. An update at a rate of 0, or by NaN, uses none."""
    samples_twice: int
    """How often updates used one that had been used in this epoch."""
    steps: int
    """Updates by finite gradients, at a rate above 0."""
    seconds: float
    code: str
    """A checksum of the loop with its fault, and of the jobs."""
    machine: str


class Pending(Counter[tuple[int, int]]):
    """By (epoch, sample): in how many backward passes of the gradients that wait for a step."""


@dataclass
class Counts:
    """What reaches an update, counted while a loop runs."""

    epoch: int = 0
    validating: bool = False
    pending: Pending = field(default_factory=Pending)
    used: Counter[tuple[int, int]] = field(default_factory=Counter)
    steps: int = 0

    def read(self, training: bool) -> None:
        """A batch is made. The first one of a training after a validation is of the next epoch."""
        if training and self.validating:
            self.epoch += 1
        self.validating = not training

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The optimizer is about to step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        finite = all(bool(p.grad.isfinite().all()) for p in parameters)
        if finite and optimizer.param_groups[0]["lr"] > 0:
            self.steps += 1
            self.used.update(self.pending)


@dataclass(frozen=True)
class CountedJob(Job):
    """A job that counts; what it computes is the same."""

    counts: Counts = field(default_factory=Counts)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss_sum(model, batch)
        samples = [(self.counts.epoch, index) for index in batch.indices]
        loss.register_hook(lambda gradient: self.counts.pending.update(samples))  # called by the backward pass
        return loss


def counted(job: Job) -> CountedJob:
    """The job, with hooks where batches are made, gradients set to zero, and steps taken."""
    counts = Counts()

    def collate(samples: list[Any], rng: np.random.Generator | None) -> Batch:
        counts.read(training=rng is not None)
        return job.collate(samples, rng)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = job.optimizer(model)
        made.register_step_pre_hook(counts.stepped)
        zero_grad = made.zero_grad

        def counted_zero_grad(set_to_none: bool = True) -> None:
            counts.pending.clear()
            zero_grad(set_to_none)

        made.zero_grad = counted_zero_grad  # type: ignore[method-assign]
        return made

    fields = {name: getattr(job, name) for name in job.__dataclass_fields__}
    return CountedJob(**{**fields, "collate": collate, "optimizer": optimizer}, counts=counts)


def run(job_name: str, fault_name: str, seed: int, **sizes: int) -> Run:
    """Train once. `sizes` replaces sizes of the job, for tests."""
    job = counted(replace(JOBS[job_name](), **sizes))  # type: ignore[arg-type]
    train = loop.train if fault_name == RIGHT else FAULTS[fault_name].patched()
    started = time.perf_counter()
    loss, accuracy = train(job, seed)[-1]
    seconds = time.perf_counter() - started
    expected = [(epoch, index) for epoch in range(job.epochs) for index in job.training]
    used = job.counts.used
    return Run(
        job_name,
        fault_name,
        seed,
        loss,
        accuracy,
        samples_lost=sum(used[sample] == 0 for sample in expected),
        samples_twice=sum(max(0, used[sample] - 1) for sample in expected),
        steps=job.counts.steps,
        seconds=round(seconds, 1),
        code=code_of(fault_name),
        machine=this_machine(),
    )


@cache
def code_of(fault_name: str) -> str:
    """Changes where the loop with this fault, or a job, computes something else; docstrings do not count."""
    source = faults.SOURCE if fault_name == RIGHT else FAULTS[fault_name].source()
    trees = []
    for text in (source, inspect.getsource(jobs)):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(None)
        trees.append(ast.dump(tree))
    return hashlib.sha256("".join(trees).encode()).hexdigest()[:12]


@cache
def this_machine() -> str:
    """The processor and the versions: what a last bit may depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{names[0] if names else platform.processor()}, torch {torch.__version__}, Python {platform.python_version()}"
    )


class Record:
    """The runs that are done, a line of JSON each. A line that an interruption cut short is not counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[tuple[str, str, int], Run] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                done = Run(**json.loads(line))
            except json.JSONDecodeError:
                continue
            known = done.fault == RIGHT or done.fault in FAULTS
            if known and done.code == code_of(done.fault):
                self.runs[done.job, done.fault, done.seed] = done

    def add(self, done: Run) -> None:
        """Append a run at once."""
        cut_short = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut_short else "") + json.dumps(done._asdict()) + "\n")
        self.runs[done.job, done.fault, done.seed] = done

    def pairs(self, job: str, fault: str, seeds: list[int]) -> list[tuple[Run, Run]]:
        """(right, faulty) for each seed of which both are done."""
        both = [(self.runs.get((job, RIGHT, seed)), self.runs.get((job, fault, seed))) for seed in seeds]
        return [(right, faulty) for right, faulty in both if right and faulty]


def diverged(done: Run) -> bool:
    """No finite loss, or one above twice that of guessing all answers alike."""
    answers = {"gpt": 72, "cnn": 6}[done.job]
    return not math.isfinite(done.loss) or done.loss > 2 * math.log(answers)
