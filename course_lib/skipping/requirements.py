"""What a guard can be made of; everything else is refused before the first window."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from course_lib._ranks import Reduction, refuse_what_is_outside_ddp
from course_lib._tensors import needs_closure, parameters_of
from course_lib._words import counted, int_of_at_least
from course_lib.skipping.lr_schedules import goes_by_lr_factor


def check_optimizer(model: nn.Module, reduction: Reduction, optimizer: Optimizer) -> None:
    if needs_closure(optimizer):
        raise ValueError(
            f"optimizer must step without a closure, got {type(optimizer).__name__}: it makes many evaluations a step"
        )
    held = parameters_of(optimizer)
    refuse_what_is_outside_ddp(reduction.replicas, held)
    strangers = len(set(held) - set(model.parameters()))
    if strangers:
        raise ValueError(
            f"the optimizer holds {counted(strangers, 'parameter')} (of {len(held):,}) that the guard's model does not "
            "have: what their modules' buffers take in could not be put back. Give the guard a module that holds all "
            "that the optimizer trains (nn.ModuleList, say, and call guard.begin() before each window's first "
            "forward), or an optimizer of this model's parameters"
        )


def check_scaler(scaler: Any, reduction: Reduction) -> None:
    if scaler is not None and reduction.shards:
        raise ValueError(
            "scaler must be None where fully_shard has sharded the model: each rank would lower its own. Train in "
            "bfloat16, by fully_shard's mp_policy"
        )


def check_scheduler(scheduler: Any) -> None:
    if goes_by_lr_factor(scheduler):
        raise ValueError(
            "the scheduler must go by updates, got LambdaLR(optimizer, lr_factor(...)), which goes with the batch "
            "sizes, by attempts: make the guard first, and set guard.scheduler = LambdaLR(optimizer, lambda update: "
            "factor(guard.attempts))"
        )


def check_limits(max_norm: float | None, max_consecutive_skips: int | None) -> None:
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be a positive number or None, got {max_norm!r}")
    if max_consecutive_skips is not None:
        int_of_at_least(1, "max_consecutive_skips", max_consecutive_skips)
