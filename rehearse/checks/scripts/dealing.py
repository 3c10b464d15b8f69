"""dealing: which samples the ranks of a rehearsed script are given, and whether all come."""

from __future__ import annotations

from course_lib._words import counted, first_of
from rehearse.report import Judgement, not_applicable, not_judged
from rehearse.scripts.journal import Journal
from rehearse.scripts.windows import LoaderPass, passes_of, samples_of

SHARE_OUT = (
    "Deal each rank its own part: a DistributedSampler, or a batch sampler of course_lib.samplers, such as "
    "ShardedBatchSampler(batch_sampler)."
)


def judge_dealing(journal: Journal, other: Journal | None, why_no_other: str = "") -> Judgement:
    """``other``: the same script, played as another rank; None where it has one rank, or could not be rehearsed so."""
    passes = [one for one in passes_of(journal, training=True) if one.ended and one.indices() is not None]
    if not passes and journal.world_size > 1 and other is not None:
        return _streams(journal, other)
    if not passes:
        return not_applicable("dealing", "no epoch has samples that are known by an index")
    if journal.world_size == 1:
        return _alone(journal, passes)
    if other is None:
        return not_judged("dealing", why_no_other)
    theirs = [one for one in passes_of(other, training=True) if one.ended and one.indices() is not None]
    if not theirs:
        return not_judged("dealing", f"rank {other.rank} was given no samples that are known by an index")
    return _two(journal, other, passes[0], theirs[0])


def _alone(journal: Journal, passes: list[LoaderPass]) -> Judgement:
    judgement = Judgement()
    for number in sorted({one.loader for one in passes}):
        loader = journal.loaders[number]
        given = {index for one in passes if one.loader == number for index in one.indices() or ()}
        _several_times(judgement, journal, [one for one in passes if one.loader == number])
        missing = (loader.samples or 0) - len(given)
        largest = max(len(batch or ()) for one in passes if one.loader == number for batch in one.batches)
        if missing <= 0 or loader.drop_last or loader.replacement:
            continue
        said = f"{counted(missing, 'sample')} of {loader.samples:,} are in none of the epochs"
        if loader.own_sampler and missing < largest:
            judgement.find(
                "dealing",
                f"{said}, and drop_last is not set.",
                "They are never trained, and no error says so.",
                "Look at the sampler's last batch: prove it by course_lib.conformance.assert_batch_sampler.",
            )
        else:
            judgement.notes.append(f"dealing: {said}")
    return judgement


def _several_times(judgement: Judgement, journal: Journal, passes: list[LoaderPass]) -> None:
    """A sampler of the script's own that gives some samples twice in an epoch, and others never: it may be meant."""
    loader = journal.loaders[passes[0].loader]
    indices = passes[0].indices() or []
    different = len(set(indices))
    if loader.own_sampler and not loader.replacement and different < min(len(indices), loader.samples or 0):
        judgement.notes.append(
            f"dealing: an epoch gives {counted(len(indices), 'sample')}, {different:,} of them different, of "
            f"{loader.samples:,}: its sampler gives some several times, and others never"
        )


def _streams(journal: Journal, other: Journal) -> Judgement:
    """What two ranks are given of a stream, by the contents of its first batches."""
    mine, theirs = (
        [one.contents for one in passes_of(of, training=True) if len(set(one.contents)) > 1] for of in (journal, other)
    )
    if not mine or not theirs:
        return not_applicable("dealing", "no epoch has samples that are known by an index")
    first, second = set(mine[0]), set(theirs[0])
    shared = len(first & second)
    if shared < 2:
        return Judgement()
    return Judgement().find(
        "dealing",
        f"Ranks 0 and {other.rank} are both given {shared:,} of the first {len(first):,} batches of a stream.",
        f"The {journal.world_size} ranks train the same samples instead of sharing them.",
        "Does each rank take its own part of one order? In __iter__, take every n-th sample by the rank, of an order "
        "that is drawn from the same seed on all ranks.",
    )


def _two(journal: Journal, other: Journal, mine: LoaderPass, theirs: LoaderPass) -> Judgement:
    ranks, rank = journal.world_size, other.rank
    if len(mine.batches) != len(theirs.batches):
        return Judgement().find(
            "dealing",
            f"In an epoch, rank 0 is given {counted(len(mine.batches), 'batch', 'batches')} and rank {rank} is given "
            f"{len(theirs.batches):,}.",
            "Under DDP the rank with more waits for gradients that the others never send.",
            "Give all ranks as many batches: ShardedBatchSampler pads, drops, or spreads the rest.",
        )
    first, second = (set(samples_of(*pair)) for pair in ((journal, mine), (other, theirs)))
    shared = sorted(first & second)
    largest = max(len(batch or ()) for batch in mine.batches)
    all_of_them = first == second and len(mine.batches) > 1  # of one batch, another rank may have been given a copy
    if (all_of_them or len(shared) > largest * ranks) and not journal.loaders[mine.loader].replacement:
        return Judgement().find(
            "dealing",
            f"Ranks 0 and {rank} are both given {counted(len(shared), 'sample')} of {len(first | second):,} in one "
            f"epoch, {first_of(shared, 4)} among them.",
            f"The {ranks} ranks train the same samples again and again instead of sharing them.",
            SHARE_OUT,
        )
    return Judgement()
