"""Prove a batch sampler, or find out where it is wrong: any sampler, on any number of ranks, in one process.

A batch sampler that is wrong under DDP seldom fails: it trains, on some samples twice, on others never, in one order
for ever, and no single process shows it. The rule: *what a sampler promises, it promises for all ranks together: write
down what every rank yields, and count.* The kit plays all ranks, stops and resumes them, and judges eleven rules.

    >>> def make(num_replicas, rank, n, batch_size, seed=0):
    ...     return MyBatchSampler(n, batch_size, seed=seed, num_replicas=num_replicas, rank=rank)
    >>> shapes = [dict(n=n, batch_size=4) for n in (3, 20, 50)]
    >>> def test_my_sampler():
    ...     assert_batch_sampler(make, lambda shape: range(shape["n"]), shapes=shapes)

All rules but the fourth are judged as in a run that has seeded the global generators alike on all ranks, so that a
sampler that draws from them breaks one rule, not all. The caller's generators are put back afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby, islice, zip_longest
from typing import Any

import numpy as np
import torch

from course_lib._arguments import int_of_at_least

Batches = list[list[int]]
"""What one rank yields."""
Shape = Mapping[str, Any]


@dataclass(frozen=True)
class ConformanceReport:
    """What :func:`check_batch_sampler` found."""

    violations: tuple[Violation, ...]
    """At most one for each rule, with its smallest counterexample."""
    not_offered: tuple[str, ...]
    """What the sampler does not have, and which rules could not be judged for that."""
    notes: tuple[str, ...]
    """What is no violation and still worth knowing: what was refused, left unjudged, or warned of."""
    checks: dict[int, int]
    """How many single checks each rule passed; 0: it was not judged."""

    @property
    def ok(self) -> bool:
        """Whether no rule is violated; a rule that was not judged isn't."""
        return not self.violations

    def __str__(self) -> str:
        broken = [violation.rule for violation in self.violations]
        unjudged = [rule for rule in RULES if not self.checks[rule] and rule not in broken]
        verdict = "the sampler breaks " + _rules(broken) if broken else "no rule is broken"
        lines = [f"{verdict[0].upper()}{verdict[1:]} ({sum(self.checks.values()):,} checks passed)."]
        lines += [f"\n{violation}" for violation in self.violations]
        if unjudged:
            lines += ["", f"Not judged: {_rules(unjudged)}."]
        for title, items in (("Not offered", self.not_offered), ("Notes", self.notes)):
            lines += [*([f"\n{title}:"] if items else []), *(f"- {item}" for item in items)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Violation:
    """One broken rule."""

    rule: int
    name: str
    message: str
    """Where it is broken, what the sampler did, and what that means for a training run."""
    counterexample: Counterexample

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Counterexample:
    """The smallest case that was found: fewest ranks, then smallest shape, earliest epoch, earliest stop."""

    shape: Shape
    num_replicas: int
    epoch: int | None = None
    stop: int | None = None
    """Batches that each rank had had when the state was taken."""
    resumed_on: int | None = None
    """The number of ranks after the resume, if it is another one."""
    rank: int | None = None
    step: int | None = None
    """The batch in question, counted in its iteration from 0."""
    indices: tuple[int, ...] = ()

    def __str__(self) -> str:
        shape = ", ".join(f"{name}={value!r}" for name, value in self.shape.items())
        parts = [
            shape,
            _count(self.num_replicas, "rank"),
            "" if self.epoch is None else f"epoch {self.epoch}",
            "" if self.stop is None else f"stopped after {_count(self.stop, 'batch', 'batches')}",
            "" if self.resumed_on is None else f"resumed on {_count(self.resumed_on, 'rank')}",
            "" if self.rank is None else f"rank {self.rank}",
            "" if self.step is None else f"step {self.step}",
        ]
        return ", ".join(part for part in parts if part)


RULES: dict[int, tuple[str, str]] = {
    1: ("exactly once", "some samples are trained on too often or never, and no error says so"),
    2: ("equal counts", "a rank with a batch more waits for the others' gradients for ever: the run hangs there"),
    3: ("true length", "trainers plan steps, schedules and the end of an epoch by len(): they stop early or wait"),
    4: ("one order", "the order cannot be had again: not by a second run, not after a resume, not by another rank"),
    5: ("new orders", "runs or epochs that are thought to be independent see the samples in one and the same order"),
    6: ("set_epoch arrives", "every epoch repeats the order of the first, and nothing says so"),
    7: ("resume", "after a resume the run trains again on what it has seen, or never on what it has missed"),
    8: ("other workers", "workers fetch ahead of the training: what they had fetched is lost by a resume"),
    9: ("other world size", "a run that goes on with more or fewer ranks loses samples or sees them twice"),
    10: ("even use", "some samples weigh more than others, and a batch holds less than its size says"),
    11: ("picklable, re-iterable", "a second epoch, a second loader or a spawned process gets nothing, or an error"),
}
"""Number: short name, and what a violation means for a training run."""


def check_batch_sampler(
    factory: Callable[..., Any],
    exactly_once: Collection[int] | Callable[[Shape], Collection[int]],
    *,
    world_sizes: Iterable[int] = (1, 2, 3, 5, 8),
    epochs: int = 3,
    shapes: Iterable[Shape] | None = None,
) -> ConformanceReport:
    """Judge a batch sampler by playing all ranks in this process.

    Args:
        factory: ``factory(num_replicas, rank, **shape)`` makes one rank's batch sampler, for every shape. If it takes
            a keyword ``seed``, other seeds are judged too. ``partial(ShuffledBatchSampler, 100, 8)`` is one.
        exactly_once: The indices that an epoch must cover, or a function that tells them from the shape (a dict).
            Other indices are taken for a second stream, which is cycled; the two must not overlap. In a list or range
            that is the order of a sampler that does not shuffle, in a set the ascending one is.
        world_sizes: Numbers of ranks.
        epochs: How many to read, at least 2.
        shapes: Keywords of the factory. A few small ones, uneven ones among them, find what large ones would.

    A sampler or factory that raises a ``ValueError`` before the first batch, on all ranks, refuses that shape or world
    size: a note, no violation. Any other exception, a batch that is empty or holds no integers, and an epoch without
    an end are violations. A shuffling sampler is known from a plain one by its epochs: if all are alike and in the
    order of ``exactly_once``, or the shape has ``shuffle=False``, rules 5 and 6 do not ask for another order.

    So that one fault is one violation, what rests on a broken rule is left out and noted: rule 9 rests on 1, 4 and 7,
    the resumes of rule 8 on 7. The fourth rule is strict: an order that changes when a sampler is iterated twice, with
    no set_epoch in between, is no function of (seed, epoch). Every epoch is read hundreds of times: keep shapes small.

    Raises:
        ValueError: An argument is out of its range, or every shape was refused on every world size.
    """
    lab = _Lab(factory, exactly_once, world_sizes, epochs, shapes)
    with _generators_put_back(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for number, rule in enumerate(_RULES, start=1):
            lab.judge(number, rule)
        for warning in warned:
            lab.note("the sampler warned", str(warning.message))
        return lab.report()


def assert_batch_sampler(
    factory: Callable[..., Any],
    exactly_once: Collection[int] | Callable[[Shape], Collection[int]],
    *,
    world_sizes: Iterable[int] = (1, 2, 3, 5, 8),
    epochs: int = 3,
    shapes: Iterable[Shape] | None = None,
) -> None:
    """Raise an ``AssertionError`` with the report if a rule is broken; see :func:`check_batch_sampler`."""
    __tracebackhide__ = True  # pytest shows the caller's line
    report = check_batch_sampler(factory, exactly_once, world_sizes=world_sizes, epochs=epochs, shapes=shapes)
    if not report.ok:
        raise AssertionError(str(report))


# ------------------------------------------------------------------------------------------------------ the rules
# Each is a generator over the single checks of one trial (one shape on one world size), smallest first: it yields None
# for a check that holds, and a finding for one that does not; after that it is not asked again.


def _covers_exactly_once(trial: _Trial) -> Checks:
    for epoch in trial.lab.epochs:
        record = trial.record(epoch)
        at = trial.at(epoch=epoch)
        if record.fault:
            yield _Finding(
                record.fault, replace(at, rank=record.faulty_rank), "the run ends there, or trains on nothing"
            )
        elif record.ranks:
            yield _uncovered(trial, record.ranks, at)


def _uncovered(trial: _Trial, ranks: list[Batches], at: Counterexample) -> _Finding | None:
    missing, repeated = trial.uncovered(ranks)
    said, means = [], []
    if missing:
        said.append(f"{_listed(missing)} {_is(missing)} missing")
        means.append("no rank trains on what is missing")
    if repeated:
        places = [
            f"rank {rank} in step {step}"
            for rank, batches in enumerate(ranks)
            for step, batch in enumerate(batches)
            for index in batch
            if index == repeated[0]
        ]
        where = f" ({repeated[0]} on {' and on '.join(places[:3])})" if at.stop is None else ""
        said.append(f"{_listed(repeated)} {_is(repeated)} repeated{where}")
        means.append("what is repeated weighs more than the rest")
    if not said:
        return None
    text = f"{' and '.join(said)}; each of {_count(len(trial.once), 'index', 'indices')} should come once"
    if missing and repeated and at.stop is None and len(ranks) > 1:
        text += ". Both at once: the ranks seem not to draw one order"
    return _Finding(text, replace(at, indices=(*missing, *repeated)), f"{' and '.join(means)}, and no error says so")


def _equal_counts(trial: _Trial) -> Checks:
    for epoch in trial.lab.epochs:
        record = trial.record(epoch)
        at = trial.at(epoch=epoch)
        if record.refused and len(record.refused) < trial.num_replicas:
            rank, why = next(iter(record.refused.items()))
            yield _Finding(f"only some ranks refuse, rank {rank} with ValueError: {why}", replace(at, rank=rank))
        counts = [len(batches) for batches in record.ranks]
        yield _uneven_counts(counts, at) if counts else None


def _true_length(trial: _Trial) -> Checks:
    for epoch, ranks in trial.recorded():
        if not trial.offers.length:
            return
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            told = trial.length(trial.make(rank, epoch))
            text = f"len() is {told}, {_count(len(batches), 'batch', 'batches')} are yielded"
            yield _Finding(text, at) if told != len(batches) else None
        for stop, rank in trial.stops(ranks):
            trial.at(epoch=epoch, rank=rank)
            try:
                loaded = trial.resumed(rank, trial.state(rank, epoch, stop))
                told, yielded = trial.length(loaded), len(trial.read(loaded, epoch))
            except _Fault:
                continue  # rule 7's
            text = f"len() is {told} after the resume, {_count(yielded, 'batch', 'batches')} are yielded"
            yield _Finding(text, trial.at(epoch=epoch, stop=stop, rank=rank)) if told != yielded else None


def _one_order(trial: _Trial) -> Checks:
    for epoch, ranks in trial.recorded():
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            again = trial.read(trial.make(rank, epoch), epoch)
            yield _difference(at, again, batches, "two new samplers do not agree")
            reseeded = trial.read(trial.make(rank, epoch, salt=1), epoch, salt=1)
            text = "the order depends on the global generators (random, NumPy's or torch's)"
            yield _difference(at, reseeded, batches, text)
            for text, got in trial.read_more_than_once(rank, epoch):
                # Where the batches have other sizes, or are fewer, the position is shared: rule 11's.
                if [*map(len, got)] == [*map(len, batches)]:
                    yield _difference(at, got, batches, f"the order depends on the use before: {text}")
        yield from _same_order_on_fewer_ranks(trial, epoch, ranks)


def _same_order_on_fewer_ranks(trial: _Trial, epoch: int, ranks: list[Batches]) -> Checks:
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
            f"{steps[first]} and {steps[second]}), and after it on {_count(fewer.num_replicas, 'rank')} (steps "
            f"{other_steps[first]} and {other_steps[second]})"
        )
        yield _Finding(text, replace(at, step=steps[first], indices=swapped))


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


def _new_orders(trial: _Trial) -> Checks:
    recorded = dict(trial.recorded())
    if not trial.has_orders:
        return
    if trial.offers.set_epoch and not _all_alike(recorded.values()) and trial.has_many_orders(list(recorded.values())):
        for (e0, ranks), (e1, others) in combinations(recorded.items(), 2):
            yield _Finding(f"epochs {e0} and {e1} have one order", trial.at(epoch=e1)) if ranks == others else None
    if not trial.lab.seeds:
        return
    ways = [("seeds 0 and 1 give one order: the seed has no effect", 0)]
    if trial.offers.set_epoch:
        ways.append(("(seed 0, epoch 1) has the order of (seed 1, epoch 0), as the sum seed + epoch makes it", 1))
    for text, later in ways:
        at = trial.at(epoch=later)
        with contextlib.suppress(_Refusal):
            pairs = ((trial.read_all(e + later, seed=0), trial.read_all(e, seed=1)) for e in range(MANY_EPOCHS))
            yield _Finding(text, at) if all(zeros == ones for zeros, ones in pairs) else None


def _set_epoch_arrives(trial: _Trial) -> Checks:
    if not trial.recorded() or not trial.offers.set_epoch:
        return
    for epoch, ranks in trial.recorded():
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            sampler = trial.make(rank)
            if not trial.offers.inner_set_epoch:
                text = "batch_sampler.sampler.set_epoch, the only one that trainers look for, does not exist"
                yield _Finding(text, trial.at())
                return
            _call("batch_sampler.sampler.set_epoch", sampler.sampler.set_epoch, epoch)
            text = "batch_sampler.sampler.set_epoch, the only one that trainers look for, is not the sampler's own"
            yield _difference(at, trial.read(sampler, epoch), batches, text)
    recorded = [ranks for _, ranks in trial.recorded()]
    if not trial.has_orders:
        return
    # A small sampler may repeat an order by chance, but not so often.
    alike = _all_alike(recorded) and _all_alike(trial.record(epoch).ranks for epoch in range(MANY_EPOCHS))
    text = f"set_epoch has no effect: epochs 0 to {MANY_EPOCHS - 1} have one order"
    yield _Finding(text, trial.at(epoch=1)) if alike else None


def _resumes(trial: _Trial) -> Checks:
    for epoch, ranks in trial.recorded()[:2]:
        if not trial.offers.state:
            return
        for stop, rank in trial.stops(ranks):
            rest = ranks[rank][stop:]
            at = trial.at(epoch=epoch, stop=stop, rank=rank)
            state = trial.state(rank, epoch, stop)
            loaded = trial.resumed(rank, state)
            yield _difference(at, trial.read(loaded, epoch), rest, "the rest of the epoch is another one")
            if epoch > 0 and not {4, 6} & set(trial.lab.found):
                used = trial.state_of(trial.used_before(rank, epoch), epoch, stop)
                text = "of a sampler that has done an epoch before, the rest is another one"
                yield _difference(at, trial.read(trial.resumed(rank, used), epoch), rest, text)
            if 0 < stop < len(ranks[rank]) - 1:
                second = trial.state_of(trial.resumed(rank, state), epoch, 1)
                text = "after one more batch and a second resume, the rest is another one"
                yield _difference(at, trial.read(trial.resumed(rank, second), epoch), rest[1:], text)
            yield from _resumes_beside_set_epoch(trial, epoch, stop, rank, loaded)
        for rank, batches in enumerate(ranks):
            yield from _resumes_at_the_boundary(trial, epoch, rank, len(batches))


def _resumes_beside_set_epoch(trial: _Trial, epoch: int, stop: int, rank: int, finished: Any) -> Checks:
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
    if following and 6 not in trial.lab.found:
        left = trial.resumed(rank, state)
        trial.turn(left, epoch + 1)
        text = f"set_epoch({epoch + 1}) after load_state_dict does not begin that epoch at its start"
        yield _difference(at, trial.read(left, epoch + 1), following[rank], text)
    if following and not {4, 6} & set(trial.lab.found):
        trial.turn(finished, epoch + 1)
        text = f"epoch {epoch + 1}, after the resumed one, is not whole"
        yield _difference(at, trial.read(finished, epoch + 1), following[rank], text)


def _resumes_at_the_boundary(trial: _Trial, epoch: int, rank: int, count: int) -> Checks:
    """After the last batch, the state means the next epoch from its start: at once, or when set_epoch says so."""
    following = trial.record(epoch + 1).ranks
    if not following:
        return
    at = trial.at(epoch=epoch, stop=count, rank=rank)
    state = trial.state(rank, epoch, count)
    got = trial.read(trial.resumed(rank, state), epoch + 1)
    if not trial.offers.set_epoch or 6 in trial.lab.found:  # which order comes next is its own affair
        text = f"the state after the last batch gives {_count(len(got), 'batch', 'batches')}, not a whole epoch"
        yield _Finding(text, at) if [*map(len, got)] != [*map(len, following[rank])] else None
        return
    if got != following[rank]:
        turned = trial.resumed(rank, state)
        trial.turn(turned, epoch + 1)
        got = trial.read(turned, epoch + 1)
    text = f"the state after the last batch does not mean epoch {epoch + 1} from its start"
    yield _difference(at, got, following[rank], text)


def _other_workers(trial: _Trial) -> Checks:
    for epoch, ranks in trial.recorded()[:2]:
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            with contextlib.suppress(_Unpicklable):  # rule 11's
                copy = _pickled(trial.make(rank, epoch))
                yield _difference(at, trial.read(copy, epoch), batches, "a pickled copy yields other batches")
        if not trial.offers.state_after_batches or 7 in trial.lab.found:
            continue
        for stop, rank in trial.stops(ranks):
            rest = ranks[rank][stop:]
            at = trial.at(epoch=epoch, stop=stop, rank=rank)
            for ahead in sorted({1, len(rest)}):
                state = trial.state_of(trial.make(rank, epoch), epoch, stop + ahead, batches=stop)
                text = f"state_dict(batches={stop}) after {stop + ahead} were fetched: the rest is another one"
                yield _difference(at, trial.read(trial.resumed(rank, state), epoch), rest, text)
            if len(rest) > 2:
                loaded = trial.resumed(rank, trial.state(rank, epoch, stop))
                state = trial.state_of(loaded, epoch, 2, batches=1)
                text = "state_dict(batches=1) after the resume, when 2 were fetched: the rest is another one"
                yield _difference(at, trial.read(trial.resumed(rank, state), epoch), rest[1:], text)


def _other_world_size(trial: _Trial) -> Checks:
    if {1, 4, 7} & set(trial.lab.found):
        return
    for other in trial.lab.trials_of(trial.shape):
        for epoch, ranks in trial.recorded()[:2]:
            if other is trial or not other.record(epoch).ranks or not trial.offers.state:
                continue
            for stop in sorted({stop for stop, _ in trial.stops(ranks) if 0 < stop < min(map(len, ranks))}):
                at = trial.at(epoch=epoch, stop=stop, resumed_on=other.num_replicas)
                state = trial.state(0, epoch, stop)
                resumed, refused = [], []
                for rank in range(other.num_replicas):
                    try:
                        resumed.append(other.read(other.resumed(rank, state), epoch))
                    except _Refusal as refusal:
                        refused.append(str(refusal))
                if refused and resumed:
                    yield _Finding(f"only some ranks refuse: {refused[0]}", at, RULES[2][1])
                elif refused:
                    trial.lab.note("refused to resume on another number of ranks", f"{at}: {refused[0]}")
                else:
                    lost = _uncovered(trial, [batches[:stop] for batches in ranks] + resumed, at)
                    uneven = None if 2 in trial.lab.found else _uneven_counts([*map(len, resumed)], at)
                    yield replace(lost, means="") if lost else uneven


def _even_use(trial: _Trial) -> Checks:
    for epoch, ranks in trial.recorded():
        uses = Counter(dict.fromkeys(trial.secondary, 0))
        for step, batches in enumerate(zip_longest(*ranks, fillvalue=[])):
            for rank, batch in enumerate(batches):
                at = trial.at(epoch=epoch, rank=rank, step=step)
                second_stream = [index for index in batch if index not in trial.once]
                for stream, size in ((trial.primary([batch]), len(trial.once)), (second_stream, len(trial.secondary))):
                    twice = _repeated(stream)
                    text = (
                        f"the batch holds {_listed(twice)} more than once, and {size} could fill {len(stream)} places"
                    )
                    wrong = twice and len(stream) <= size
                    means = "the batch is smaller than its size says, and some samples weigh double in its gradient"
                    yield _Finding(text, replace(at, indices=tuple(twice)), means) if wrong else None
                uses.update(second_stream)
            most, least = max(uses.values(), default=0), min(uses.values(), default=0)
            if most - least > 1:
                often = [index for index, count in uses.items() if count == most]
                seldom = [index for index, count in uses.items() if count == least]
                text = f"of the cycled stream, {_listed(often)} had come {most} times, {_listed(seldom)} {least} times"
                yield _Finding(text, replace(trial.at(epoch=epoch, step=step), indices=(*often, *seldom)))


def _usable_again(trial: _Trial) -> Checks:
    for epoch, ranks in trial.recorded():
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            _pickled(trial.make(rank, epoch))
            for text, got in trial.read_more_than_once(rank, epoch):
                # Where only the order differs, it is rule 4's.
                same_sizes = [*map(len, got)] == [*map(len, batches)]
                yield None if same_sizes else _difference(at, got, batches, text)


_RULES = (
    _covers_exactly_once,
    _equal_counts,
    _true_length,
    _one_order,
    _new_orders,
    _set_epoch_arrives,
    _resumes,
    _other_workers,
    _other_world_size,
    _even_use,
    _usable_again,
)

# ------------------------------------------------------------------------------------------------ ranks in one process

MANY_ORDERS = 10
"""So many indices (or batches, where whole batches are shuffled) have 3,628,800 orders: two alike are no chance."""
MANY_EPOCHS = 20
"""Epochs that must be alike before a sampler of few indices is said to repeat one order."""
MANY_STOPS = 8
"""An epoch of more batches is stopped at so many places, the first and the last ones among them."""
MANY_INDICES = 1_000_000
"""A batch of more has no end."""


class _Lab:
    """All trials of one call, and what the rules found in them."""

    def __init__(
        self,
        factory: Callable[..., Any],
        exactly_once: Collection[int] | Callable[[Shape], Collection[int]],
        world_sizes: Iterable[int],
        epochs: int,
        shapes: Iterable[Shape] | None,
    ) -> None:
        self.factory = factory
        parameters = _parameters(factory)
        self.by_name = {"num_replicas", "rank"} <= parameters
        self.epochs = range(int_of_at_least(2, "epochs", epochs))
        sizes = sorted({int_of_at_least(1, "every world size", size) for size in world_sizes})
        given = [{}] if shapes is None else [dict(shape) for shape in shapes]
        if not sizes or not given:
            raise ValueError(f"there is nothing to judge: {len(sizes)} world sizes, {len(given)} shapes")
        self.seeds = "seed" in parameters or all("seed" in shape for shape in given)
        by_size = [(shape, exactly_once(shape) if callable(exactly_once) else exactly_once) for shape in given]
        by_size.sort(key=lambda entry: len(entry[1]))
        self.trials = [_Trial(self, shape, once, size) for size in sizes for shape, once in by_size]
        self.found: dict[int, Violation] = {}
        self.checks = dict.fromkeys(RULES, 0)
        self.noted: dict[str, list[str]] = {}

    def judge(self, number: int, rule: Callable[[_Trial], Checks]) -> None:
        """Run a rule over the trials, from the smallest on, up to its first violation."""
        for trial in self.trials:
            try:
                finding = self._first_finding(number, rule(trial))
            except _Fault as fault:
                finding = _Finding(str(fault), trial.here)
            if finding:
                name, meaning = RULES[number]
                message = f"Rule {number}, {name}: {finding.at}: {finding.text}."
                message += f"\n  In a training run: {finding.means or meaning}."
                self.found[number] = Violation(number, name, message, finding.at)
                return

    def _first_finding(self, number: int, checks: Checks) -> _Finding | None:
        for finding in checks:
            if finding:
                return finding
            self.checks[number] += 1
        return None

    def trials_of(self, shape: Shape) -> list[_Trial]:
        return [trial for trial in self.trials if trial.shape is shape]

    def note(self, kind: str, detail: str) -> None:
        details = self.noted.setdefault(kind, [])
        if detail not in details:
            details.append(detail)

    def report(self) -> ConformanceReport:
        judged = [trial for trial in self.trials if trial.recorded()]
        if not judged and not self.found:
            raise ValueError(f"nothing was judged, all was refused: {self.noted['refused'][0]}")
        missing = [text for trial in judged for text in trial.offers.missing()]
        if not self.seeds:
            missing.append("no keyword seed of the factory: rule 5 is not judged between seeds")
        for trial in judged:
            if trial.secondary:
                text = "indices outside exactly_once were taken for a second stream, which is cycled"
                self.note(text, _listed(sorted(trial.secondary)))
            first = next(other for other in judged if other.shape is trial.shape)
            if trial is first and trial.unshuffled and len(trial.once) > 3:
                self.note("does not shuffle, so rules 5 and 6 asked for no other order", str(trial.at()))
        for number, needed in ((8, {7}), (9, {1, 4, 7})):
            if needed & set(self.found) and any(trial.offers.state for trial in judged):
                broken = _rules(sorted(needed & set(self.found)))
                self.note(f"the resumes of rule {number} were not judged", f"they rest on {broken}")
        notes = [
            f"{kind}: {details[0]}" + (f" (and {len(details) - 1} more)" if len(details) > 1 else "")
            for kind, details in self.noted.items()
        ]
        violations = tuple(self.found[number] for number in sorted(self.found))
        return ConformanceReport(violations, tuple(dict.fromkeys(missing)), tuple(notes), self.checks)


@dataclass
class _Record:
    """What the ranks did in one epoch: ``ranks`` is empty if they refused it, or one went wrong."""

    ranks: list[Batches] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    fault: str = ""
    faulty_rank: int | None = None


class _Trial:
    """One shape on one world size: makes samplers, reads them, and remembers what new ones yield."""

    def __init__(self, lab: _Lab, shape: Shape, once: Collection[int], num_replicas: int) -> None:
        self.lab, self.shape, self.num_replicas = lab, shape, num_replicas
        ordered = once if isinstance(once, Sequence) else sorted(once)
        self.once = {operator.index(index): place for place, index in enumerate(ordered)}
        if not self.once:
            raise ValueError(f"exactly_once must name at least one index, got {once!r} for the shape {dict(shape)}")
        self.here = Counterexample(shape, num_replicas)
        self._records: dict[int, _Record] = {}
        self._offers: _Offers | None = None
        self._unshuffled: bool | None = None
        self._secondary: frozenset[int] | None = None

    def at(self, **place: Any) -> Counterexample:
        """Where the rule is now; a fault that comes unexpected is reported here."""
        self.here = Counterexample(self.shape, self.num_replicas, **place)
        return self.here

    def make(self, rank: int, epoch: int | None = None, *, salt: int = 0, seed: int | None = None) -> Any:
        """A rank's new sampler, turned to an epoch."""
        _seed_globals(salt, -1)
        keywords = dict(self.shape) if seed is None else {**self.shape, "seed": seed}
        place = {"num_replicas": self.num_replicas, "rank": rank}
        if self.lab.by_name:
            sampler = _call("making the sampler", self.lab.factory, **place, **keywords)
        else:
            sampler = _call("making the sampler", self.lab.factory, *place.values(), **keywords)
        if epoch is not None:
            self.turn(sampler, epoch)
        return sampler

    def turn(self, sampler: Any, epoch: int) -> None:
        set_epoch = _set_epoch(sampler)
        if set_epoch:
            _call(f"set_epoch({epoch})", set_epoch, epoch)

    def iterate(self, sampler: Any, epoch: int, salt: int = 0) -> Iterator[list[int]]:
        """The sampler's batches, checked; an exception or an endless epoch becomes a fault."""
        _seed_globals(salt, epoch)
        most = 10 * len(self.once) + 100
        number = 0
        try:
            for number, batch in enumerate(sampler):
                if number == most:
                    raise _Fault(f"the epoch has no end: more than {most:,} batches for {len(self.once):,} indices")
                yield _as_indices(batch, number)
                number += 1
        except _Fault:
            raise
        except Exception as error:
            when = f"batch {number} raised" if number else "iterating raised"
            kind = _Refusal if isinstance(error, ValueError) and not number else _Fault
            raise kind(_told(when, error)) from error

    def read(self, sampler: Any, epoch: int, salt: int = 0) -> Batches:
        return list(self.iterate(sampler, epoch, salt))

    def read_all(self, epoch: int, seed: int) -> list[Batches]:
        """What all ranks yield in a run with another seed, its global generators' included."""
        samplers = (self.make(rank, epoch, salt=seed, seed=seed) for rank in range(self.num_replicas))
        return [self.read(sampler, epoch, salt=seed) for sampler in samplers]

    def record(self, epoch: int) -> _Record:
        """What all ranks' new samplers yield in an epoch: read once, and compared with ever after."""
        if epoch not in self._records:
            record = self._records[epoch] = _Record()
            ranks = []
            for rank in range(self.num_replicas):
                try:
                    ranks.append(self.read(self.make(rank, epoch), epoch))
                except _Refusal as refusal:
                    record.refused[rank] = str(refusal)
                except _Fault as fault:
                    record.fault, record.faulty_rank = str(fault), rank
                    break
            if len(ranks) == self.num_replicas:
                record.ranks = ranks
            elif len(record.refused) == self.num_replicas:
                self.lab.note("refused", f"{Counterexample(self.shape, self.num_replicas)}: {record.refused[0]}")
        return self._records[epoch]

    def recorded(self) -> list[tuple[int, list[Batches]]]:
        """The epochs that could be read on all ranks."""
        records = ((epoch, self.record(epoch).ranks) for epoch in self.lab.epochs)
        return [(epoch, ranks) for epoch, ranks in records if ranks]

    def read_more_than_once(self, rank: int, epoch: int) -> Iterator[tuple[str, Batches]]:
        """The epoch again from one sampler: a second time, by two iterators in turn, and after other epochs."""
        sampler = self.make(rank, epoch)
        self.read(sampler, epoch)
        yield "iterated a second time", self.read(sampler, epoch)
        sampler = self.make(rank, epoch)
        both = list(zip_longest(self.iterate(sampler, epoch), self.iterate(sampler, epoch)))
        for text, number in (("the first", 0), ("the second", 1)):
            yield f"of two iterators in turn, {text}", [pair[number] for pair in both if pair[number] is not None]
        if epoch > 0:
            yield "after the epochs before", self.read(self.used_before(rank, epoch), epoch)

    def used_before(self, rank: int, epoch: int) -> Any:
        """A sampler that has been through all epochs up to this one."""
        sampler = self.make(rank, 0)
        for before in range(epoch):
            self.turn(sampler, before)
            self.read(sampler, before)
        self.turn(sampler, epoch)
        return sampler

    def length(self, sampler: Any) -> int:
        return operator.index(_call("len()", len, sampler))

    def state(self, rank: int, epoch: int, stop: int) -> Any:
        return self.state_of(self.make(rank, epoch), epoch, stop)

    def state_of(self, sampler: Any, epoch: int, stop: int, **batches: int) -> Any:
        """The state after some batches, as a checkpoint keeps it."""
        iterator = self.iterate(sampler, epoch)
        for _ in islice(iterator, stop):
            pass
        return _pickled(_call("state_dict", sampler.state_dict, **batches))

    def resumed(self, rank: int, state: Any) -> Any:
        """A new sampler with the state, which alone tells it the epoch."""
        sampler = self.make(rank)
        _call("load_state_dict", sampler.load_state_dict, state)
        return sampler

    def stops(self, ranks: list[Batches]) -> list[tuple[int, int]]:
        """Where to stop, as (batches had, rank): everywhere before the end, or at some places of a long epoch."""
        if not self.offers.state:
            return []
        longest = max(map(len, ranks))
        stops = range(longest)
        if longest > MANY_STOPS:
            stops = sorted({*range(MANY_STOPS - 4), longest // 2, longest - 2, longest - 1})  # type: ignore[assignment]
        return [(stop, rank) for stop in stops for rank, batches in enumerate(ranks) if stop < len(batches)]

    def primary(self, batches: Batches) -> list[int]:
        return [index for batch in batches for index in batch if index in self.once]

    def uncovered(self, ranks: list[Batches]) -> tuple[list[int], list[int]]:
        """The indices that are missing, and those that come more than once."""
        uses = Counter(index for batches in ranks for index in self.primary(batches))
        missing = [index for index in self.once if index not in uses]
        return missing, [index for index, count in uses.items() if count > 1]

    def steps_of(self, ranks: list[Batches]) -> dict[int, int]:
        """For each index, the first step in which it comes."""
        steps: dict[int, int] = {}
        for step, batches in enumerate(zip_longest(*ranks, fillvalue=[])):
            for index in self.primary(list(batches)):
                steps.setdefault(index, step)
        return steps

    def has_many_orders(self, epochs: list[list[Batches]]) -> bool:
        """Whether so much is shuffled that two epochs with one order are no chance."""
        contents = [sorted(sorted(batch) for batches in ranks for batch in batches) for ranks in epochs]
        return (len(contents[0]) if _all_alike(contents) else len(self.once)) >= MANY_ORDERS

    @property
    def secondary(self) -> frozenset[int]:
        """The indices beyond ``exactly_once`` that this trial yields in any epoch."""
        if self._secondary is None:
            batches = [batch for _, ranks in self.recorded() for each in ranks for batch in each]
            self._secondary = frozenset(index for batch in batches for index in batch if index not in self.once)
        return self._secondary

    @property
    def has_orders(self) -> bool:
        """Whether there is something to shuffle, and the sampler does."""
        recorded = [ranks for _, ranks in self.recorded()]
        several = len(self.once) > 1 and all(sum(map(len, ranks)) > 1 for ranks in recorded)
        return bool(recorded) and several and not self.unshuffled

    @property
    def unshuffled(self) -> bool:
        """Whether the shape says so, or all epochs are alike and every rank goes through the given order."""
        if self._unshuffled is None:
            recorded = [ranks for _, ranks in self.recorded()]
            alike = bool(recorded) and _all_alike(recorded)
            places = [[self.once[i] for i in self.primary(batches)] for batches in recorded[0]] if alike else []
            plain = any(places) and all(each == sorted(each) for each in places)
            self._unshuffled = self.shape.get("shuffle") is False or plain
        return self._unshuffled

    @property
    def offers(self) -> _Offers:
        if self._offers is None:
            self._offers = _Offers.of(self.make(0))
        return self._offers


@dataclass(frozen=True)
class _Offers:
    """What a sampler has beyond ``__iter__``."""

    length: bool
    set_epoch: bool
    inner_set_epoch: bool
    state: bool
    state_after_batches: bool

    @classmethod
    def of(cls, sampler: Any) -> _Offers:
        state = bool(_method(sampler, "state_dict") and _method(sampler, "load_state_dict"))
        return cls(
            length=hasattr(type(sampler), "__len__"),
            set_epoch=bool(_set_epoch(sampler)),
            inner_set_epoch=bool(_method(getattr(sampler, "sampler", None), "set_epoch")),
            state=state,
            state_after_batches=state and "batches" in _parameters(sampler.state_dict),
        )

    def missing(self) -> Iterator[str]:
        if not self.length:
            yield "no len(): rule 3 is not judged, and trainers cannot plan their steps"
        if not self.set_epoch:
            yield "no set_epoch, neither its own nor its sampler's: rule 6 is not judged, nor rule 5 between epochs"
        if not self.state:
            yield "no state_dict and load_state_dict: rules 7 and 9 are not judged, and no run resumes within an epoch"
        elif not self.state_after_batches:
            yield "no state_dict(batches=n), the state after n delivered batches: rule 8 is judged by pickling alone"


# -------------------------------------------------------------------------------------------------------- helpers


@dataclass(frozen=True)
class _Finding:
    text: str
    at: Counterexample
    means: str = ""
    """For a training run; default: what the rule says."""


Checks = Iterator[_Finding | None]


class _Fault(Exception):
    """The sampler raised, or yielded what is no batch."""


class _Refusal(_Fault):
    """A ValueError before the first batch."""


class _Unpicklable(_Fault):
    pass


def _call(what: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        return function(*args, **keywords)
    except Exception as error:
        raise (_Refusal if isinstance(error, ValueError) else _Fault)(_told(f"{what} raised", error)) from error


def _told(what: str, error: Exception) -> str:
    return f"{what} {type(error).__name__}: {error}".rstrip(": .")


def _pickled(value: Any) -> Any:
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise _Unpicklable(_told(f"pickling the {type(value).__name__} raised", error)) from error


def _as_indices(batch: Any, number: int) -> list[int]:
    try:
        items = list(islice(batch, MANY_INDICES + 1))
    except TypeError:
        raise _Fault(f"batch {number} is {batch!r}, no list: is this a sampler, and no batch sampler?") from None
    if not items:
        raise _Fault(f"batch {number} is empty")
    if len(items) > MANY_INDICES:
        raise _Fault(f"batch {number} has no end: more than {MANY_INDICES:,} indices")
    if all(type(item) is int for item in items):
        return items
    for item in items:
        try:
            operator.index(item)
        except TypeError:
            raise _Fault(f"batch {number} holds {item!r}, which is no integer") from None
    return [operator.index(item) for item in items]


def _method(owner: Any, name: str) -> Any:
    method = getattr(owner, name, None)
    return method if callable(method) else None


def _set_epoch(sampler: Any) -> Any:
    """The sampler's own ``set_epoch``, or that of the sampler inside it."""
    return _method(sampler, "set_epoch") or _method(getattr(sampler, "sampler", None), "set_epoch")


def _parameters(function: Callable[..., Any]) -> set[str]:
    """The arguments that can be given by name, as far as Python can tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _difference(at: Counterexample, got: Batches, expected: Batches, text: str) -> _Finding | None:
    for step, (one, other) in enumerate(zip_longest(got, expected)):
        if one != other:
            is_, was = ("the end" if batch is None else _short(batch) for batch in (one, other))
            place = replace(at, step=step, indices=tuple(one or other or ()))
            return _Finding(f"{text}: batch {step} is {is_}, it should be {was}", place)
    return None


def _uneven_counts(counts: list[int], at: Counterexample) -> _Finding | None:
    if len(set(counts)) == 1:
        return None
    told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    return _Finding(f"the ranks have different numbers of batches ({told})", replace(at, step=min(counts)))


def _all_alike(items: Iterable[Any]) -> bool:
    iterator = iter(items)
    first = next(iterator, None)
    return all(item == first for item in iterator)


def _repeated(indices: list[int]) -> list[int]:
    return [index for index, count in Counter(indices).items() if count > 1] if len({*indices}) < len(indices) else []


def _short(indices: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, indices[:most]))
    return f"[{shown}{', …' if len(indices) > most else ''}]"


def _listed(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"index {indices[0]}"
    return f"{len(indices)} indices {_short(indices)}"


def _is(indices: Sequence[int]) -> str:
    return "is" if len(indices) == 1 else "are"


def _rules(numbers: Sequence[int]) -> str:
    return ("rule " if len(numbers) == 1 else "rules ") + ", ".join(map(str, numbers))


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def _seed_globals(salt: int, epoch: int) -> None:
    """Put the global generators where they would be on every rank of a seeded run; ``salt``: in another run."""
    seed = 100_003 * salt + epoch + 1
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def _generators_put_back() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])
