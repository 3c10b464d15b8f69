"""What a guard can be made of; everything else is refused before the first window."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from course_lib._arguments import int_of_at_least
from course_lib._ranks import Reduction, any_outside
from course_lib._tensors import needs_closure, parameters_of
from course_lib._words import counted
from course_lib.skipping.lr_schedules import goes_by_lr_factor


def check_optimizer(model: nn.Module, reduction: Reduction, optimizer: Optimizer) -> None:
    if needs_closure(optimizer):
        raise ValueError(
            f"optimizer must step without a closure, got {type(optimizer).__name__}: it makes many evaluations a step"
        )
    held = parameters_of(optimizer)
    if any_outside(reduction.replicas, held):
        raise ValueError(
            "the optimizer holds parameters outside DistributedDataParallel: their gradients are each rank's own, "
            "and the ranks could not decide alike. Wrap all that is trained, or give each part its own guard"
        )
    of_the_model = set(model.parameters())
    strangers = sum(parameter not in of_the_model for parameter in held)
    if strangers:
        raise ValueError(
            f"the optimizer holds {counted(strangers, 'parameter')} (of {len(held):,}) that the guard's model does not "
            "have: what their modules' buffers take in could not be put back. Give the guard a module that holds all "
            "that the optimizer trains (nn.ModuleList, say, and call guard.begin() before each window's first "
            "forward), or an optimizer of this model's parameters"
        )


def check_scaler(scaler: torch.amp.GradScaler | None, reduction: Reduction) -> None:
    if scaler is not None and reduction.shards:
        raise ValueError(
            "scaler must be None where fully_shard has sharded the model: each rank would lower its own. Train in "
            "bfloat16, by fully_shard's mp_policy"
        )


def check_scheduler(scheduler: Any) -> None:
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise ValueError(f"scheduler must be one that has a step(), got {type(scheduler).__name__}: give one")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("scheduler must be one that is stepped by updates, got ReduceLROnPlateau: step it yourself")
    if goes_by_lr_factor(scheduler):
        raise ValueError(
            "the scheduler must go by updates, got LambdaLR(optimizer, lr_factor(...)), which goes with the batch "
            "sizes, by attempts: make the guard first, and set guard.scheduler = LambdaLR(optimizer, lambda update: "
            "factor(guard.attempts))"
        )


def check_averages(model: nn.Module, averages: Iterable[Any]) -> None:
    shapes = [parameter.shape for parameter in model.parameters()]
    for average in averages:
        if not callable(getattr(average, "update_parameters", None)):
            raise ValueError(
                f"averages must be an AveragedModel or several of them, got one of {type(average).__name__}, which has "
                "no update_parameters"
            )
        if isinstance(average, AveragedModel) and [p.shape for p in average.module.parameters()] != shapes:
            raise ValueError(
                "averages must be made of the guard's model, got an AveragedModel of another: its parameters have "
                "other shapes. Make it by AveragedModel(model)"
            )


def check_limits(max_norm: float | None, max_consecutive_skips: int | None) -> None:
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be a positive number or None, got {max_norm!r}")
    if max_consecutive_skips is not None:
        int_of_at_least(1, "max_consecutive_skips", max_consecutive_skips)


def check_state(state: Mapping[str, Any]) -> None:
    missing = {"attempts", "updates", "norms"} - set(state)
    if missing:
        raise ValueError(
            f"this is no state of a StepGuard: it has no {sorted(missing)[0]!r}, only {sorted(map(str, state))}"
        )
