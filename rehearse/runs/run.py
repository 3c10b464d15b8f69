"""What a run is told, and what it says of itself when it has started, in plain values."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from course_lib.steps import StepPlan, plan_steps
from rehearse.runs.walks import WalkedSchedule

Batch = tuple[int, ...]
"""The indices of a batch that was dealt; of a stream, a number for each sample's content."""
MOST_INDICES = 300_000
"""The largest dataset whose epochs are dealt in a few seconds."""


class Enough(BaseException):
    """Ends a trial's training: what was wanted has been seen."""


@dataclass(frozen=True)
class Settings:
    """What a run is told, in a Trainer's words."""

    accumulate_grad_batches: int | dict[int, int]
    """Micro-batches in a window; a dict says it by epoch."""
    max_epochs: int
    """``-1`` without a limit, as ``max_steps``."""
    max_steps: int = -1
    max_time: bool = False
    limit_train_batches: int | float = 1.0
    """1 is one batch, 1.0 is all."""
    limits_others: bool = False
    """Whether its validation, test or prediction is a number of batches, too: it is short by choice."""
    overfits: bool = False
    """Whether it trains on the same few batches."""
    reloads: bool = False
    """Whether the loader is made again between epochs."""
    automatic: bool = True
    """Whether windows step by these settings, and not by the module's own code."""
    world_size: int = 1
    finds_unused: bool = False
    """Whether DDP is told to look for unused parameters."""
    precision: str = "32-true"

    @property
    def is_limited(self) -> bool:
        """Whether a part of each epoch is trained only."""
        return not isinstance(self.limit_train_batches, float) or self.limit_train_batches != 1.0

    @property
    def ends_with_its_epochs(self) -> bool:
        """Whether nothing but the number of its epochs ends the run."""
        return self.max_steps == -1 and not self.is_limited


def seed_as_another_process(number: int) -> None:
    """Seed the global generators as they would be in a process that was started without a seed."""
    seeds = np.random.SeedSequence([2026, number]).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # noqa: NPY002
    torch.manual_seed(int(seeds[2]))


# --------------------------------------------------------------------------------- what a run says when it has started


@dataclass(frozen=True)
class Started(Settings):
    """A started run on rank 0, in plain values."""

    optimizers: int = 1
    batches: int | None = None
    """Micro-batches of an epoch on one rank; None where the loader has no length."""
    batches_without_limit: int | None = None
    per_rank_batch_size: int | None = None
    drop_last: bool = False
    samples: int | None = None
    batches_by_epoch: tuple[int, ...] = ()
    """Where the loader is made again in each epoch, the micro-batches of each."""
    plan: StepPlan | None = None
    why_no_plan: str = ""
    other_plans: dict[str, StepPlan] = field(default_factory=dict)
    """What the run would be without a setting that cuts it short, by the setting's name."""
    schedules: tuple[WalkedSchedule, ...] = ()
    """Those that a Trainer steps."""
    own_schedules: tuple[WalkedSchedule, ...] = ()
    """Others of the run's optimizers, which nobody but the module's own code can step."""


def planned(started: Started, planner: Any = None) -> Started:
    """With its plan and those without a setting that cuts it short; ``planner``: a batch sampler's own, or None."""
    why = _why_no_plan(started)
    if why:
        return replace(started, why_no_plan=why)
    others = {}
    if started.max_steps != -1 and started.max_epochs != -1:
        others["max_steps"] = replace(started, max_steps=-1)
    whole = started.batches_without_limit
    if whole not in (None, started.batches):
        others["limit_train_batches"] = replace(started, batches=whole, limit_train_batches=1.0)
    plans = {name: _plan(other, planner) for name, other in others.items()}
    return replace(started, plan=_plan(started, planner), other_plans=plans)


def _why_no_plan(started: Started) -> str:
    if not started.automatic:
        return "with manual optimization, the module's own code decides when to step"
    if started.batches is None:
        return "the loader has no length"
    if started.batches == 0:
        return "the run has no batch"
    if started.max_epochs == -1 and started.max_steps == -1:
        return "neither max_epochs nor max_steps ends this run"
    return ""


def _plan(started: Started, planner: Any) -> StepPlan:
    stops: dict[str, Any] = {"max_epochs": started.max_epochs, "max_steps": started.max_steps}
    if planner is not None and not started.overfits:
        plan: StepPlan = planner(limit_train_batches=started.limit_train_batches, **stops)
        return plan
    assert started.batches is not None
    if len(set(started.batches_by_epoch)) > 1:
        # So many samples that each epoch's batches are all full: only their number counts here.
        samples = math.lcm(*started.batches_by_epoch)
        sizes = {epoch: samples // batches for epoch, batches in enumerate(started.batches_by_epoch)}
        return plan_steps(samples, sizes, accumulate_grad_batches=started.accumulate_grad_batches, **stops)
    # Each batch counts as one sample: how many samples are in it is not asked here.
    return plan_steps(started.batches, 1, accumulate_grad_batches=started.accumulate_grad_batches, **stops)
