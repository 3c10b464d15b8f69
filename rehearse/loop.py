"""The pieces of a loop, rehearsed: a script that trains with them as chapter 04 does is recorded in a fork, and judged.

report = rehearse_loop(model, loader, loss_fn, optimizer, scheduler=scheduler, max_epochs=3)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._words import int_of_at_least
from rehearse._held_out import length_of
from rehearse.report import RehearsalReport, checked, report_of
from rehearse.runs.copies import try_on_copies
from rehearse.runs.played import SHARE, played
from rehearse.script import EXPECTATIONS, SCRIPT_CHECKS, NotRehearsed, Others, judged
from rehearse.scripts.journal import Journal


def rehearse_loop(
    model: nn.Module,
    loader: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,
    accumulate_grad_batches: int = 1,
    max_epochs: int = 1,
    expect: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
    allow_unjudged: Collection[str] = (),
    seconds: float = 20.0,
) -> RehearsalReport:
    """Judge the pieces of a loop by a loop over them, of which each window steps, the short last one as well.

    It is judged as a script is, by :func:`rehearse.rehearse_script`; afterwards the pieces are as they were before.

    Args:
        model: What is trained.
        loader: The training loader; a sampler of it that has ``set_epoch`` is told each epoch.
        loss_fn: ``loss_fn(model, batch)`` -> the loss of a micro-batch, divided by the window.
        optimizer: Steps once for each window.
        scheduler: Is stepped after each update; ``None``: none.
        accumulate_grad_batches: Micro-batches in a window.
        max_epochs: Epochs to run.
        expect, skip, allow_unjudged: See :func:`rehearse.rehearse_script`.
        seconds: The CPU time that it may take.

    Raises:
        ValueError: An argument is out of its range, or names a check or an expectation that does not exist.
        NotRehearsed: The loop fails.
    """
    wanted = checked(SCRIPT_CHECKS, EXPECTATIONS, expect, skip, allow_unjudged, seconds)
    k = int_of_at_least(1, "accumulate_grad_batches", accumulate_grad_batches)
    epochs = int_of_at_least(1, "max_epochs", max_epochs)
    began = time.monotonic()

    def train() -> None:
        for epoch in range(epochs):
            for part in (loader.sampler, loader.batch_sampler):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            for number, batch in enumerate(loader, start=1):
                (loss_fn(model, batch) / k).backward()  # type: ignore[no-untyped-call]
                if number % k == 0 or number == length_of(loader):
                    optimizer.step()
                    optimizer.zero_grad()
                    if scheduler is not None:
                        scheduler.step()

    def trial(_: Path) -> Journal:
        return played(train, loss_fn, seconds=SHARE * seconds, optimizers=[optimizer])

    [answer] = try_on_copies([trial], seconds=seconds)
    if answer.error:
        raise NotRehearsed(f"the loop fails by itself: {answer.error}")
    judgement = judged(answer.value, Others(), final_lr=wanted.get("final_lr"))
    return report_of(SCRIPT_CHECKS, judgement, skip, allow_unjudged, time.monotonic() - began)
