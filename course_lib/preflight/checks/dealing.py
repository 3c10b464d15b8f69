"""dealing: what 1, 2 and 3 ranks are given, as the Trainer deals it to them with these flags."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from course_lib._words import counted, first_of
from course_lib.preflight.report import Finding, Judgement
from course_lib.preflight.runs.lightning_run import Enough, seed_as_another_process
from course_lib.preflight.runs.loaders import deal_indices, draws_counted, indices_of
from course_lib.preflight.runs.plain_loop import AnyRun

CHAPTER = "06_batch_samplers_ddp"
MOST_INDICES = 300_000
"""The largest dataset whose epochs are dealt in a few seconds."""
STREAM_SAMPLES = 20_000
STREAM_CONTENTS = 1_000
STREAM_SECONDS = 2.0
"""How far a stream is read."""

Batch = tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """What one rank is given, epoch by epoch."""

    samples: int | None
    """The length of this rank's dataset."""
    promised: tuple[int | None, ...] = ()
    """The batches that the Trainer counts in each epoch; None where it has no length, or a limit."""
    epochs: tuple[tuple[Batch, ...], ...] = ()
    """The indices of each batch; of a stream, a number for each sample's content."""
    draws: int = 0
    """How often something random was drawn after the loader was made."""
    has_set_epoch: bool = False
    set_epoch_would_shuffle: bool = False
    """Whether some set_epoch, called by hand, changes the order."""
    asked_again: tuple[int | None, ...] = ()
    """The length of the loader that the module would give in each epoch, if it were asked then."""
    own_sampler: bool = False
    """Whether the order comes from something else than torch's samplers of a whole dataset."""
    replacement: bool = False
    drop_last: bool = False
    batch_size: int | None = None
    reloads: bool = False
    after_validation: int | None = None
    """The batches that the Trainer counts once a validation within the epoch has ended; None where there is none."""
    stream: bool = False
    stream_samples: int = 0
    """How many were read."""
    ended: bool = True
    """Of a stream: whether it came to its end."""
    limited: bool = False
    overfits: bool = False
    why_not: str = ""
    """Why nothing was dealt."""

    def epoch(self, number: int) -> list[int]:
        return list(chain.from_iterable(self.epochs[number]))


def dealt_to(
    run: AnyRun, rank: int, world_size: int, *, epochs: int = 1, seed: int | None = None
) -> Callable[[Path], Share]:
    """A trial: start as this rank, and read the indices of some epochs.

    ``seed`` seeds the global generators before each epoch's order is drawn; by default they are as the run leaves them.
    """

    def trial(folder: Path) -> Share:
        shares: list[Share] = []

        def look(trainer: Any, model: Any) -> None:
            if seed is not None:
                seed_as_another_process(seed)
            shares.append(_share(run, epochs))
            raise Enough

        run.start(folder, rank=rank, world_size=world_size, prepare_loader=deal_indices, on_train_start=look)
        return shares[0] if shares else Share(None, why_not="the run has no batch")

    return trial


def _share(run: AnyRun, epochs: int) -> Share:
    loaders = run.loaders()
    if len(loaders) != 1:
        return Share(None, why_not=f"the run has {len(loaders)} training loaders")
    loader = loaders[0]
    dataset = getattr(loader, "dataset", None)
    if dataset is None or not hasattr(loader, "batch_sampler"):
        return Share(None, why_not=f"{type(loader).__name__} is no torch DataLoader")
    if isinstance(dataset, IterableDataset):
        return _stream(loader, dataset)
    size = _length(dataset)
    if size is None or size > MOST_INDICES:
        how_many = "a number of samples that is not known" if size is None else f"{size:,} samples"
        return Share(size, why_not=f"{how_many}: too many to be dealt in seconds")
    if loader.batch_sampler is None and loader.sampler is None:
        return Share(size, why_not="the loader has no sampler")
    return _read(run, loader, size, epochs)


