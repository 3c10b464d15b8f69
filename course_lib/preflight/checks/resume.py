"""resume: a loader is stopped within an epoch and resumed, as a checkpoint of the run would do it."""

from __future__ import annotations

import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from course_lib._words import counted, first_of
from course_lib.preflight.checks.dealing import MOST_INDICES, Batch, fingerprint
from course_lib.preflight.report import Finding, Judgement
from course_lib.preflight.runs.checkpoints import Saves, saves_of
from course_lib.preflight.runs.copies import in_a_line
from course_lib.preflight.runs.lightning_run import Enough, LightningRun, seed_as_another_process
from course_lib.preflight.runs.loaders import deal_indices, indices_of, stop_workers

CHAPTER = "06_batch_samplers_ddp"
MOST_EPOCHS = 4
"""How many epochs are dealt to come to the one in which a checkpoint is saved."""
MOST_STREAMED = 64
"""Batches that are read of a stream."""
ANOTHER_PROCESS = 1_000
CURE = "Use course_lib.resume.ResumableDataLoader, whose position a Trainer saves, or save at the ends of epochs only."


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
    why_not: str = ""


def stop(run: LightningRun) -> Callable[[Path], Stop]:
    """A trial: deal an epoch, and take the loader's state in the middle of it."""
    ways = saves_of(run.trainer, run.model)

    def trial(folder: Path) -> Stop:
        stops: list[Stop] = []

        def look(trainer: Any, model: Any) -> None:
            stops.append(_stopped(run, ways))
            raise Enough

        run.start(folder, world_size=run.world_size, prepare_loader=_deal_with_workers, on_train_start=look)
        return stops[0] if stops else Stop(saves=bool(ways), why_not="the run has no batch")

    return trial


def go_on(run: LightningRun, stop: Stop) -> Callable[[Path], tuple[Batch, ...] | str]:
    """A trial: in a run that starts again, load the state and deal what comes then; or what the loader raised."""

    def trial(folder: Path) -> tuple[Batch, ...] | str:
        rest: list[tuple[Batch, ...]] = []

        def look(trainer: Any, model: Any) -> None:
            run.turn_to_epoch(stop.epoch)
            rest.append(_read(trainer.fit_loop, stop.ends_at - stop.done))
            raise Enough

        def deal(loader: Any) -> None:
            _deal_with_workers(loader)
            if not stop.seeded:
                seed_as_another_process(ANOTHER_PROCESS)

        loaders, module = pickle.loads(stop.states)
        loop = run.trainer.fit_loop
        loop.epoch_progress.current.processed = loop.epoch_progress.current.completed = stop.epoch
        loop._combined_loader_states_to_load, loop._restarting = loaders, True
        try:
            if module:
                run.data.load_state_dict(module)
            run.start(folder, world_size=run.world_size, prepare_loader=deal, on_train_start=look)
        except Exception as error:
            return in_a_line(error)
        return rest[0]

    return trial


def _deal_with_workers(loader: Any) -> None:
    """Have the loader deal indices; one that has a state keeps its workers, as they fetch ahead of it."""
    workers = min(2, loader.num_workers) if hasattr(loader, "state_dict") else 0
    if isinstance(loader.dataset, IterableDataset):
        stop_workers(loader)
        loader.collate_fn = _fingerprints
        return
    deal_indices(loader)
    if workers:
        vars(loader).update(num_workers=workers, prefetch_factor=2)


def _fingerprints(samples: Any) -> list[int]:
    return [fingerprint(sample) for sample in samples] if isinstance(samples, list) else [fingerprint(samples)]


