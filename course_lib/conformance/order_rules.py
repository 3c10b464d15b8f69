"""The rules about the order: the same wherever it is asked for (4), another one when it should be (5, 6)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import combinations, groupby

from course_lib.conformance.findings import Checks, Finding, difference
from course_lib.conformance.guarding import Refusal, call
from course_lib.conformance.trial import Batches, Trial, all_alike
from course_lib.conformance.wording import counted

MANY_EPOCHS = 20
"""Epochs that must be alike before a sampler of few indices is said to repeat one order."""


def one_order(trial: Trial) -> Checks:
    for epoch, ranks in trial.recorded():
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            again = trial.read(trial.make(rank, epoch), epoch)
            yield difference(at, again, batches, "two new samplers do not agree")
            reseeded = trial.read(trial.make(rank, epoch, salt=1), epoch, salt=1)
            text = "the order depends on the global generators (random, NumPy's or torch's)"
            yield difference(at, reseeded, batches, text)
            for text, got in trial.read_more_than_once(rank, epoch):
                # Where the batches have other sizes, or are fewer, the position is shared: rule 11's.
                if [*map(len, got)] == [*map(len, batches)]:
                    yield difference(at, got, batches, f"the order depends on the use before: {text}")
        yield from _same_order_on_fewer_ranks(trial, epoch, ranks)


def _same_order_on_fewer_ranks(trial: Trial, epoch: int, ranks: list[Batches]) -> Checks:
    """Whether this world size deals out the order that each smaller one does, however it deals.

    If each step takes the next indices of one order, in contiguous parts or in strides, then of two indices none comes
    in an earlier step on one world size and in a later step on another. (In the same step on either is fine.) If each
    *rank* takes one contiguous part of the order, then the ranks' parts one after the other are the same sequence on
    both. A sampler is right if either is so; one that seeds its order with the world size or the rank keeps neither.
    Padding and a tail left out are at the end of the order, and change neither.
    """
    for fewer in trial.lab.trials_of(trial.shape):
        others = fewer.record(epoch).ranks
        if fewer.num_replicas >= trial.num_replicas or not others:
            continue
        if any(all(trial.uncovered(each)) for each in (ranks, others)):
            continue  # ranks that lose and repeat indices at once share no order that could be compared
        at = trial.at(epoch=epoch)
        parts, other_parts = ([i for batches in each for i in trial.primary(batches)] for each in (ranks, others))
        common = min(len(parts), len(other_parts))
        steps, other_steps = trial.steps_of(ranks), trial.steps_of(others)
        swapped = _swapped(steps, other_steps)
        if swapped is None or parts[:common] == other_parts[:common]:
            yield None
            continue
        first, second = swapped
        text = (
            f"the order depends on the number of ranks: index {first} comes before {second} here (steps "
            f"{steps[first]} and {steps[second]}), and after it on {counted(fewer.num_replicas, 'rank')} (steps "
            f"{other_steps[first]} and {other_steps[second]})"
        )
        yield Finding(text, replace(at, step=steps[first], indices=swapped))


def _swapped(steps: dict[int, int], other_steps: dict[int, int]) -> tuple[int, int] | None:
    """Two indices of which the first comes earlier in ``steps`` and later in ``other_steps``."""
    last: tuple[int, int] | None = None
    entries = sorted((steps[i], other_steps[i], i) for i in steps.keys() & other_steps.keys())
    for _, group in groupby(entries, key=lambda entry: entry[0]):
        of_step = [(other, index) for _, other, index in group]
        if last and of_step[0][0] < last[0]:
            return last[1], of_step[0][1]
        last = max([*of_step, last] if last else of_step)
    return None


def new_orders(trial: Trial) -> Checks:
    recorded = dict(trial.recorded())
    if not trial.has_orders:
        return
    if trial.offers.set_epoch and not all_alike(recorded.values()) and trial.has_many_orders(list(recorded.values())):
        for (e0, ranks), (e1, others) in combinations(recorded.items(), 2):
            yield Finding(f"epochs {e0} and {e1} have one order", trial.at(epoch=e1)) if ranks == others else None
    if not trial.lab.seeds:
        return
    ways = [("seeds 0 and 1 give one order: the seed has no effect", 0)]
    if trial.offers.set_epoch:
        ways.append(("(seed 0, epoch 1) has the order of (seed 1, epoch 0), as the sum seed + epoch makes it", 1))
    for text, later in ways:
        at = trial.at(epoch=later)
        with contextlib.suppress(Refusal):
            pairs = ((trial.read_all(e + later, seed=0), trial.read_all(e, seed=1)) for e in range(MANY_EPOCHS))
            yield Finding(text, at) if all(zeros == ones for zeros, ones in pairs) else None


def set_epoch_arrives(trial: Trial) -> Checks:
    if not trial.recorded() or not trial.offers.set_epoch:
        return
    for epoch, ranks in trial.recorded():
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            sampler = trial.make(rank)
            if not trial.offers.inner_set_epoch:
                text = "batch_sampler.sampler.set_epoch, the only one that trainers look for, does not exist"
                yield Finding(text, trial.at())
                return
            call("batch_sampler.sampler.set_epoch", sampler.sampler.set_epoch, epoch)
            text = "batch_sampler.sampler.set_epoch, the only one that trainers look for, is not the sampler's own"
            yield difference(at, trial.read(sampler, epoch), batches, text)
    recorded = [ranks for _, ranks in trial.recorded()]
    if not trial.has_orders:
        return
    # A small sampler may repeat an order by chance, but not so often.
    alike = all_alike(recorded) and all_alike(trial.record(epoch).ranks for epoch in range(MANY_EPOCHS))
    text = f"set_epoch has no effect: epochs 0 to {MANY_EPOCHS - 1} have one order"
    yield Finding(text, trial.at(epoch=1)) if alike else None