def _read(run: AnyRun, loader: Any, size: int, epochs: int) -> Share:
    read: list[tuple[Batch, ...]] = []
    promised: list[int | None] = []
    asked_again: list[int | None] = []
    limited = run.is_limited
    limit = 4 * max(size, 1) + 8
    if run.max_epochs != -1:
        epochs = max(1, min(epochs, run.max_epochs))
    with draws_counted() as draws:
        for epoch in range(epochs):
            run.begin_epoch(epoch)
            loader = run.loaders()[0]
            promised.append(None if limited else run.counted_batches())
            batches = _batches(loader, limit)
            if len(batches) == limit:
                return Share(size, why_not=f"an epoch has not ended after {limit:,} batches")
            read.append(batches)
            if epochs > 1:
                again = run.asked_again()
                asked_again.append(_length(loader) if again is None else _length(again))
        drawn = draws()
    after_validation = run.counted_after_validation() if epochs > 1 else None
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    plain = type(loader.batch_sampler) in (BatchSampler, type(None)) and type(sampler) in _WHOLE
    listeners = [part for part in parts_of(loader.batch_sampler or sampler) if hasattr(part, "set_epoch")]
    for part in listeners:
        part.set_epoch(epochs + 5)
    return Share(
        samples=size,
        promised=tuple(promised),
        epochs=tuple(read),
        draws=drawn,
        has_set_epoch=bool(listeners),
        set_epoch_would_shuffle=bool(listeners) and _batches(loader, limit) != read[-1],
        asked_again=tuple(asked_again),
        own_sampler=not plain,
        replacement=bool(getattr(sampler, "replacement", False)),
        drop_last=bool(getattr(loader, "drop_last", False) or getattr(loader.batch_sampler, "drop_last", False)),
        batch_size=loader.batch_size,
        reloads=run.reloads,
        after_validation=after_validation,
        limited=limited,
        overfits=run.overfits,
    )


def _batches(loader: Any, limit: int) -> tuple[Batch, ...]:
    return tuple(tuple(indices_of(batch)) for batch in islice(iter(loader), limit))


_WHOLE = (RandomSampler, SequentialSampler)


def parts_of(sampler: Any, depth: int = 3) -> list[Any]:
    """A sampler and the samplers that it keeps as attributes."""
    if sampler is None or depth == 0:
        return []
    inner = [value for value in vars(sampler).values() if hasattr(value, "__iter__") and hasattr(value, "__dict__")]
    return [sampler, *chain.from_iterable(parts_of(value, depth - 1) for value in inner)]


def _stream(loader: Any, dataset: Any) -> Share:
    """Read a stream: the contents of its first samples, and whether it comes to an end."""
    began, ended, read = time.monotonic(), True, 0
    contents: list[Batch] = []
    for sample in iter(dataset):
        seconds = time.monotonic() - began
        if read >= STREAM_SAMPLES or seconds > STREAM_SECONDS:
            ended = False
            break
        if read < STREAM_CONTENTS and seconds < STREAM_SECONDS / 2:
            contents.append((fingerprint(sample),))
        read += 1
    return Share(
        _length(dataset),
        promised=(_length(loader),),
        epochs=(tuple(contents),),
        stream=True,
        batch_size=loader.batch_size,
        stream_samples=read,
        ended=ended,
    )


def fingerprint(sample: Any) -> int:
    """A number of a sample's content."""
    digest = hashlib.blake2b(digest_size=8)
    _digest(sample, digest.update)
    return int.from_bytes(digest.digest(), "big")


def _digest(value: Any, update: Callable[[bytes], None]) -> None:
    # Pickles of equal tensors differ: they hold the storage that a tensor is a view of.
    update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            update(repr(key).encode())
            _digest(part, update)
    elif isinstance(value, list | tuple):
        for part in value:
            _digest(part, update)
    else:
        update(pickle.dumps(value))


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except TypeError:
        return None


# ------------------------------------------------------------------------------------------------------- judging


