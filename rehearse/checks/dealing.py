"""dealing: what 1, 2 and 3 ranks are given, held against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from course_lib._words import counted, first_of
from rehearse.checks.dealt import Dealt
from rehearse.report import Judgement


def judge_dealing(alone: Dealt, of_ranks: Sequence[Dealt], *, real: bool, repeats: bool = False) -> Judgement:
    """Hold what some ranks are given in their first epoch against what one rank is given alone.

    Args:
        alone: What the only rank of one is dealt.
        of_ranks: What each rank is dealt; one, for a run on one rank.
        real: Whether the run has so many ranks: what is wrong is a finding then, and otherwise a note.
        repeats: Samples may come more than once.
    """
    why = next((dealt.why_not for dealt in (alone, *of_ranks) if dealt.why_not), None)
    if why is not None:
        return Judgement(not_judged={"dealing": why}) if real else Judgement()
    wrong = _streams_wrong(alone, of_ranks) if alone.stream else _deal_wrong(alone, of_ranks, repeats)
    if wrong is None:
        return Judgement()
    if real:
        return Judgement().find("dealing", *wrong)
    return Judgement(notes=[f"dealing, if the run had {len(of_ranks)} ranks: {wrong[0]}"])


Wrong = tuple[str, str, str]
SHARE_OUT = (
    "Deal each rank its own part: use_distributed_sampler=True, a DistributedSampler, or a batch sampler of "
    "course_lib.samplers, such as ShardedBatchSampler(batch_sampler)."
)


def _deal_wrong(alone: Dealt, of_ranks: Sequence[Dealt], repeats: bool) -> Wrong | None:
    """What is said, what it means, and the cure; the first that applies."""
    ranks = len(of_ranks)
    if ranks == 1:
        return _alone_wrong(alone)
    counts = [len(dealt.epochs[0]) for dealt in of_ranks]
    if len(set(counts)) > 1:
        other = next(rank for rank, count in enumerate(counts) if count != counts[0])
        return (
            f"In an epoch, rank 0 is given {counted(counts[0], 'batch', 'batches')} and rank {other} is given "
            f"{counts[other]:,}.",
            "Under DDP the rank with more averages its gradients with those of the others' next epoch: all go on out "
            "of step, and the run hangs at its end.",
            "Give all ranks as many batches: ShardedBatchSampler pads, drops, or spreads the rest.",
        )
    once = set(alone.epoch(0))
    given = [dealt.epoch(0) for dealt in of_ranks]
    shared = sorted(set(given[0]) & set(given[1]))
    times = Counter(chain.from_iterable(given))
    usual = Counter(alone.epoch(0))
    more = sum(max(0, times[index] - usual[index]) for index in times)
    largest = max((len(batch) for dealt in of_ranks for batch in dealt.epochs[0]), default=0)
    largest_alone = max((len(batch) for batch in alone.epochs[0]), default=0)
    padding = largest_alone * ranks  # samples: to end evenly, each rank may repeat, or drop, up to one batch
    # A batch of one rank, shared out, holds at least its size // ranks on each: less is a size that got lost.
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


def _alone_wrong(alone: Dealt) -> Wrong | None:
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


def _mixed(alone: Dealt, of_ranks: Sequence[Dealt]) -> Wrong | None:
    """A batch sampler of several streams whose batches have another mixture on several ranks."""
    stream_of = _streams(alone)
    if stream_of is None:
        return None

    def mixture(batch: tuple[int, ...]) -> tuple[int, ...]:
        count = Counter(stream_of.get(index, -1) for index in batch)
        return tuple(count[stream] for stream in sorted(set(stream_of.values())))

    usual = {mixture(batch) for batch in alone.epochs[0]}
    sizes = {len(batch) for batch in alone.epochs[0]}
    for rank, dealt in enumerate(of_ranks):
        for step, batch in enumerate(dealt.epochs[0]):
            if len(batch) in sizes and mixture(batch) not in usual:
                return (
                    f"On {len(of_ranks)} ranks the streams are mixed: batch {step} of rank {rank} holds "
                    f"{' + '.join(map(str, mixture(batch)))} samples of them, and a batch holds "
                    f"{' + '.join(map(str, min(usual)))} on one rank.",
                    "The Trainer puts its own sampler into the batch sampler; what that keeps apart is mixed.",
                    "Let the batch sampler deal to the ranks itself: TwoStreamBatchSampler or ShardedBatchSampler.",
                )
    return None


def _streams(alone: Dealt) -> dict[int, int] | None:
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


def _streams_wrong(alone: Dealt, of_ranks: Sequence[Dealt]) -> Wrong | None:
    if len(of_ranks) == 1:
        return None
    first, second = (dealt.epoch(0) for dealt in of_ranks[:2])
    shortest = min(len(first), len(second))
    same = len(set(first[:shortest]) & set(second[:shortest]))
    if shortest > 1 and same > 0.5 * len(set(first[:shortest])):
        return (
            f"The stream gives ranks 0 and 1 the same samples: {same:,} of the first {shortest:,} are equal.",
            f"The {len(of_ranks)} ranks train the same samples and do not share them; no sampler shares out a stream.",
            "In the stream's __iter__, take every world_size-th sample from rank on, as datasets.IntegerStream does.",
        )
    return None
