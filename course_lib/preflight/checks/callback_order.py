"""setup, deeper: whether the first windows train other weights where the callbacks stand in the opposite order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from course_lib.preflight.checks.setup import MOST_BATCHES, WINDOWS
from course_lib.preflight.report import Judgement
from course_lib.preflight.runs.copies import try_on_copies
from course_lib.preflight.runs.lightning_run import WRITING, Enough, LightningRun, is_any_of, seed_as_another_process
from course_lib.preflight.runs.loaders import stop_workers

Weights = dict[str, Tensor]


def judge_callback_order(run: LightningRun, seconds: float) -> Judgement:
    """A note where the order matters: which of the two is meant, only the reader knows."""
    callbacks = [callback for callback in run.trainer.callbacks if not is_any_of(callback, WRITING)]
    if len(callbacks) < 2:
        return Judgement()
    answers = try_on_copies([_weights_after(run, turned) for turned in (False, False, True)], seconds=seconds)
    if any(answer.error for answer in answers):
        return Judgement()  # setup says it, or the opposite order is impossible
    once, again, turned = (answer.value for answer in answers)
    if _differ(once, again) or not _differ(once, turned):
        return Judgement()
    names = ", ".join(type(callback).__name__ for callback in callbacks)
    return Judgement(
        notes=[f"setup: the order of the callbacks matters ({names}): the opposite one trains other weights"]
    )


def _weights_after(run: LightningRun, turned: bool) -> Callable[[Path], Weights]:
    def trial(folder: Path) -> Weights:
        if turned:
            run.trainer.callbacks.reverse()

        def end(trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx + 1 >= min(MOST_BATCHES, WINDOWS * trainer.accumulate_grad_batches):
                raise Enough

        run.start(
            folder,
            world_size=run.world_size,
            prepare_loader=stop_workers,
            on_train_start=lambda *_: seed_as_another_process(0),
            on_train_batch_start=lambda trainer, *_: seed_as_another_process(trainer.fit_loop.total_batch_idx),
            on_train_batch_end=end,
        )
        return {name: value.detach().clone() for name, value in run.model.state_dict().items()}

    return trial


def _differ(weights: Weights, others: Weights) -> bool:
    return any(not value.equal(others[name]) for name, value in weights.items() if name in others)
