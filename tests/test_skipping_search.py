"""Random guarded runs, each held bit for bit against a plain loop that is never shown the bad windows."""

import copy
import functools
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from course_lib.launch import run_ranks
from course_lib.skipping import StepGuard
from tests import effort
from tests.test_skipping import leave_to_the_device, make_batch, state_of

NAN, INF = math.nan, math.inf
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "Muon": lambda p: torch.optim.Muon([weight for weight in p if weight.dim() == 2], lr=0.01),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
}
MASKED = ("all ignored", "empty mask")
"""The loss is NaN, and its gradients are 0."""
FAULTS = ("NaN input", "infinite loss", "NaN gradient", "infinite gradient", "spike", "reject", "skip", *MASKED)
COMM_HOOKS = {"none": None, "allreduce": allreduce_hook, "fp16": fp16_compress_hook}


@dataclass(frozen=True)
class Fault:
    kind: str
    ranks: tuple[int, ...]
    micro_batch: int


@dataclass(frozen=True)
class Run:
    optimizer: str
    k: int
    """Micro-batches in a window."""
    windows: tuple[Fault | None, ...]
    batch_norm: bool
    frozen: bool
    scaler: bool
    averages: bool
    no_sync: bool
    comm_hook: str
    bucket_view: bool
    reload_before: int
    """The window before which all is made again from its state."""


@st.composite
def runs(draw, world_size):
    optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
    sparse = optimizer == "SparseAdam"
    k = draw(st.integers(1, 3))
    some_ranks = st.lists(st.integers(0, world_size - 1), min_size=1, max_size=world_size, unique=True).map(tuple)
    fault = st.builds(Fault, st.sampled_from(FAULTS), some_ranks, st.integers(0, k - 1))
    windows = draw(st.lists(st.none() | fault, min_size=1, max_size=8).map(tuple))
    scaler = draw(st.booleans()) and not sparse
    comm_hook = "none" if sparse else draw(st.sampled_from(list(COMM_HOOKS)))
    # Three good windows come first: before them no norm is a spike. One of scaled gradients is too large for half
    # precision, and so is an overflow, which changes the scale.
    overflows = scaler and comm_hook == "fp16"
    windows = tuple(
        replace(f, kind="NaN input") if f and f.kind == "spike" and (overflows or windows[:n].count(None) < 3) else f
        for n, f in enumerate(windows)
    )
    averages = draw(st.booleans())
    return Run(
        optimizer=optimizer, k=k, windows=windows, batch_norm=draw(st.booleans()) and not sparse,
        frozen=draw(st.booleans()) and not sparse, scaler=scaler, averages=averages,
        no_sync=draw(st.booleans()),
        comm_hook=comm_hook,
        bucket_view=draw(st.booleans()) and not sparse, reload_before=draw(st.integers(0, 9)),
    )  # fmt: skip


