"""resume: a loader is stopped within an epoch and resumed, as a checkpoint of the run would do it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from course_lib._words import counted, first_of
from rehearse.report import Judgement, Kind, Unjudged, in_a_line, not_applicable
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.loaders import deal_indices
from rehearse.runs.run import MOST_INDICES, Batch, seed_as_another_process

MOST_EPOCHS = 4
"""How many epochs are dealt to come to the one in which a checkpoint is saved."""
MOST_STREAMED = 64
"""Batches that are read of a stream."""
ANOTHER_PROCESS = 1_000
CURE = "Use course_lib.resume.ResumableDataLoader, whose position a Trainer saves, or save at the ends of epochs only."


class Saving(NamedTuple):
    """When a run saves."""

    at_all: bool = False
    setting: str = ""
    """The setting that has the run save within an epoch; empty where none does."""
    epoch: int = 0
    batch: int = 0
    """Micro-batches of that epoch that are done at the first save within one."""
    inside_window: bool = False
    """Whether the run may save inside a window as well."""


def saving_of(run: LightningRun, batches: int, window: int) -> Saving:
    """When a started run saves, with so many micro-batches in an epoch and in a window."""
    last = math.inf if run.settings.max_epochs == -1 else run.settings.max_epochs
    within = [(at, way) for way in run.saves if (at := way.first_within_epoch(batches, window)) and at[0] < last]
    inside = any(way.may_cut_a_window(batches, window) for way in run.saves)
    if not within:
        return Saving(at_all=bool(run.saves), inside_window=inside)
    (epoch, batch), first = min(within, key=lambda pair: pair[0])
    return Saving(True, first.setting, epoch, batch, inside)


@dataclass(frozen=True)
class Stop:
    """One epoch as it comes, the state of its loaders within it, and when the run would save that."""

    saved_by: str = ""
    """The setting that has the run save within an epoch; empty where none does."""
    inside_window: bool = False
    """Whether the run may save inside a window as well."""
    saves: bool = False
    """Whether the run saves at all."""
    epoch: int = 0
    done: int = 0
    """Micro-batches of the epoch that were read when the state was taken."""
    batches: tuple[Batch, ...] = ()
    """Indices, or fingerprints of a stream's samples."""
    states: bytes = b""
    """Pickled: the states of the training loaders, and of the data module."""
    stateful: bool = False
    """Whether the loader has a state that a Trainer saves."""
    idle_sampler: str = ""
    """A batch sampler with a state that nobody asks for."""
    stream: bool = False
    seeded: bool = False
    """Whether the run seeds all its generators, so that a resumed one begins with the same."""
    ends_at: int = 0
    """Micro-batches that the Trainer counts in the epoch."""
    why_not: Unjudged | None = None


def stop(run: LightningRun) -> Callable[[Path], Stop]:
    """A trial: deal an epoch, and take the loader's state in the middle of it."""

    def trial(folder: Path) -> Stop:
        stopped = run.at_start(folder, lambda: _stopped(run), workers=True, prepare_loader=_dealing_ahead(run))
        return stopped or Stop(saves=bool(run.saves), why_not=_not_of_this_run("the run has no batch"))

    return trial


def go_on(run: LightningRun, stop: Stop) -> Callable[[Path], tuple[Batch, ...] | str]:
    """A trial: in a run that starts again, load the state and deal what comes then; or what the loader raised."""

    def trial(folder: Path) -> tuple[Batch, ...] | str:
        def look() -> tuple[Batch, ...]:
            run.turn_to_epoch(stop.epoch)
            return run.read_on(stop.ends_at - stop.done)

        def deal(loader: Any) -> None:
            _dealing_ahead(run)(loader)
            if not stop.seeded:
                seed_as_another_process(ANOTHER_PROCESS)

        try:
            run.load_states(stop.states, stop.epoch)
            rest = run.at_start(folder, look, workers=True, prepare_loader=deal)
        except Exception as error:
            return in_a_line(error)
        if rest is None:
            raise RuntimeError("the run has no batch")
        return rest

    return trial


def _dealing_ahead(run: LightningRun) -> Callable[[Any], None]:
    """Have the loader deal indices; one that has a state keeps its workers, as they fetch ahead of it."""
    return lambda loader: deal_indices(loader, min(2, loader.num_workers) if hasattr(loader, "state_dict") else 0)


