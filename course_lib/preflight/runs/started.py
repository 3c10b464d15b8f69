"""What a Trainer says of a run when it has started, on rank 0: its epochs, its windows, its schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from course_lib.preflight.runs.lightning_run import Enough, LightningRun
from course_lib.preflight.runs.loaders import stop_workers
from course_lib.preflight.runs.schedule_walk import Schedule, walked
from course_lib.steps import StepPlan, plan_steps

MOST_EPOCHS = 50
"""Epochs for which a loader that is made again in each is asked for its length."""


@dataclass(frozen=True)
class Started:
    """A started run in plain values; ``-1`` is no limit, as in a Trainer."""

    world_size: int
    automatic: bool
    optimizers: int
    batches: int | None
    """Micro-batches of an epoch on one rank; None where the loader has no length."""
    batches_without_limit: int | None
    per_rank_batch_size: int | None
    drop_last: bool
    samples: int | None
    limit_train_batches: int | float
    accumulate_grad_batches: int | dict[int, int]
    max_epochs: int
    max_steps: int
    max_time: bool
    overfits: bool
    plan: StepPlan | None
    batches_by_epoch: tuple[int, ...] = ()
    """Where the loader is made again in each epoch, the micro-batches of each."""
    why_no_plan: str = ""
    other_plans: dict[str, StepPlan] = field(default_factory=dict)
    """What the run would be without a setting that cuts it short, by the setting's name."""
    schedules: tuple[Schedule, ...] = ()


def start(run: LightningRun, folder: Path) -> Started:
    """Start the run on rank 0 of its ranks, and say what is seen there. For a trial."""
    seen: list[Started] = []

    def look(trainer: Any, model: Any) -> None:
        bare = _look(run, trainer, model)
        calls = max([1, *(plan.micro_batches for plan in (bare.plan, *bare.other_plans.values()) if plan)])
        schedules = []
        for config in trainer.lr_scheduler_configs if bare.automatic else ():
            schedules.append(walked(config, calls))
        seen.append(replace(bare, schedules=tuple(schedules)))
        raise Enough

    # A fit of 0 batches returns before training starts; it has made its loaders by then.
    run.start(folder, world_size=run.world_size, prepare_loader=stop_workers, on_train_start=look)
    return seen[0] if seen else _look(run, run.trainer, run.model)


def _look(run: LightningRun, trainer: Any, model: Any) -> Started:
    batches = trainer.fit_loop.max_batches
    loaders = run.loaders()
    loader = loaders[0] if len(loaders) == 1 else None
    starts = Started(
        world_size=int(trainer.world_size),
        automatic=bool(model.automatic_optimization),
        optimizers=len(trainer.optimizers),
        batches=None if math.isinf(batches) else int(batches),
        batches_without_limit=_length_of(loader),
        per_rank_batch_size=_batch_size_of(loader),
        drop_last=bool(getattr(loader, "drop_last", False)),
        samples=_length_of(getattr(loader, "dataset", None)),
        limit_train_batches=trainer.limit_train_batches,
        accumulate_grad_batches=run.accumulate_grad_batches,
        max_epochs=run.max_epochs,
        max_steps=int(trainer.max_steps),
        max_time=any(type(callback).__name__ == "Timer" for callback in trainer.callbacks),
        overfits=bool(trainer.overfit_batches),
        plan=None,
    )
    why = _why_no_plan(starts)
    if why:
        return replace(starts, why_no_plan=why)
    if trainer.reload_dataloaders_every_n_epochs and 1 < starts.max_epochs <= MOST_EPOCHS:
        starts = replace(starts, batches_by_epoch=tuple(_reloaded(run, starts.max_epochs)))
    planner = getattr(getattr(loader, "batch_sampler", None), "plan", None)
    others = {}
    if starts.max_steps != -1 and starts.max_epochs != -1:
        others["max_steps"] = replace(starts, max_steps=-1)
    if starts.batches_without_limit not in (None, starts.batches):
        others["limit_train_batches"] = replace(starts, batches=starts.batches_without_limit, limit_train_batches=1.0)
    return replace(
        starts,
        plan=_plan(starts, planner),
        other_plans={name: _plan(other, planner) for name, other in others.items()},
    )


def _why_no_plan(starts: Started) -> str:
    if not starts.automatic:
        return "with manual optimization, the module's own code decides when to step"
    if starts.batches is None:
        return "the loader has no length"
    if starts.batches == 0:
        return "the run has no batch"
    if starts.max_epochs == -1 and starts.max_steps == -1:
        return "neither max_epochs nor max_steps ends this run"
    return ""


def _reloaded(run: LightningRun, epochs: int) -> Iterator[int]:
    for epoch in range(epochs):
        run.begin_epoch(epoch)
        yield max(1, int(run.trainer.fit_loop.max_batches))


def _plan(starts: Started, planner: Any) -> StepPlan:
    stops: dict[str, Any] = {"max_epochs": starts.max_epochs, "max_steps": starts.max_steps}
    if planner is not None and not starts.overfits:
        plan: StepPlan = planner(limit_train_batches=starts.limit_train_batches, **stops)
        return plan
    assert starts.batches is not None
    if len(set(starts.batches_by_epoch)) > 1:
        samples = math.lcm(*starts.batches_by_epoch)
        sizes = {epoch: samples // batches for epoch, batches in enumerate(starts.batches_by_epoch)}
        return plan_steps(samples, sizes, accumulate_grad_batches=starts.accumulate_grad_batches, **stops)
    # Each batch counts as one sample: how many samples are in it is not asked here.
    return plan_steps(starts.batches, 1, accumulate_grad_batches=starts.accumulate_grad_batches, **stops)


def _length_of(thing: Any) -> int | None:
    try:
        return None if thing is None else len(thing)
    except TypeError:
        return None


def _batch_size_of(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    return size if size is not None else getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
