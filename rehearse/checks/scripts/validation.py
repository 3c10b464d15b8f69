"""validation: whether what a rehearsed script evaluates on is also what it trains on."""

from __future__ import annotations

from collections import Counter, deque

from course_lib._words import counted, first_of
from rehearse.report import Judgement, not_applicable
from rehearse.scripts.journal import ENDED, Journal
from rehearse.scripts.loaders import MOST_INDICES
from rehearse.scripts.windows import LoaderPass, passes_of, trained_beside_others


def judge_validation(journal: Journal, other: Journal | None = None) -> Judgement:
    """``other``: the same script as another rank, which may have drawn another split."""
    if journal.has_validation and not journal.validations() and journal.end == ENDED:
        return Judgement().find(
            "validation",
            "The Trainer has a validation's loaders and steps, and the whole run makes no validation.",
            "No value of it is logged, and what monitors one saves, stops or changes nothing.",
            "Is check_val_every_n_epoch larger than the number of epochs, or val_check_interval than an epoch?",
            chapter="10_check_your_run",
        )
    beside = trained_beside_others(journal)
    others = passes_of(journal, training=False)
    evaluated = [one for one in others if one.loader not in beside | journal.training_loaders()]
    if not evaluated:
        return not_applicable("validation", "no loader gives batches that are not trained on")
    if found := _the_first_batch_again(evaluated):
        return found
    training = passes_of(journal, training=True) + [one for one in others if one.loader in beside]
    training.sort(key=lambda one: one.micro_batch)
    judgement, whole, loaders = Judgement(), 0, 0
    for loader in sorted({one.loader for one in evaluated}):
        passes = [one for one in evaluated if one.loader == loader]
        held_out = _samples(journal, passes)
        shared = _trained_on_before(journal, passes, _of_these_weights(passes, training))
        if len(shared) == len(held_out):
            whole, loaders = whole + len(shared), loaders + 1
        if 0 < len(shared) < len(held_out):
            return judgement.find(
                "validation",
                f"{counted(len(shared), 'sample')} of {len(held_out):,} that are evaluated are trained on as well: "
                f"{first_of(shared, 4)}.",
                "The score counts samples that the model has seen, so that it is too good, and the best epoch another.",
                "Split the indices once, and give each its own part: random_split, or two Subsets that share none.",
                chapter="10_check_your_run",
                at=passes[0].micro_batch,
            )
    if other is not None and not judgement.findings:
        _split_otherwise(judgement, journal, other, evaluated)
    if whole and not judgement.findings:
        given = f"{counted(whole, 'sample')} that {counted(loaders, 'loader gives', 'loaders give')} to be evaluated"
        judgement.notes.append(
            f"validation: all of {given} are trained on: if their score is to show what is new to the model, hold them "
            "out"
        )
    return judgement


def _the_first_batch_again(evaluated: list[LoaderPass]) -> Judgement | None:
    """Evaluations that begin a loader anew for each batch, and so see its first one alone."""
    for loader in {one.loader for one in evaluated}:
        passes = [one for one in evaluated if one.loader == loader]
        batches = {batch for one in passes for batch in one.batches}
        promised = passes[0].promised or 0
        together = Counter(one.micro_batch for one in passes if len(one.batches) == 1)  # behind as much training
        loops = max(together.values(), default=0)
        if loops < 2 or len(batches) > 1 or None in batches or promised < 2:
            continue
        return Judgement().find(
            "validation",
            f"An evaluation reads the first batch of its loader {loops:,} times, and none of the other "
            f"{promised - 1:,}.",
            "The score is that of one batch; the other samples that were held out are never looked at.",
            "Is next(iter(loader)) within the loop? Then loop over the loader itself.",
            chapter="10_check_your_run",
        )
    return None


def _split_otherwise(judgement: Judgement, journal: Journal, other: Journal, evaluated: list[LoaderPass]) -> None:
    """What one rank evaluates and another one trains, though none does both by itself."""
    mine, theirs = (_samples(one, passes_of(one, training=True)) for one in (journal, other))
    held_out = _samples(journal, evaluated)
    shared = sorted(index for _, index in (held_out & theirs) - mine)
    if shared and not held_out & mine:
        judgement.find(
            "validation",
            f"{counted(len(shared), 'sample')} of {len(held_out):,} that rank {journal.rank} evaluates are trained by "
            f"rank {other.rank}: {first_of(shared, 4)}.",
            "The ranks split the data in different ways, so that the score counts samples that the model has seen.",
            "Is the split drawn behind a seed that differs by rank? Draw it by a generator of one seed, on all ranks.",
            chapter="10_check_your_run",
        )


def _of_these_weights(evaluated: list[LoaderPass], training: list[LoaderPass]) -> list[LoaderPass]:
    """Of several runs in one script, as folds, those that trained what is evaluated; all, if it is trained in none.

    An average of the weights is trained in none.
    """
    weights = set[int]().union(*(one.evaluated for one in evaluated))
    return [one for one in training if one.trained & weights] or training


def _trained_on_before(journal: Journal, evaluated: list[LoaderPass], training: list[LoaderPass]) -> list[int]:
    """The indices that are evaluated in a pass behind the beginning of one that trains on them.

    What is trained on later alone, as what an active learner asks for, has been held out until then.
    """
    found: set[tuple[int, int]] = set()
    trained: set[tuple[int, int]] = set()
    ahead = deque(training)
    for one in evaluated:
        while ahead and ahead[0].micro_batch < one.micro_batch:
            trained |= _samples(journal, [ahead.popleft()])
        found |= _samples(journal, [one]) & trained
    return sorted(index for _, index in found)


def _samples(journal: Journal, passes: list[LoaderPass]) -> set[tuple[int, int]]:
    """A dataset's number and an index in it, whatever subset it came by.

    Of torch's samplers all that they may give: a score of some training batches is a choice, and no leak, also where
    the training has not come to the same samples yet.
    """
    found: set[tuple[int, int]] = set()
    for number in {one.loader for one in passes}:
        loader = journal.loaders[number]
        given = {index for one in passes if one.loader == number for batch in one.batches for index in batch or ()}
        if given and not loader.own_sampler and loader.samples is not None and loader.samples <= MOST_INDICES:
            given = set(range(loader.samples))
        base = loader.base_indices
        found |= {(loader.dataset, index if base is None else base[index]) for index in given}
    return found