def _stopped(run: LightningRun) -> Stop:
    plain = Stop(saves=bool(run.saves), seeded="PL_GLOBAL_SEED" in os.environ)
    if len(run.loaders()) != 1:
        return replace(plain, why_not=_not_of_this_run(f"the run has {len(run.loaders())} training loaders"))
    loader = run.loaders()[0]
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return replace(plain, why_not=_not_of_this_run(f"{type(loader).__name__} is no torch DataLoader"))
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    stream = isinstance(dataset, IterableDataset)
    batches = run.counted_batches()
    if batches is None:
        batches = MOST_STREAMED
    elif not stream and len(dataset) > MOST_INDICES:
        return replace(plain, why_not=Unjudged(f"{len(dataset):,} samples are too many to be dealt in seconds"))
    window = run.settings.accumulate_grad_batches if run.settings.automatic else 1
    saving = saving_of(run, batches, max(window.values()) if isinstance(window, dict) else window)
    if not saving.setting and not stateful:
        return plain
    epoch = min(saving.epoch, MOST_EPOCHS - 1)
    done = saving.batch if saving.setting else max(1, batches // 2)
    if stream:
        done = min(done, MOST_STREAMED // 2)
    most = MOST_STREAMED if stream else None
    for number in range(epoch):
        run.begin_epoch(number)
        run.read_on(most, begin=number > 0)
    run.begin_epoch(epoch)
    dealt = run.read_on(done, begin=epoch > 0)
    states = run.states()
    rest = run.read_on(None if most is None else most - done)
    sampler = loader.batch_sampler
    return replace(
        plain,
        saved_by=saving.setting,
        inside_window=saving.inside_window,
        epoch=epoch,
        done=len(dealt),
        batches=dealt + rest,
        states=states,
        stateful=stateful,
        idle_sampler=type(sampler).__name__ if hasattr(sampler, "state_dict") and not stateful else "",
        stream=stream,
        ends_at=min(batches, len(dealt + rest)),
    )


def _not_of_this_run(why: str) -> Unjudged:
    return Unjudged(why, Kind.NOT_APPLICABLE)


def judge_resume(stop: Stop, rest: tuple[Batch, ...] | str) -> Judgement:
    """Hold what came after a resume against what would have come without the stop."""
    where = f"after {counted(stop.done, 'micro-batch', 'micro-batches')} of epoch {stop.epoch}"
    by = f" ({stop.saved_by})" if stop.saved_by else ""
    if isinstance(rest, str):
        return Judgement().find(
            "resume",
            f"The state that the loader gives {where}{by} cannot be loaded: {rest}.",
            "The run cannot be resumed from its checkpoints.",
            "Let load_state_dict take what state_dict gives; conformance.check_batch_sampler tries it.",
        )
    expected = stop.batches[stop.done : stop.ends_at]
    if rest == expected:
        return Judgement()
    if stop.stream:
        return _of_stream(stop, rest, where, by)
    trained = Counter(index for batch in stop.batches[: stop.done] + rest for index in batch)
    usual = Counter(index for batch in stop.batches[: stop.ends_at] for index in batch)
    if max(usual.values(), default=1) > 1 and not stop.stateful:
        return Judgement(notes=[f"resume: {where}, another draw is resumed with: samples are repeated by choice"])
    twice = sorted(index for index in trained if trained[index] > max(1, usual[index]))
    never = sorted(index for index in usual if index not in trained)
    if not twice and not never:
        another = f"resume: {where}, the loader's state brings its samples in another order"
        return Judgement(notes=[another] if stop.stateful else [])
    samples = sum(len(batch) for batch in stop.batches[: stop.ends_at])
    shown = f" ({first_of(twice, 3)})" if twice else ""
    numbers = f"{len(twice):,} of {samples:,} samples are trained twice in that epoch{shown} and {len(never):,} never"
    if stop.stateful:
        says = f"Stopped {where} and resumed by its own state, the loader goes on elsewhere: {numbers}."
        cure = "Count what the loop was given and not what the sampler gave out, as ResumableDataLoader does."
    else:
        says = f"{stop.saved_by} saves {where}, and the loader has no state: resumed from there, {numbers}."
        cure = CURE
        if stop.idle_sampler:
            cure = f"{stop.idle_sampler} has a state, which nobody saves: put it into a ResumableDataLoader."
    return Judgement().find("resume", says, "Each resume trains some samples again and misses others.", cure)


def _of_stream(stop: Stop, rest: tuple[Batch, ...], where: str, by: str) -> Judgement:
    again = set(stop.batches[: stop.done])
    common = min(len(rest), stop.done)
    repeated = sum(batch in again for batch in rest[:common])
    expected = stop.batches[stop.done : stop.ends_at]
    if stop.stateful and rest and rest[0] in expected:
        missed = expected.index(rest[0])
        return Judgement().find(
            "resume",
            f"Stopped {where} and resumed by its own state, the stream goes on "
            f"{counted(missed, 'batch', 'batches')} later: those are never trained.",
            "A Trainer fetches a batch ahead of a loader without a length, and its state counts that.",
            "Give the stream a length (__len__), or count the batches in on_train_batch_end.",
        )
    if not common or repeated < common:
        return not_applicable("resume", "the samples of a stream cannot be told apart by their contents")
    return Judgement().find(
        "resume",
        f"A checkpoint {where}{by} does not know how far the stream was read: resumed from there, it "
        f"starts over, and {counted(stop.done, 'batch is', 'batches are')} trained again.",
        "Each resume trains the beginning of the stream again, and as much of its end never.",
        "Give the loader state_dict and load_state_dict, or save at the ends of epochs only.",
    )
