"""The rules, one function for each, numbered as in :data:`~course_lib.conformance.violations.RULES`.

A rule reads a world, and yields the single checks that it makes, the smallest cases first. The rules about resumes are
in ``resuming.py``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, zip_longest

from course_lib._words import counted
from course_lib.conformance.breaches import Breach, Checks, difference, not_exactly_once, sizes_of, uneven_counts
from course_lib.conformance.calls import SamplerFault, SamplerRefusal, call, pickled
from course_lib.conformance.one_order import same_order_on_fewer_ranks
from course_lib.conformance.resuming import other_workers, other_world_size, resumes
from course_lib.conformance.simulated_world import MANY_EPOCHS, MANY_ORDERS, SimulatedWorld, all_equal
from course_lib.conformance.violations import Counterexample, listed, shortened

INNER = "batch_sampler.sampler.set_epoch, the only one that Lightning calls (and accelerate on several ranks),"


def covers_exactly_once(world: SimulatedWorld) -> Checks:
    """Rule 1: in an epoch, each primary index comes exactly once over all ranks."""
    for epoch in world.examination.epochs:
        record = world.record(epoch)
        at = world.at(epoch=epoch)
        if record.fault:
            means = "the run ends there, or trains on nothing"
            yield Breach(record.fault, replace(at, rank=record.faulty_rank), means)
        elif record.ranks:
            yield not_exactly_once(world, record.ranks, at)


def equal_counts(world: SimulatedWorld) -> Checks:
    """Rule 2: every rank has the same number of batches."""
    for epoch in world.examination.epochs:
        record = world.record(epoch)
        at = world.at(epoch=epoch)
        if record.refused and len(record.refused) < world.num_replicas:
            rank, why = next(iter(record.refused.items()))
            yield Breach(f"only some ranks refuse, rank {rank} with ValueError: {why}", replace(at, rank=rank))
        yield uneven_counts(record.ranks, at)


def true_length(world: SimulatedWorld) -> Checks:
    """Rule 3: ``len()`` is the number of batches that follow, before and after a resume."""
    for epoch, ranks in world.recorded():
        if not world.offers.length:
            return
        for rank, batches in enumerate(ranks):
            at = world.at(epoch=epoch, rank=rank)
            told = world.length(world.make(rank, epoch))
            text = f"len() is {told}, {counted(len(batches), 'batch', 'batches')} are yielded"
            yield Breach(text, at) if told != len(batches) else None
        for stop, rank in world.stops(ranks):
            world.at(epoch=epoch, rank=rank)
            try:
                loaded = world.resumed(rank, world.state(rank, epoch, stop))
                told, yielded = world.length(loaded), len(world.read(loaded, epoch))
            except SamplerFault:
                continue  # rule 7 finds it
            text = f"len() is {told} after the resume, {counted(yielded, 'batch', 'batches')} are yielded"
            yield Breach(text, world.at(epoch=epoch, stop=stop, rank=rank)) if told != yielded else None


def one_order(world: SimulatedWorld) -> Checks:
    """Rule 4: the order is a function of the seed and the epoch, and of nothing else."""
    for epoch, ranks in world.recorded():
        for rank, batches in enumerate(ranks):
            at = world.at(epoch=epoch, rank=rank)
            again = world.read(world.make(rank, epoch), epoch)
            yield difference(at, again, batches, "two new samplers do not agree")
            reseeded = world.read(world.make(rank, epoch, salt=1), epoch, salt=1)
            text = "the order depends on the global generators (random, NumPy's or torch's)"
            yield difference(at, reseeded, batches, text)
            for text, got in world.read_more_than_once(rank, epoch):
                # Batches of other sizes, or fewer of them, mean that the position is shared: rule 11 finds it.
                if sizes_of(got) == sizes_of(batches):
                    yield difference(at, got, batches, f"the order depends on the use before: {text}")
        yield from same_order_on_fewer_ranks(world, epoch, ranks)
    if not world.shape.get("shuffle", True):
        for epoch, ranks in world.recorded()[1:]:
            text = f"shuffle=False, and epoch {epoch} has another order than epoch 0"
            yield Breach(text, world.at(epoch=epoch)) if ranks != world.record(0).ranks else None


def new_orders(world: SimulatedWorld) -> Checks:
    """Rule 5: another seed or another epoch has another order."""
    recorded = dict(world.recorded())
    if not world.has_orders:
        return
    epochs = list(recorded.values())
    if world.offers.set_epoch and not all_equal(epochs) and world.has_many_orders(epochs):
        for (e0, ranks), (e1, others) in combinations(recorded.items(), 2):
            yield Breach(f"epochs {e0} and {e1} have one order", world.at(epoch=e1)) if ranks == others else None
    if not world.examination.seeds or not (world.offers.set_epoch or len(world.once) >= MANY_ORDERS):
        return  # without epochs there are only two orders to compare, and few indices may have the same by chance
    ways = [("seeds 0 and 1 give one order: the seed has no effect (torch.Generator goes by its low 32 bits)", 0)]
    if world.offers.set_epoch:
        ways.append(("(seed 0, epoch 1) has the order of (seed 1, epoch 0), as the sum seed + epoch makes it", 1))
    for text, later in ways:
        at = world.at(epoch=later)
        with contextlib.suppress(SamplerRefusal):
            pairs = ((world.read_all(e + later, seed=0), world.read_all(e, seed=1)) for e in range(MANY_EPOCHS))
            yield Breach(text, at) if all(zeros == ones for zeros, ones in pairs) else None


def set_epoch_arrives(world: SimulatedWorld) -> Checks:
    """Rule 6: the ``set_epoch`` that trainers call reaches the sampler, and changes the order."""
    if not world.recorded() or not world.offers.set_epoch:
        return
    for epoch, ranks in world.recorded():
        for rank, batches in enumerate(ranks):
            at = world.at(epoch=epoch, rank=rank)
            sampler = world.make(rank)
            if not world.offers.inner_set_epoch:
                yield Breach(f"{INNER} does not exist", world.at())
                return
            call("batch_sampler.sampler.set_epoch", sampler.sampler.set_epoch, epoch)
            yield difference(at, world.read(sampler, epoch), batches, f"{INNER} is not the sampler's own")
    if not world.has_orders:
        return
    text = f"set_epoch has no effect: epochs 0 to {MANY_EPOCHS - 1} have one order"
    yield Breach(text, world.at(epoch=1)) if world.repeats_one_order else None


def sound_batches(world: SimulatedWorld) -> Checks:
    """Rule 10: no batch is too large or repeats an index needlessly, and the cycled stream is used evenly.

    Its use counts never differ by more than 1 within an epoch.
    """
    for at, batch in _batches(world):
        second_stream = [index for index in batch if index not in world.once]
        yield _too_large(world, batch, at)
        yield _repeated_in_batch(world.primary([batch]), len(world.once), at)
        yield _repeated_in_batch(second_stream, len(world.secondary), at)
    for epoch, ranks in world.recorded():
        uses = Counter(dict.fromkeys(world.secondary, 0))
        for step, batches in enumerate(zip_longest(*ranks, fillvalue=[])):
            uses.update(index for index in chain.from_iterable(batches) if index not in world.once)
            most, least = max(uses.values(), default=0), min(uses.values(), default=0)
            if most - least > 1:
                often = [index for index, count in uses.items() if count == most]
                seldom = [index for index, count in uses.items() if count == least]
                text = f"of the cycled stream, {listed(often)} had come {most} times, {listed(seldom)} {least} times"
                yield Breach(text, replace(world.at(epoch=epoch, step=step), indices=(*often, *seldom)))


def _batches(world: SimulatedWorld) -> Iterator[tuple[Counterexample, list[int]]]:
    """Every batch of the epochs, with its place."""
    for epoch, ranks in world.recorded():
        place = world.at(epoch=epoch)
        for step, batches in enumerate(zip_longest(*ranks)):
            for rank, batch in enumerate(batches):
                if batch is not None:
                    yield replace(place, rank=rank, step=step), batch


def _too_large(world: SimulatedWorld, batch: list[int], at: Counterexample) -> Breach | None:
    held = world.counted_in_size(batch)
    if world.batch_limit is None or held <= world.batch_limit:
        return None
    text = f"the batch holds {held} indices, more than its batch_size of {world.batch_limit}: {shortened(batch)}"
    return Breach(text, replace(at, indices=tuple(batch)), "the batch takes more memory than was planned for")


def _repeated_in_batch(indices: list[int], available: int, at: Counterexample) -> Breach | None:
    if len(set(indices)) == len(indices) or len(indices) > available:
        return None
    repeated = [index for index, count in Counter(indices).items() if count > 1]
    text = f"the batch holds {listed(repeated)} more than once, and {available} could fill {len(indices)} places"
    means = "the batch is smaller than its size says, and some samples weigh double in its gradient"
    return Breach(text, replace(at, indices=tuple(repeated)), means)


def usable_again(world: SimulatedWorld) -> Checks:
    """Rule 11: it can be pickled, and iterated again and by two iterators at once."""
    for epoch, ranks in world.recorded():
        for rank, batches in enumerate(ranks):
            at = world.at(epoch=epoch, rank=rank)
            pickled(world.make(rank, epoch))
            for text, got in world.read_more_than_once(rank, epoch):
                if sizes_of(got) == sizes_of(batches):
                    yield None  # if another order comes, rule 4 finds it
                else:
                    yield difference(at, got, batches, text)


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
    sound_batches,
    usable_again,
)
"""The rule at place 0 is number 1."""
