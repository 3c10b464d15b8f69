"""The eleven rules, one function for each, numbered as in :data:`~course_lib.conformance.report.RULES`.

A rule reads a trial, and yields the single checks that it makes, the smallest cases first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, groupby, zip_longest
from typing import Any

from course_lib._words import counted, plural
from course_lib.conformance.calls import Fault, Refusal, Unpicklable, call, pickled
from course_lib.conformance.report import RULES, Counterexample, listed, shortened
from course_lib.conformance.trial import MANY_EPOCHS, Batches, Trial, all_equal

INNER = "batch_sampler.sampler.set_epoch, the only one that Lightning calls (and accelerate on several ranks),"


@dataclass(frozen=True)
class Finding:
    """Where a rule is broken."""

    text: str
    at: Counterexample
    means: str = ""
    """For a training run; by default what the rule says."""


Checks = Iterator[Finding | None]
"""The single checks of a rule: None for one that holds, a finding for one that does not.

After a finding the rule is not asked again.
"""


def covers_exactly_once(trial: Trial) -> Checks:
    """Rule 1: in an epoch, each primary index comes exactly once over all ranks, but for what is by design."""
    for epoch in trial.game.epochs:
        record = trial.record(epoch)
        at = trial.at(epoch=epoch)
        if record.fault:
            means = "the run ends there, or trains on nothing"
            yield Finding(record.fault, replace(at, rank=record.faulty_rank), means)
        elif record.ranks:
            yield _not_exactly_once(trial, record.ranks, at)


def equal_counts(trial: Trial) -> Checks:
    """Rule 2: every rank has the same number of batches."""
    for epoch in trial.game.epochs:
        record = trial.record(epoch)
        at = trial.at(epoch=epoch)
        if record.refused and len(record.refused) < trial.num_replicas:
            rank, why = next(iter(record.refused.items()))
            yield Finding(f"only some ranks refuse, rank {rank} with ValueError: {why}", replace(at, rank=rank))
        yield _uneven_counts(record.ranks, at)


def true_length(trial: Trial) -> Checks:
    """Rule 3: ``len()`` is the number of batches that follow, before and after a resume."""
    for epoch, ranks in trial.recorded():
        if not trial.offers.length:
            return
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            told = trial.length(trial.make(rank, epoch))
            text = f"len() is {told}, {counted(len(batches), 'batch', 'batches')} are yielded"
            yield Finding(text, at) if told != len(batches) else None
        for stop, rank in trial.stops(ranks):
            trial.at(epoch=epoch, rank=rank)
            try:
                loaded = trial.resumed(rank, trial.state(rank, epoch, stop))
                told, yielded = trial.length(loaded), len(trial.read(loaded, epoch))
            except Fault:
                continue  # rule 7 finds it
            text = f"len() is {told} after the resume, {counted(yielded, 'batch', 'batches')} are yielded"
            yield Finding(text, trial.at(epoch=epoch, stop=stop, rank=rank)) if told != yielded else None


def one_order(trial: Trial) -> Checks:
    """Rule 4: the order is a function of the seed and the epoch, and of nothing else."""
    for epoch, ranks in trial.recorded():
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            again = trial.read(trial.make(rank, epoch), epoch)
            yield _difference(at, again, batches, "two new samplers do not agree")
            reseeded = trial.read(trial.make(rank, epoch, salt=1), epoch, salt=1)
            text = "the order depends on the global generators (random, NumPy's or torch's)"
            yield _difference(at, reseeded, batches, text)
            for text, got in trial.read_more_than_once(rank, epoch):
                # Batches of other sizes, or fewer of them, mean that the position is shared: rule 11 finds it.
                if _sizes(got) == _sizes(batches):
                    yield _difference(at, got, batches, f"the order depends on the use before: {text}")
        yield from _same_order_on_fewer_ranks(trial, epoch, ranks)


def _same_order_on_fewer_ranks(trial: Trial, epoch: int, ranks: list[Batches]) -> Checks:
    """Whether this world size deals out the order that each smaller one does, in whatever way it deals.

    If each step takes the next indices of one order, in contiguous parts or in strides, then no index comes before
    another on one world size and after it on another, counted in steps. (Both may come in the same step on either.) If
    each *rank* takes one contiguous part of the order, then the ranks' parts one after the other are the same sequence
    on both. A sampler is right if one of the two holds; one that seeds its order with the world size or the rank
    violates both. Padding and a dropped tail are at the end of the order, and change neither.
    """
    for fewer in trial.on_all_world_sizes():
        others = fewer.record(epoch).ranks
        if fewer.num_replicas >= trial.num_replicas or not others:
            continue
        if all(trial.missing_and_repeated(ranks)) or all(trial.missing_and_repeated(others)):
            continue  # ranks that lose and repeat indices at once share no order that could be compared
        at = trial.at(epoch=epoch)
        parts = [index for batches in ranks for index in trial.primary(batches)]
        other_parts = [index for batches in others for index in trial.primary(batches)]
        common = min(len(parts), len(other_parts))
        steps, other_steps = trial.first_steps(ranks), trial.first_steps(others)
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
    latest = (-1, -1)  # of the indices of all earlier steps: the last step on the other side, and its index
    entries = sorted((steps[i], other_steps[i], i) for i in steps.keys() & other_steps.keys())
    for _, group in groupby(entries, key=lambda entry: entry[0]):
        of_step = [(other, index) for _, other, index in group]
        earliest = of_step[0]
        if earliest[0] < latest[0]:
            return latest[1], earliest[1]
        latest = max(latest, of_step[-1])
    return None


def new_orders(trial: Trial) -> Checks:
    """Rule 5: another seed or another epoch has another order."""
    recorded = dict(trial.recorded())
    if not trial.has_orders:
        return
    epochs = list(recorded.values())
    if trial.offers.set_epoch and not all_equal(epochs) and trial.has_many_orders(epochs):
        for (e0, ranks), (e1, others) in combinations(recorded.items(), 2):
            yield Finding(f"epochs {e0} and {e1} have one order", trial.at(epoch=e1)) if ranks == others else None
    if not trial.game.seeds:
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
    """Rule 6: the ``set_epoch`` that trainers call reaches the sampler, and changes the order."""
    if not trial.recorded() or not trial.offers.set_epoch:
        return
    for epoch, ranks in trial.recorded():
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            sampler = trial.make(rank)
            if not trial.offers.inner_set_epoch:
                yield Finding(f"{INNER} does not exist", trial.at())
                return
            call("batch_sampler.sampler.set_epoch", sampler.sampler.set_epoch, epoch)
            yield _difference(at, trial.read(sampler, epoch), batches, f"{INNER} is not the sampler's own")
    if not trial.has_orders:
        return
    text = f"set_epoch has no effect: epochs 0 to {MANY_EPOCHS - 1} have one order"
    yield Finding(text, trial.at(epoch=1)) if trial.repeats_one_order else None


def resumes(trial: Trial) -> Checks:
    """Rule 7: a resume gives the rest of the epoch exactly, within the epoch and at its end."""
    for epoch, ranks in trial.recorded()[:2]:
        if not trial.offers.state:
            return
        for stop, rank in trial.stops(ranks):
            rest = ranks[rank][stop:]
            at = trial.at(epoch=epoch, stop=stop, rank=rank)
            state = trial.state(rank, epoch, stop)
            loaded = trial.resumed(rank, state)
            yield _difference(at, trial.read(loaded, epoch), rest, "the rest of the epoch is another one")
            if epoch > 0 and not trial.game.broken.keys() & {4, 6}:
                used = trial.state_of(trial.used_before(rank, epoch), epoch, stop)
                text = "of a sampler that has done an epoch before, the rest is another one"
                yield _difference(at, trial.read_resumed(rank, used, epoch), rest, text)
            if 0 < stop < len(ranks[rank]) - 1:
                second = trial.state_of(trial.resumed(rank, state), epoch, 1)
                text = "after one more batch and a second resume, the rest is another one"
                yield _difference(at, trial.read_resumed(rank, second, epoch), rest[1:], text)
            yield from _resumes_beside_set_epoch(trial, epoch, stop, rank, loaded)
        for rank, batches in enumerate(ranks):
            yield from _resumes_at_the_boundary(trial, epoch, rank, len(batches))


def _resumes_beside_set_epoch(trial: Trial, epoch: int, stop: int, rank: int, finished: Any) -> Checks:
    """Trainers call set_epoch around a resume, with the same epoch, and with the next one when that has ended."""
    if not trial.offers.set_epoch:
        return
    at = trial.at(epoch=epoch, stop=stop, rank=rank)
    rest = trial.record(epoch).ranks[rank][stop:]
    state = trial.state(rank, epoch, stop)
    kept = trial.resumed(rank, state)
    trial.turn(kept, epoch)
    yield _difference(at, trial.read(kept, epoch), rest, f"set_epoch({epoch}) after load_state_dict loses the position")
    following = trial.record(epoch + 1).ranks
    if following and 6 not in trial.game.broken:
        left = trial.resumed(rank, state)
        trial.turn(left, epoch + 1)
        text = f"set_epoch({epoch + 1}) after load_state_dict does not begin that epoch at its start"
        yield _difference(at, trial.read(left, epoch + 1), following[rank], text)
    if following and not trial.game.broken.keys() & {4, 6}:
        trial.turn(finished, epoch + 1)
        text = f"epoch {epoch + 1}, after the resumed one, is not whole"
        yield _difference(at, trial.read(finished, epoch + 1), following[rank], text)


def _resumes_at_the_boundary(trial: Trial, epoch: int, rank: int, count: int) -> Checks:
    """After the last batch, the state means the next epoch from its start: at once, or when set_epoch says so."""
    following = trial.record(epoch + 1).ranks
    if not following:
        return
    at = trial.at(epoch=epoch, stop=count, rank=rank)
    state = trial.state(rank, epoch, count)
    got = trial.read_resumed(rank, state, epoch + 1)
    if not trial.offers.set_epoch or 6 in trial.game.broken:  # which order comes next is up to the sampler
        text = f"the state after the last batch gives {counted(len(got), 'batch', 'batches')}, not a whole epoch"
        yield Finding(text, at) if _sizes(got) != _sizes(following[rank]) else None
        return
    if got != following[rank]:
        turned = trial.resumed(rank, state)
        trial.turn(turned, epoch + 1)
        got = trial.read(turned, epoch + 1)
    text = f"the state after the last batch does not mean epoch {epoch + 1} from its start"
    yield _difference(at, got, following[rank], text)


def other_workers(trial: Trial) -> Checks:
    """Rule 8: a copy in another process yields the same, and a resume does not depend on what workers fetched ahead."""
    for epoch, ranks in trial.recorded()[:2]:
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            with contextlib.suppress(Unpicklable):  # rule 11 finds it
                copy = pickled(trial.make(rank, epoch))
                yield _difference(at, trial.read(copy, epoch), batches, "a pickled copy yields other batches")
        if not trial.offers.state_after_batches or 7 in trial.game.broken:
            continue
        for stop, rank in trial.stops(ranks):
            rest = ranks[rank][stop:]
            at = trial.at(epoch=epoch, stop=stop, rank=rank)
            for ahead in sorted({1, len(rest)}):
                state = trial.state_of(trial.make(rank, epoch), epoch, stop + ahead, batches=stop)
                text = f"state_dict(batches={stop}) after {stop + ahead} were fetched: the rest is another one"
                yield _difference(at, trial.read_resumed(rank, state, epoch), rest, text)
            if len(rest) > 2:
                loaded = trial.resumed(rank, trial.state(rank, epoch, stop))
                state = trial.state_of(loaded, epoch, 2, batches=1)
                text = "state_dict(batches=1) after the resume, when 2 were fetched: the rest is another one"
                yield _difference(at, trial.read_resumed(rank, state, epoch), rest[1:], text)


def other_world_size(trial: Trial) -> Checks:
    """Rule 9: resumed on another number of ranks, the rest of the epoch is covered exactly once."""
    if trial.game.broken.keys() & {1, 4, 7}:
        return
    for other in trial.on_all_world_sizes():
        for epoch, ranks in trial.recorded()[:2]:
            if other is trial or not other.record(epoch).ranks or not trial.offers.state:
                continue
            for stop in sorted({stop for stop, _ in trial.stops(ranks) if 0 < stop < min(map(len, ranks))}):
                at = trial.at(epoch=epoch, stop=stop, resumed_on=other.num_replicas)
                state = trial.state(0, epoch, stop)
                resumed, refused = [], []
                for rank in range(other.num_replicas):
                    try:
                        resumed.append(other.read_resumed(rank, state, epoch))
                    except Refusal as refusal:
                        refused.append(str(refusal))
                if refused and resumed:
                    yield Finding(f"only some ranks refuse: {refused[0]}", at, RULES[2][1])
                elif refused:
                    trial.game.note("refused to resume on another number of ranks", f"{at}: {refused[0]}")
                else:
                    lost = _not_exactly_once(trial, [batches[:stop] for batches in ranks] + resumed, at)
                    if lost:
                        yield replace(lost, means="")
                    elif 2 in trial.game.broken:
                        yield None
                    else:
                        yield _uneven_counts(resumed, at)


def even_use(trial: Trial) -> Checks:
    """Rule 10: no batch repeats an index needlessly, and the cycled stream's use counts never differ by more than 1."""
    for epoch, ranks in trial.recorded():
        uses = Counter(dict.fromkeys(trial.secondary, 0))
        for step, batches in enumerate(zip_longest(*ranks, fillvalue=[])):
            for rank, batch in enumerate(batches):
                at = trial.at(epoch=epoch, rank=rank, step=step)
                second_stream = [index for index in batch if index not in trial.once]
                if not trial.game.repeats:
                    yield _repeated_in_batch(trial.primary([batch]), len(trial.once), at)
                yield _repeated_in_batch(second_stream, len(trial.secondary), at)
                uses.update(second_stream)
            most, least = max(uses.values(), default=0), min(uses.values(), default=0)
            if most - least > 1:
                often = [index for index, count in uses.items() if count == most]
                seldom = [index for index, count in uses.items() if count == least]
                text = f"of the cycled stream, {listed(often)} had come {most} times, {listed(seldom)} {least} times"
                yield Finding(text, replace(trial.at(epoch=epoch, step=step), indices=(*often, *seldom)))