class Parts:
    """A run's model, optimizer and what goes with them; from another one's state, if that is given."""

    def __init__(self, run, guarded, world_size, before=None):
        torch.manual_seed(0)
        if run.optimizer == "SparseAdam":
            self.module = nn.EmbeddingBag(6, 1, sparse=True, mode="sum")
        else:
            norm = [nn.BatchNorm1d(6)] if run.batch_norm else []
            self.module = nn.Sequential(nn.Linear(4, 6), *norm, nn.ReLU(), nn.Linear(6, 1))
            self.module[0].requires_grad_(not run.frozen)
        self.model = self.module
        if world_size > 1:
            self.model = DistributedDataParallel(self.module, gradient_as_bucket_view=run.bucket_view)
            if COMM_HOOKS[run.comm_hook]:
                self.model.register_comm_hook(None, COMM_HOOKS[run.comm_hook])
        self.optimizer = OPTIMIZERS[run.optimizer](self.module.parameters())
        self.scheduler = LambdaLR(self.optimizer, lambda n: 1 / (n + 1))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if run.scaler else None
        average = AveragedModel(self.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.averages = [average] if run.averages else []
        self.stateful = [self.module, self.optimizer, self.scheduler, *self.averages]
        self.stateful += [self.scaler] if self.scaler else []
        self.guard = None
        if guarded:
            self.guard = StepGuard(
                self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler, averages=self.averages,
                spike_factor=50, min_history=3, max_consecutive_skips=None,
            )  # fmt: skip
            if "fused" in run.optimizer:
                leave_to_the_device(self.guard)
            self.stateful.append(self.guard)
        if before is not None:
            if guarded:
                before.guard.flush()
            for part, other in zip(self.stateful, before.stateful, strict=True):
                part.load_state_dict(copy.deepcopy(other.state_dict()))

    def step(self):
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.scheduler.step()
        for average in self.averages:
            average.update_parameters(self.module)


def loss_of(parts, x, fault):
    if fault == "NaN input":
        x = x * NAN
    if isinstance(parts.module, nn.EmbeddingBag):
        y = parts.model(torch.tensor([[1, 1, 2], [3, 1, 0]])) * x[0, 0]
    else:
        y = parts.model(x)
    errors = (y - 1).square()
    if fault == "all ignored":
        return nn.functional.cross_entropy(y, torch.full((len(y),), -100))
    if fault == "empty mask":
        return errors[torch.zeros_like(errors, dtype=torch.bool)].mean()
    if fault == "infinite loss":
        return errors.mean() + INF
    return errors.mean() * (1e6 if fault == "spike" else 1)


def play(run, guarded, rank, world_size):
    """The state at the end; unguarded, of a run whose loader never had the bad windows."""
    parts = Parts(run, guarded, world_size)
    for number, fault in enumerate(run.windows):
        if number == run.reload_before:
            parts = Parts(run, guarded, world_size, before=parts)
        if fault and not guarded:
            continue
        parts.optimizer.zero_grad()
        if fault and fault.kind == "skip":
            if world_size == 1:  # DDP is left alone: a forward without its backward leaves its reducer waiting
                loss_of(parts, make_batch(rank, number, 0) * NAN, None)
            parts.guard.skip("by a vote")
            continue
        for position in range(run.k):
            mine = fault is not None and rank in fault.ranks and position == fault.micro_batch
            kind = fault.kind if mine else None
            waits = run.no_sync and world_size > 1 and position < run.k - 1
            with parts.model.no_sync() if waits else nullcontext():
                loss = loss_of(parts, make_batch(rank, number, position), kind) / run.k
                if kind == "reject":
                    parts.guard.reject("no label")
                hook = None
                if kind in ("NaN gradient", "infinite gradient"):
                    # Of a bad loss, which the scaler must not learn from.
                    value = NAN if kind == "NaN gradient" else INF
                    last = list(parts.module.parameters())[-2 if run.optimizer == "Muon" else -1]
                    hook = last.register_hook(lambda g, value=value: g * value)
                    if run.scaler:
                        parts.guard.reject("so that it is no overflow")
                if guarded:
                    parts.guard.backward(loss)
                elif run.scaler:
                    parts.scaler.scale(loss).backward()
                else:
                    loss.backward()
                if hook:
                    hook.remove()
        if guarded:
            assert bool(parts.guard.step()) is (fault is None), (number, fault)
        else:
            parts.step()
    if guarded:
        parts.guard.flush()
        skipped = sum(fault is not None for fault in run.windows)
        assert (parts.guard.attempts, parts.guard.skipped) == (len(run.windows), skipped)
    return state_of(*[part for part in parts.stateful if part is not parts.guard])


def told(run, rank, world_size):
    """What is wrong with a run on this rank; empty where nothing is."""
    try:
        ours, theirs = (play(run, guarded, rank, world_size) for guarded in (True, False))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    different = [name for name in ours if ours[name] != theirs.get(name)]
    return f"differ: {different}" if different or ours.keys() != theirs.keys() else ""


def search(rank, world_size, examples):
    # Both ranks draw the same runs, and are told the same of each: so they shrink alike.
    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(runs(world_size))
    def every_run_is_right(run):
        answers = [told(run, rank, world_size)]
        if world_size > 1:
            (answer,) = answers
            answers = [""] * world_size
            dist.all_gather_object(answers, answer)
        assert not any(answers), answers

    every_run_is_right()


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_guarded_run_ends_where_one_ends_that_never_saw_the_bad_windows(world_size):
    examples = effort.cases(30, 1500) if world_size == 1 else effort.cases(40, 500)
    run_ranks(functools.partial(search, world_size=world_size, examples=examples), world_size, timeout=540)