def _stopped(run: LightningRun, ways: Sequence[Saves]) -> Stop:
    loop = run.trainer.fit_loop
    seeded = "PL_GLOBAL_SEED" in os.environ
    plain = Stop(saves=bool(ways), seeded=seeded)
    if len(run.loaders()) != 1:
        return replace(plain, why_not=f"the run has {len(run.loaders())} training loaders")
    loader = run.loaders()[0]
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return replace(plain, why_not=f"{type(loader).__name__} is no torch DataLoader")
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    stream = isinstance(dataset, IterableDataset)
    batches = run.counted_batches()
    if batches is None:
        batches = MOST_STREAMED
    elif not stream and len(dataset) > MOST_INDICES:
        return replace(plain, why_not=f"{len(dataset):,} samples are too many to be dealt in seconds")
    window = run.accumulate_grad_batches if run.model.automatic_optimization else 1
    window = max(window.values()) if isinstance(window, dict) else window
    last = math.inf if run.max_epochs == -1 else run.max_epochs
    first = [(at, way) for way in ways if (at := way.first_within_epoch(batches, window)) and at[0] < last]
    if not first and not stateful:
        return plain
    (epoch, done), way = min(first, key=lambda pair: pair[0]) if first else ((0, max(1, batches // 2)), None)
    epoch = min(epoch, MOST_EPOCHS - 1)
    if stream:
        done = min(done, MOST_STREAMED // 2)
    most = MOST_STREAMED if stream else math.inf
    for number in range(epoch + 1):
        run.begin_epoch(number)
        if number:
            iter(loop._data_fetcher)  # it has begun the first epoch by itself
        if number < epoch:
            _read(loop, most)
    dealt = _read(loop, done)
    states = _states(run)
    rest = _read(loop, most - done)
    sampler = loader.batch_sampler
    return Stop(
        saved_by="" if way is None else way.setting,
        inside_window=any(way.may_cut_a_window(batches, window) for way in ways),
        saves=bool(ways),
        epoch=epoch,
        done=len(dealt),
        batches=dealt + rest,
        states=states,
        stateful=stateful,
        idle_sampler=type(sampler).__name__ if hasattr(sampler, "state_dict") and not stateful else "",
        stream=stream,
        seeded=seeded,
        ends_at=min(batches, len(dealt + rest)),
    )


def _read(loop: Any, most: float) -> tuple[Batch, ...]:
    """The next batches of the epoch that the Trainer's loop has begun: another ``iter`` would begin it again."""
    batches: list[Batch] = []
    while len(batches) < most:
        try:
            batch, _, _ = next(loop._data_fetcher)  # and the batch's number, and the loader's
        except StopIteration:
            break
        batches.append(tuple(indices_of(batch)))
    return tuple(batches)


def _states(run: LightningRun) -> bytes:
    """The states as a checkpoint holds them: copies of this moment."""
    module = run.data.state_dict() if hasattr(run.data, "prepare_data") else {}
    return pickle.dumps((run.trainer.fit_loop._combined_loader._state_dicts(), module))


# ------------------------------------------------------------------------------------------------------- judging


def judge_resume(stop: Stop, rest: tuple[Batch, ...] | str) -> Judgement:
    """Hold what came after a resume against what would have come without the stop."""
    judgement = Judgement()
    where = f"after {counted(stop.done, 'micro-batch', 'micro-batches')} of epoch {stop.epoch}"
    by = f" ({stop.saved_by})" if stop.saved_by else ""
    if isinstance(rest, str):
        judgement.findings.append(
            _finding(
                f"The state that the loader gives {where}{by} cannot be loaded: {rest}.",
                "The run cannot be resumed from its checkpoints.",
                "Let load_state_dict take what state_dict gives; conformance.check_batch_sampler tries it.",
            )
        )
        return judgement
    expected = stop.batches[stop.done : stop.ends_at]
    if rest == expected:
        return judgement
    if stop.stream:
        return _of_stream(stop, rest, where, by)
    trained = Counter(index for batch in stop.batches[: stop.done] + rest for index in batch)
    usual = Counter(index for batch in stop.batches[: stop.ends_at] for index in batch)
    if max(usual.values(), default=1) > 1 and not stop.stateful:
        judgement.notes.append(f"resume: {where}, another draw is resumed with: samples are repeated by choice")
        return judgement
    twice = sorted(index for index in trained if trained[index] > max(1, usual[index]))
    never = sorted(index for index in usual if index not in trained)
    if not twice and not never:
        if stop.stateful:
            judgement.notes.append(f"resume: {where}, the loader's state brings its samples in another order")
        return judgement
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
    judgement.findings.append(_finding(says, "Each resume trains some samples again and misses others.", cure))
    return judgement


def _of_stream(stop: Stop, rest: tuple[Batch, ...], where: str, by: str) -> Judgement:
    again = set(stop.batches[: stop.done])
    common = min(len(rest), stop.done)
    repeated = sum(batch in again for batch in rest[:common])
    expected = stop.batches[stop.done : stop.ends_at]
    if stop.stateful and rest and rest[0] in expected:
        missed = expected.index(rest[0])
        return Judgement(
            findings=[
                _finding(
                    f"Stopped {where} and resumed by its own state, the stream goes on "
                    f"{counted(missed, 'batch', 'batches')} later: those are never trained.",
                    "A Trainer fetches a batch ahead of a loader without a length, and its state counts that.",
                    "Give the stream a length (__len__), or count the batches in on_train_batch_end.",
                )
            ]
        )
    if not common or repeated < common:
        return Judgement(not_judged={"resume": "the samples of a stream cannot be told apart by their contents"})
    return Judgement(
        findings=[
            _finding(
                f"A checkpoint {where}{by} does not know how far the stream was read: resumed from there, it "
                f"starts over, and {counted(stop.done, 'batch is', 'batches are')} trained again.",
                "Each resume trains the beginning of the stream again, and as much of its end never.",
                "Give the loader state_dict and load_state_dict, or save at the ends of epochs only.",
            )
        ]
    )


def _finding(says: str, means: str, cure: str) -> Finding:
    return Finding("resume", says, means, cure, CHAPTER)