def _repeated_in_batch(indices: list[int], available: int, at: Counterexample) -> Finding | None:
    if len(set(indices)) == len(indices) or len(indices) > available:
        return None
    repeated = [index for index, count in Counter(indices).items() if count > 1]
    text = f"the batch holds {listed(repeated)} more than once, and {available} could fill {len(indices)} places"
    means = "the batch is smaller than its size says, and some samples weigh double in its gradient"
    return Finding(text, replace(at, indices=tuple(repeated)), means)


def usable_again(trial: Trial) -> Checks:
    """Rule 11: it can be pickled, and iterated again and by two iterators at once."""
    for epoch, ranks in trial.recorded():
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            pickled(trial.make(rank, epoch))
            for text, got in trial.read_more_than_once(rank, epoch):
                if _sizes(got) == _sizes(batches):
                    yield None  # if another order comes, rule 4 finds it
                else:
                    yield _difference(at, got, batches, text)


IN_ORDER = (
    covers_exactly_once,
    equal_counts,
    true_length,
    one_order,
    new_orders,
    set_epoch_arrives,
    resumes,
    other_workers,
    other_world_size,
    even_use,
    usable_again,
)
"""The rule at place 0 is number 1."""


# The comparisons that several rules make


def _difference(at: Counterexample, got: Batches, expected: Batches, text: str) -> Finding | None:
    for step, (batch, other) in enumerate(zip_longest(got, expected)):
        if batch != other:
            is_ = "the end" if batch is None else shortened(batch)
            should_be = "the end" if other is None else shortened(other)
            place = replace(at, step=step, indices=tuple(batch or other or ()))
            return Finding(f"{text}: batch {step} is {is_}, it should be {should_be}", place)
    return None