def judge_dealing(
    alone: Share, of_ranks: Sequence[Share], *, real: bool, repeats: bool = False, check: str = "dealing"
) -> Judgement:
    """Hold what some ranks are given in their first epoch against what one rank is given alone.

    Args:
        alone: The share of the only rank of one.
        of_ranks: The shares of all ranks; one, for a run on one rank.
        real: Whether the run has so many ranks: what is wrong is a finding then, and otherwise a note.
        repeats: Samples may come more than once.
        check: The check's name in a finding.
    """
    judgement = Judgement()
    why = next((share.why_not for share in (alone, *of_ranks) if share.why_not), "")
    if why:
        if real:
            judgement.not_judged[check] = why
        return judgement
    wrong = _streams_wrong(alone, of_ranks) if alone.stream else _deal_wrong(alone, of_ranks, repeats)
    if wrong is None:
        return judgement
    says, means, cure = wrong
    if real:
        judgement.findings.append(Finding(check, says, means, cure, CHAPTER))
    else:
        judgement.notes.append(f"{check}, if the run had {len(of_ranks)} ranks: {says}")
    return judgement


Wrong = tuple[str, str, str]
SHARE_OUT = (
    "Deal each rank its own part: use_distributed_sampler=True, a DistributedSampler, or a batch sampler of "
    "course_lib.samplers, such as ShardedBatchSampler(batch_sampler)."
)


