"""bad_step: what becomes of the run when one batch is not finite, where the run means to skip it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_lib._words import counted
from rehearse.report import Judgement, in_a_line, not_applicable
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.run import Enough

BAD = 2
"""The number of the batch that is made NaN, from 0."""
CURE = "Use callbacks.SkipBadSteps, which skips such a step on all ranks and leaves nothing of it behind."


@dataclass
class PoisonedBatch:
    """What became of a few batches, one of which is NaN."""

    collated: int = 0
    poisoned: int = 0
    """Float tensors that were made NaN."""
    roots: list[str] = field(default_factory=list)
    """Of each training_step: the last operation of its loss; empty where it returned None."""
    raised: str = ""
    refused: str = ""
    """What the run's own code raises for it."""
    nan_parameters: tuple[str, ...] = ()

    @property
    def means_to_skip(self) -> bool:
        """Whether training_step does something else with the bad batch than with those before it."""
        return len(self.roots) > BAD and self.roots[BAD] != self.roots[BAD - 1]

    @property
    def returned_none(self) -> bool:
        return len(self.roots) > BAD and not self.roots[BAD] and bool(self.roots[BAD - 1])


def one_bad_batch(run: LightningRun) -> Callable[[Path], Judgement]:
    """A trial: run a few batches, the third of which is NaN."""

    def trial(folder: Path) -> Judgement:
        bad = PoisonedBatch()

        def begin(trainer: Any, model: Any) -> None:
            step = trainer.strategy.training_step

            def recorded(*arguments: Any, **options: Any) -> Any:
                output = step(*arguments, **options)
                bad.roots.append(_root(output))
                return output

            trainer.strategy.training_step = recorded

        def end(trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx > BAD:
                raise Enough

        try:
            run.start(
                folder,
                prepare_loader=lambda loader: _poison(loader, bad),
                on_train_start=begin,
                on_train_batch_end=end,
            )
        except Exception as error:
            # A Trainer of several ranks refuses a step without a loss.
            if isinstance(error, RuntimeError) and run.settings.world_size > 1 and bad.roots and not bad.roots[-1]:
                bad.raised = "Skipping the training_step by returning None in distributed training is not supported"
            elif bad.poisoned and len(bad.roots) == BAD:  # the batches before it raised nothing
                bad.refused = in_a_line(error)
            else:
                raise
        bad.nan_parameters = tuple(name for name, value in run.model.named_parameters() if not value.isfinite().all())
        return judge_bad_step(bad, run.settings.world_size)

    return trial


def _poison(loader: Any, bad: PoisonedBatch) -> None:
    collate = loader.collate_fn

    def collate_and_poison(samples: Any) -> Any:
        batch = collate(samples)
        if bad.collated == BAD:
            bad.poisoned = _make_nan(batch)
        bad.collated += 1
        return batch

    loader.collate_fn = collate_and_poison


def _make_nan(batch: Any) -> int:
    if isinstance(batch, Tensor):
        if not batch.is_floating_point():
            return 0
        batch.fill_(torch.nan)
        return 1
    if isinstance(batch, Mapping):
        return sum(map(_make_nan, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(_make_nan, batch))
    return 0


def _root(output: Any) -> str:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, tuple | list):
        loss = loss[0]
    if not isinstance(loss, Tensor):
        return ""
    return "a constant" if loss.grad_fn is None else loss.grad_fn.name()


def judge_bad_step(bad: PoisonedBatch, world_size: int) -> Judgement:
    """A run that is not meant to skip bad batches gets a note only."""
    if bad.collated <= BAD:
        return not_applicable("bad_step", f"a batch of NaN comes after {BAD} others, and an epoch has no more")
    if not bad.poisoned:
        return not_applicable("bad_step", "no batch of floats was seen that could be made NaN")
    if bad.refused:
        return Judgement(notes=[f"bad_step: a batch of NaN ends the run: {bad.refused}"])
    if bad.raised or (bad.returned_none and world_size > 1):
        wrong = (
            f"For a batch of NaN, training_step returns None, and the run has {world_size} ranks: {bad.raised}.",
            "The run ends there, or hangs if one rank alone returns None.",
        )
    elif bad.means_to_skip and bad.nan_parameters:
        wrong = (
            f"training_step treats batch {BAD}, which is NaN, as a special case ({bad.roots[BAD]} and not "
            f"{bad.roots[BAD - 1]}), and yet {counted(len(bad.nan_parameters), 'parameter')} became NaN, "
            f"{bad.nan_parameters[0]} first.",
            "The skip does not skip: 0 times NaN is NaN, and the run never recovers.",
        )
    elif bad.nan_parameters:
        nan = counted(len(bad.nan_parameters), "parameter")
        note = f"bad_step: a batch of NaN makes {nan} NaN for the rest of the run; callbacks.SkipBadSteps would skip it"
        return Judgement(notes=[note])
    else:
        return Judgement()
    return Judgement().find("bad_step", *wrong, CURE)