def _sizes(batches: Batches) -> list[int]:
    return [len(batch) for batch in batches]


def _uneven_counts(ranks: list[Batches], at: Counterexample) -> Finding | None:
    counts = [len(batches) for batches in ranks]
    if len(set(counts)) <= 1:
        return None
    told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    return Finding(f"the ranks have different numbers of batches ({told})", replace(at, step=min(counts)))


def _not_exactly_once(trial: Trial, ranks: list[Batches], at: Counterexample) -> Finding | None:
    missing, repeated = trial.missing_and_repeated(ranks)
    missing = [] if trial.game.drops else missing
    repeated = [] if trial.game.repeats else repeated
    said, means = [], []
    if missing:
        said.append(f"{listed(missing)} {plural(len(missing), 'is', 'are')} missing")
        means.append("no rank trains on what is missing")
    if repeated:
        where = ""
        if at.stop is None:
            places = [
                f"rank {rank} in step {step}"
                for rank, batches in enumerate(ranks)
                for step, batch in enumerate(batches)
                for index in batch
                if index == repeated[0]
            ]
            where = f" ({repeated[0]} on {' and on '.join(places[:3])})"
        said.append(f"{listed(repeated)} {plural(len(repeated), 'is', 'are')} repeated{where}")
        means.append("what is repeated weighs more than the rest")
    if not said:
        return None
    times = "at least once" if trial.game.repeats else "at most once" if trial.game.drops else "once"
    text = f"{' and '.join(said)}; each of {counted(len(trial.once), 'index', 'indices')} should come {times}"
    if missing and repeated and at.stop is None and len(ranks) > 1:
        text += ". Both at once: the ranks seem not to draw one order"
    return Finding(text, replace(at, indices=(*missing, *repeated)), f"{' and '.join(means)}, and no error says so")
