"""What validates is part of the run: which samples are in both, whether it comes, whether what is monitored is logged.

A short epoch with its validation is run; what it finds stands under setup, length and dealing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from course_lib._words import counted, first_of
from rehearse._checkpoints import is_any_of, is_lightnings
from rehearse._held_out import length_of, same_data, under_subsets
from rehearse.report import Judgement, in_a_line, not_judged
from rehearse.runs.lightning_run import LightningRun

OTHER_NAMES = ("epoch", "step")
"""What a checkpoint may monitor without anybody who logs it."""


class Monitor(NamedTuple):
    """Who waits for a value that is to be logged."""

    who: str
    name: str
    strict: bool
    """Whether it raises where the value is not there."""
    every_epochs: int = 0
    """How often it asks; 0 where that is not at the ends of epochs."""


class Validation(NamedTuple):
    """What a run says of its validation before it starts."""

    exists: bool = False
    """Whether there is a validation step."""
    may_be_given: bool = False
    """Whether its data may be given to the fit, so that it is not known here."""
    every_epochs: int | None = 1
    """Epochs between two validations; None where they are counted in batches."""
    monitors: tuple[Monitor, ...] = ()


def validation_of(run: LightningRun) -> Validation | None:
    """What there is of one, and who monitors what; to be asked before a start. None where that is not known."""
    trainer = run.trainer
    if trainer.overfit_batches or trainer.fast_dev_run:
        return None
    monitors = []
    for callback in trainer.callbacks:
        name = getattr(callback, "monitor", None)
        if isinstance(name, str) and is_any_of(callback, {"ModelCheckpoint", "EarlyStopping"}):
            monitors.append(Monitor(type(callback).__name__, name, bool(getattr(callback, "strict", True))))
    exists = not is_lightnings(run.model, "validation_step") and trainer.limit_val_batches != 0
    given = run.has_data_module or run.val_dataloaders is not None
    has_own = given or not is_lightnings(run.model, "val_dataloader")
    every = trainer.check_val_every_n_epoch if trainer.val_check_interval == 1.0 else None
    return Validation(exists, exists and not has_own, every, tuple(monitors))


@dataclass
class Validated:
    """What is seen of a short epoch."""

    logged: set[str] = field(default_factory=set)
    by_validation: set[str] = field(default_factory=set)
    came: bool = False
    shared: Judgement = field(default_factory=Judgement)


def judge_validation(run: LightningRun, validation: Validation, epochs: int | None) -> Callable[[Path], Judgement]:
    """A trial: run a short epoch and its validation. ``epochs``: those that the run completes; None: not known."""

    def trial(folder: Path) -> Judgement:
        seen = Validated()
        monitors = list(validation.monitors)
        before: set[str] = set()

        def begin(trainer: Any, model: Any) -> None:
            for config in trainer.lr_scheduler_configs:
                if config.reduce_on_plateau and config.monitor:
                    every = int(config.frequency) if config.interval == "epoch" else 0
                    monitors.append(Monitor("ReduceLROnPlateau", config.monitor, bool(config.strict), every))
                config.strict = False

        def begin_validation(trainer: Any, model: Any) -> None:
            before.update(trainer.callback_metrics)

        def end_validation(trainer: Any, model: Any) -> None:
            seen.came = True
            seen.by_validation = set(trainer.callback_metrics) - before
            seen.shared = _shared(run.loaders(), _loaders_in(trainer.val_dataloaders))

        def end(trainer: Any, model: Any) -> None:
            seen.logged = set(trainer.callback_metrics)

        try:
            run.start(
                folder,
                validates=True,
                on_train_start=begin,
                on_validation_start=begin_validation,
                on_validation_end=end_validation,
                on_train_end=end,
            )
        except Exception as error:
            if not monitors and not validation.exists:
                return Judgement()
            return not_judged("setup", f"in a short epoch with its validation: {in_a_line(error)}")
        judgement = seen.shared
        if seen.came:
            judgement.add(_never(validation, epochs))
        if seen.came or not validation.may_be_given:
            judgement.add(_monitored(monitors, seen, validation))
        elif monitors:
            names = ", ".join(repr(monitor.name) for monitor in monitors)
            judgement.notes.append(
                f"setup: whether {names} is logged was not tried, as the validation's data is not known"
            )
        return judgement

    return trial


def _never(validation: Validation, epochs: int | None) -> Judgement:
    every = validation.every_epochs
    if every is None or epochs is None or every <= max(epochs, 0):
        return Judgement()
    return Judgement().find(
        "length",
        f"check_val_every_n_epoch={every} in a run of {counted(epochs, 'full epoch')}: the validation never comes.",
        "No value of it is logged, and what monitors one saves, stops or changes nothing.",
        f"Set check_val_every_n_epoch to at most {max(epochs, 1)}.",
    )


def _monitored(monitors: Sequence[Monitor], seen: Validated, validation: Validation) -> Judgement:
    judgement = Judgement()
    for monitor in monitors:
        if monitor.name in seen.logged or monitor.name in OTHER_NAMES:
            every = validation.every_epochs or 1
            if monitor.every_epochs and monitor.name in seen.by_validation and monitor.every_epochs % every:
                judgement.find(
                    "setup",
                    f"{monitor.who} asks for {monitor.name!r} every {counted(monitor.every_epochs, 'epoch')}, and the "
                    f"validation that logs it comes every {every}.",
                    "The fit raises at the end of the first epoch that has no such value.",
                    f'Return the schedule with "frequency": {every}.',
                )
            continue
        close = difflib.get_close_matches(monitor.name, seen.logged, 1)
        names = ", ".join(sorted(seen.logged)[:6]) or "nothing"
        says = f"{monitor.who} monitors {monitor.name!r}, and an epoch of 2 batches with its validation logs {names}."
        if monitor.strict:
            means = "The fit raises when it first asks for it, after an epoch."
            judgement.find(
                "setup", says, means, f"Monitor {close[0]!r}." if close else "Log it, or monitor what is logged."
            )
        else:
            judgement.notes.append(f"setup: {says[0].lower() if says[1].islower() else says[0]}{says[1:]}")
    return judgement


# ------------------------------------------------------------------------------------------- samples that are in both


def _loaders_in(loaders: Any) -> list[Any]:
    if isinstance(loaders, DataLoader):
        return [loaders]
    parts = loaders.values() if isinstance(loaders, dict) else loaders if isinstance(loaders, list | tuple) else []
    return [loader for loader in parts if isinstance(loader, DataLoader)]


def _shared(training: Sequence[Any], validating: Sequence[Any]) -> Judgement:
    if len(training) != 1 or not isinstance(training[0], DataLoader):
        return Judgement()
    trained = training[0].dataset
    for loader in validating:
        if isinstance(trained, IterableDataset) or isinstance(loader.dataset, IterableDataset):
            continue
        base, part = under_subsets(trained)
        if part is None and under_subsets(loader.dataset)[0] is base:
            return Judgement(notes=["dealing: the validation's samples are those of the training set"])
        shared = _same(trained, loader.dataset)
        if shared:
            return Judgement().find(
                "dealing",
                f"{len(shared):,} of the {counted(len(loader.dataset), 'sample')} of the validation are trained "
                f"as well ({first_of(shared, 4)}).",
                "The validation measures what was learned by heart, and a checkpoint or an early stop goes by that.",
                "Split once, and keep the two parts: random_split(dataset, lengths, generator) with one seed for both.",
            )
    return Judgement()


def _same(trained: Any, validated: Any) -> list[int]:
    """The indices of the validation's samples that are trained, as far as that can be seen."""
    base, mine = under_subsets(trained)
    other, its = under_subsets(validated)
    if length_of(base) is None or length_of(other) is None:
        return []
    if same_data(base, other):
        return sorted(set(range(len(base)) if mine is None else mine) & set(range(len(other)) if its is None else its))
    return []
