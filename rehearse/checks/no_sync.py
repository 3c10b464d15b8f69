"""no_sync: in which micro-batches of a window the ranks average their gradients, and what the step is made with.

DDP wraps the model for a group of ranks that are pretended, and a hook sees each bucket that it would send.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib._tensors import parameters_of
from course_lib._words import counted
from rehearse.report import Judgement, not_judged
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.run import Enough

WINDOWS = 2
MOST_BATCHES = 64
TOLD_ELSEWHERE = (DistributedDataParallel.__module__, ".loops.optimization.automatic")
"""The ends of the names of the modules that refuse what other checks find: DDP's reducer, Lightning's loop."""


@dataclass
class Averaging:
    """What is seen of the gradients of one run."""

    names: dict[int, str] = field(default_factory=dict)
    """Of the parameters, by their identity."""
    local: set[int] = field(default_factory=set)
    """Parameters with a gradient that was added since their last average."""
    added: set[int] = field(default_factory=set)
    """Parameters with a gradient in this backward pass."""
    averaged: set[int] = field(default_factory=set)
    """Parameters that were averaged in this backward pass."""
    batches: int = 0
    """Micro-batches since the last step."""
    averages: list[int] = field(default_factory=list)
    """The micro-batches of the window, from 1, in which gradients were averaged."""
    steps: list[AveragedStep] = field(default_factory=list)

    def add(self, parameter: torch.Tensor) -> None:
        """A gradient has been added to that of a parameter."""
        if not self.added:
            engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(self.close_backward)
        self.added.add(id(parameter))

    def close_backward(self) -> None:
        """Sum up the backward pass that has ended."""
        self.local |= self.added
        self.local -= self.averaged
        if self.averaged and (not self.averages or self.averages[-1] != self.batches):
            self.averages.append(self.batches)
        self.added, self.averaged = set(), set()


@dataclass(frozen=True)
class AveragedStep:
    """One optimizer step."""

    batches: int
    averages: tuple[int, ...]
    parameters: int
    """Of the optimizer, with a gradient."""
    local: tuple[str, ...]
    """Those whose gradient is, in part or as a whole, this rank's own."""


def averages_counted(run: LightningRun) -> Callable[[Path], Judgement]:
    """A trial: train some windows under DDP, and see which gradients it averages."""

    def trial(folder: Path) -> Judgement:
        if run.settings.world_size == 1:
            return Judgement()
        averaging = Averaging()
        raised = ""

        def begin(trainer: Any, model: Any) -> None:
            _watch(trainer, model, averaging)

        def begin_batch(trainer: Any, model: Any, *_: Any) -> None:
            averaging.close_backward()
            averaging.batches += 1
            _watch_gradients(model, averaging)

        def end_batch(*_: Any) -> None:
            if len(averaging.steps) >= WINDOWS or run.batches_begun >= MOST_BATCHES:
                raise Enough

        try:
            run.start(
                folder,
                averages=True,
                on_train_start=begin,
                on_train_batch_start=begin_batch,
                on_train_batch_end=end_batch,
            )
        except RuntimeError as error:
            # Another check tells it: of parameters without a gradient, and of a None in place of a loss.
            if not _raised_in(error).endswith(TOLD_ELSEWHERE):
                raise
            raised = str(error).split(". ")[0]
        if raised or not averaging.steps:
            return not_judged("no_sync", raised or f"no optimizer step in {MOST_BATCHES} micro-batches")
        return judge_averages(averaging.steps, run.settings.world_size)

    return trial


def _raised_in(error: BaseException) -> str:
    """The name of the module that raised it."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return str(last.f_globals["__name__"])


def _watch(trainer: Any, model: Any, averaging: Averaging) -> None:
    wrapped = trainer.strategy.model
    if not isinstance(wrapped, DistributedDataParallel):
        raise RuntimeError(f"{type(trainer.strategy).__name__} does not wrap the model in DistributedDataParallel")

    def average(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        averaging.averaged |= {id(parameter) for parameter in bucket.parameters()}
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().div_(dist.get_world_size()))  # the others give nothing
        return done

    # torch compares a hook's annotations, which are strings here; a lambda has none.
    wrapped.register_comm_hook(None, lambda _, bucket: average(bucket))
    for optimizer in trainer.optimizers:
        # After the step: a Trainer has it call the backward pass.
        optimizer.register_step_post_hook(lambda stepping, *_: _step(stepping, averaging))


def _watch_gradients(model: Any, averaging: Averaging) -> None:
    """Of parameters that were added since the last batch as well."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in averaging.names:
            averaging.names[id(parameter)] = name
            parameter.register_post_accumulate_grad_hook(averaging.add)


def _step(optimizer: torch.optim.Optimizer, averaging: Averaging) -> None:
    averaging.close_backward()
    held = [p for p in parameters_of(optimizer) if p.grad is not None]
    local = tuple(averaging.names[id(p)] for p in held if id(p) in averaging.local)
    averaging.steps.append(AveragedStep(averaging.batches, tuple(averaging.averages), len(held), local))
    averaging.local -= {id(p) for p in held}
    averaging.batches, averaging.averages = 0, []


def judge_averages(steps: list[AveragedStep], world_size: int) -> Judgement:
    """Hold each step's gradients against what must have been averaged."""
    wrong = next((step for step in steps if step.local), None)
    if wrong is None:
        window = max(steps, key=lambda step: step.batches)
        often = (
            f"no_sync: a window of {window.batches} micro-batches averages its gradients over the ranks "
            f"{len(window.averages)} times; once, in the last, gives the same"
        )
        return Judgement(notes=[often] if len(window.averages) > 1 else [])
    shown = f"a window of {counted(wrong.batches, 'micro-batch', 'micro-batches')}"
    which = f"{len(wrong.local):,} of {counted(wrong.parameters, 'gradient')}, {wrong.local[0]} first"
    if not wrong.averages:
        says = f"In {shown}, no gradient is averaged over the {world_size} ranks before the step."
        cure = "Call self.manual_backward(loss) in place of loss.backward(), so that DDP prepares to average."
    elif wrong.batches not in wrong.averages:
        said = ", ".join(map(str, wrong.averages))
        says = (
            f"In {shown}, gradients are averaged over the {world_size} ranks in micro-batch {said} and not in the "
            f"last: the step is made with this rank's own part in {which}."
        )
        cure = "Put all micro-batches but the last under no_sync, forward and backward."
    else:
        says = (
            f"In {shown}, the step is made with gradients that are this rank's own, at least in part: {which}; the "
            f"others are averaged over the {world_size} ranks."
        )
        cure = (
            "Add every loss to what training_step returns, and make or replace layers before the strategy wraps the "
            "model (in configure_model or setup)."
        )
    means = "The ranks step differently: their weights part, and no error says so."
    return Judgement().find("no_sync", says, means, cure)