def _deal_wrong(alone: Share, of_ranks: Sequence[Share], repeats: bool) -> Wrong | None:
    """What is said, what it means, and the cure; the first that applies."""
    ranks = len(of_ranks)
    if ranks == 1:
        return _alone_wrong(alone)
    counts = [len(share.epochs[0]) for share in of_ranks]
    if len(set(counts)) > 1:
        return (
            f"In an epoch, rank 0 is given {counted(counts[0], 'batch', 'batches')} and rank "
            f"{_other(counts)} is given {counts[_other(counts)]:,}.",
            "Under DDP the rank with more waits for gradients that the others never send: the run hangs there.",
            "Give all ranks as many batches: ShardedBatchSampler pads, drops, or spreads the rest.",
        )
    once = set(alone.epoch(0))
    given = [share.epoch(0) for share in of_ranks]
    shared = sorted(set(given[0]) & set(given[1]))
    times = Counter(chain.from_iterable(given))
    usual = Counter(alone.epoch(0))
    more = sum(max(0, times[index] - usual[index]) for index in times)
    largest = max((len(batch) for share in of_ranks for batch in share.epochs[0]), default=0)
    largest_alone = max((len(batch) for batch in alone.epochs[0]), default=0)
    padding = largest_alone * ranks
    if largest < max(1, largest_alone // ranks):
        return (
            f"On {ranks} ranks a batch holds {counted(largest, 'sample')}, and {largest_alone:,} on one: the Trainer "
            "made the batch sampler again, and lost its size.",
            "Every step trains on a batch of another size than was asked for.",
            "Let the batch sampler deal to the ranks itself: ShardedBatchSampler(batch_sampler).",
        )
    mixed = _mixed(alone, of_ranks)
    if mixed:
        return mixed
    if more > padding and len(shared) > padding and not (repeats or alone.replacement):
        return (
            f"Ranks 0 and 1 are both given {counted(len(shared), 'sample')} of {len(once):,} in one epoch, "
            f"{first_of(shared, 4)} among them.",
            f"The {ranks} ranks train the same samples again and again instead of sharing them.",
            SHARE_OUT,
        )
    missing = sorted(once - set(times))
    if len(missing) > (padding if alone.drop_last else 0) and not (repeats or alone.replacement):
        return (
            f"{counted(len(missing), 'sample')} of {len(once):,} are given to none of the {ranks} ranks in an epoch: "
            f"{first_of(missing, 4)}.",
            "They are not trained in that epoch, and no error says so.",
            SHARE_OUT if not shared else f"All ranks must draw one order: from (seed, epoch). {SHARE_OUT}",
        )
    return None


def _other(counts: Sequence[int]) -> int:
    return next(rank for rank, count in enumerate(counts) if count != counts[0])


def _alone_wrong(alone: Share) -> Wrong | None:
    if alone.samples is None or alone.drop_last or alone.replacement or alone.overfits or not alone.own_sampler:
        return None
    given = set(chain.from_iterable(alone.epoch(number) for number in range(len(alone.epochs))))
    missing = alone.samples - len(given)
    batch = max((len(batch) for batch in alone.epochs[0]), default=1)
    if 0 < missing < batch:
        return (
            f"{counted(missing, 'sample')} of {alone.samples:,} are in none of the {len(alone.epochs)} epochs that "
            "were dealt, and drop_last is not set.",
            "They are never trained, and no error says so.",
            "Look at the sampler's last batch: prove it by course_lib.conformance.assert_batch_sampler.",
        )
    return None


def _mixed(alone: Share, of_ranks: Sequence[Share]) -> Wrong | None:
    """A batch sampler of several streams whose batches have another mixture on several ranks."""
    stream_of = _streams(alone)
    if stream_of is None:
        return None

    def mixture(batch: Batch) -> tuple[int, ...]:
        count = Counter(stream_of.get(index, -1) for index in batch)
        return tuple(count[stream] for stream in sorted(set(stream_of.values())))

    usual = {mixture(batch) for batch in alone.epochs[0]}
    sizes = {len(batch) for batch in alone.epochs[0]}
    for rank, share in enumerate(of_ranks):
        for step, batch in enumerate(share.epochs[0]):
            if len(batch) in sizes and mixture(batch) not in usual:
                return (
                    f"On {len(of_ranks)} ranks the streams are mixed: batch {step} of rank {rank} holds "
                    f"{_as_sum(mixture(batch))} samples of them, and a batch holds {_as_sum(min(usual))} on one rank.",
                    "The Trainer puts its own sampler into the batch sampler; what that keeps apart is mixed.",
                    "Let the batch sampler deal to the ranks itself: TwoStreamBatchSampler or ShardedBatchSampler.",
                )
    return None


def _as_sum(mixture: Sequence[int]) -> str:
    return " + ".join(map(str, mixture))


def _streams(alone: Share) -> dict[int, int] | None:
    """To each index its stream, where positions in a batch are filled from ranges of indices that do not meet."""
    if not alone.own_sampler:
        return None
    batches = [batch for epoch in alone.epochs for batch in epoch]
    size = max(map(len, batches), default=0)
    full = [batch for batch in batches if len(batch) == size]
    if size < 2 or len(full) < 4:
        return None
    ranges = sorted((min(column), max(column)) for column in zip(*full, strict=True))
    streams: list[list[int]] = []
    for low, high in ranges:
        if streams and low <= streams[-1][1]:
            streams[-1][1] = max(high, streams[-1][1])
        else:
            streams.append([low, high])
    if len(streams) < 2:
        return None
    indices = set(chain.from_iterable(batches))
    return {i: number for i in indices for number, (low, high) in enumerate(streams) if low <= i <= high}


def _streams_wrong(alone: Share, of_ranks: Sequence[Share]) -> Wrong | None:
    if len(of_ranks) == 1:
        return None
    first, second = (share.epoch(0) for share in of_ranks[:2])
    shortest = min(len(first), len(second))
    same = len(set(first[:shortest]) & set(second[:shortest]))
    if shortest > 1 and same > 0.5 * len(set(first[:shortest])):
        return (
            f"The stream gives ranks 0 and 1 the same samples: {same:,} of the first {shortest:,} are equal.",
            f"The {len(of_ranks)} ranks train the same samples and do not share them; no sampler shares out a stream.",
            "In the stream's __iter__, take every world_size-th sample from rank on, as datasets.IntegerStream does.",
        )
    return None
