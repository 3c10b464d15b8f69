"""growth: what is alive after each of some steps, and was not before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from course_lib._words import counted
from course_lib.leaks import watch_growth
from course_lib.leaks.census import Census, Count
from course_lib.leaks.culprits import find_culprits
from course_lib.preflight.report import Finding, Judgement
from course_lib.preflight.runs.lightning_run import Enough, LightningRun
from course_lib.preflight.runs.loaders import stop_workers
from course_lib.preflight.runs.plain_loop import PlainLoop

WARMUP = 3
STEPS = 12


def growth_over_steps(run: LightningRun | PlainLoop) -> Callable[[Path], Judgement]:
    """A trial: watch some steps, as :func:`course_lib.leaks.watch_growth` does."""

    def trial(folder: Path) -> Judgement:
        culprits = _in_loop(run) if isinstance(run, PlainLoop) else _in_fit(run, folder)
        if culprits is None:
            return Judgement(not_judged={"growth": f"the run has fewer than {WARMUP + STEPS} steps"})
        return Judgement(findings=[_finding(culprits)] if culprits else [])

    return trial


def _in_fit(run: LightningRun, folder: Path) -> list[str] | None:
    named: list[list[str]] = []
    counts: list[Count] = []
    with Census() as census:

        def end(trainer: Any, *_: Any) -> None:
            nonlocal counts
            done = trainer.fit_loop.total_batch_idx + 1
            if done == WARMUP:
                census.begin()
                counts = []  # a list from before would be seen to grow
            elif done > WARMUP:
                counts.append(census.count())
            if done == WARMUP + STEPS:
                series = {f.name: [getattr(c, f.name) for c in counts] for f in fields(Count) if f.name != "lengths"}
                named.append([str(culprit) for culprit in find_culprits(census, counts, series)])
                raise Enough

        def begin(trainer: Any, *_: Any) -> None:
            trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1  # a short run is gone on with
            for config in trainer.lr_scheduler_configs:
                config.scheduler.step = _as_far_as_it_goes(config.scheduler.step)

        run.start(
            folder,
            world_size=run.world_size,
            prepare_loader=stop_workers,
            on_train_start=begin,
            on_train_batch_end=end,
        )
    return named[0] if named else None


def _as_far_as_it_goes(step: Callable[..., None]) -> Callable[..., None]:
    """``step`` of a schedule that may have an end and raise after it, as OneCycleLR does."""

    def stepped(*arguments: Any, **options: Any) -> None:
        with contextlib.suppress(ValueError):
            step(*arguments, **options)

    return stepped


def _in_loop(run: PlainLoop) -> list[str]:
    stop_workers(run.loader)
    batches = _again_and_again(run.loader)

    def step() -> None:
        for _ in range(run.accumulate_grad_batches):
            (run.loss_fn(run.model, next(batches)) / run.accumulate_grad_batches).backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        run.optimizer.zero_grad()

    return [str(culprit) for culprit in watch_growth(step, STEPS, warmup=WARMUP).culprits]


def _again_and_again(loader: Any) -> Any:
    while True:
        yield from loader


def _finding(culprits: list[str]) -> Finding:
    first = " ".join(culprits[0].split()).rstrip(".")
    more = f" ({counted(len(culprits) - 1, 'more thing')} with it)" if len(culprits) > 1 else ""
    return Finding(
        "growth",
        f"In {STEPS} steps, something grows: {first}{more}.",
        "The run holds a little of every step, and runs out of memory after some hours.",
        "Keep numbers in place of tensors with a graph (loss.item(), detach()), and empty what is collected.",
        "03_memory",
    )
