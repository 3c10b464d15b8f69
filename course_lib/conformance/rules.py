"""The rules, one function for each, numbered as in :data:`~course_lib.conformance.violations.RULES`.

A rule reads the record of a world, and yields the single checks that it makes, the smallest cases first: None where
one holds. A sampler that goes wrong on the way raises its breach. The rules about resumes are in ``resuming.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations, pairwise, zip_longest

from course_lib._words import counted
from course_lib.conformance.resuming import other_workers, other_world_size, resumes
from course_lib.conformance.tried import Breach, Checks, difference, inner_epoch_setter, sizes_of
from course_lib.conformance.violations import Counterexample, listed, shortened
from course_lib.conformance.world import Deal, World

MANY_ORDERS = 10
"""So many indices (or batches, where whole batches are shuffled) have 3,628,800 orders: equal ones are no chance."""
MANY_EPOCHS = 20
"""A sampler of few indices repeats an order if so many epochs are equal."""
INNER = "batch_sampler.sampler.set_epoch, the only one that Lightning calls (and accelerate on several ranks),"


def covers_exactly_once(world: World) -> Checks:
    """Rule 1: in an epoch, each primary index comes exactly once over all ranks."""
    for deal in map(world.deal, world.asked.epochs):
        if deal.fault:
            yield deal.fault
        elif deal.ranks:
            yield world.not_exactly_once(deal.ranks, deal.at)


def equal_counts(world: World) -> Checks:
    """Rule 2: every rank has the same number of batches."""
    for deal in map(world.deal, world.asked.epochs):
        yield deal.some_refuse() or deal.uneven_counts()


def true_length(world: World) -> Checks:
    """Rule 3: ``len()`` is the number of batches that follow, before and after a resume."""
    for deal in world.deals:
        if "length" not in world.offers:
            return
        for at, batches in deal.by_rank():
            told = world.fresh(at).length()
            text = f"len() is {told}, {counted(len(batches), 'batch', 'batches')} are yielded"
            yield Breach(text, at) if told != len(batches) else None
        for at, _ in deal.stops() if "state" in world.offers else ():
            try:
                resumed = world.resumed(at, world.state(at))
                told, yielded = resumed.length(), len(resumed.read())
            except Breach:
                continue  # rule 7 finds it
            text = f"len() is {told} after the resume, {counted(yielded, 'batch', 'batches')} are yielded"
            yield Breach(text, at) if told != yielded else None


def one_order(world: World) -> Checks:
    """Rule 4: the order is a function of the seed and the epoch, and of nothing else."""
    for deal in world.deals:
        for at, batches in deal.by_rank():
            yield difference(at, world.fresh(at).read(), batches, "two new samplers do not agree")
            text = "the order depends on the global generators (random, NumPy's or torch's)"
            yield difference(at, world.fresh(at, run=1).read(), batches, text)
            for text, got in world.read_again(at):
                # Batches of other sizes, or fewer of them, mean that the position is shared: rule 11 finds it.
                if sizes_of(got) == sizes_of(batches):
                    yield difference(at, got, batches, f"the order depends on the use before: {text}")
        for fewer in world.on_all_world_sizes():
            other = fewer.deal(deal.epoch)
            if fewer.num_replicas < world.num_replicas and other.ranks:
                yield _other_order(world, deal, other)
    if not world.shape.get("shuffle", True):
        for deal in world.deals[1:]:
            text = f"shuffle=False, and epoch {deal.epoch} has another order than epoch 0"
            yield Breach(text, deal.at) if deal.ranks != world.deals[0].ranks else None


def _other_order(world: World, deal: Deal, fewer: Deal) -> Breach | None:
    """Where this world size does not deal out the order that a smaller one does, in whatever way it deals.

    If each step takes the next indices of one order, in contiguous parts or in strides, then no index comes before
    another on one world size and after it on another, counted in steps. (Both may come in the same step on either.) If
    each *rank* takes one contiguous part of the order, then the ranks' parts one after the other are the same sequence
    on both. A sampler is right if one of the two holds; one that seeds its order with the world size or the rank
    violates both. Of an index that comes again, its first use counts.
    """
    if any(all(world.missing_and_repeated(each.ranks)) for each in (deal, fewer)):
        return None  # ranks that lose and repeat indices at once share no order: rule 1 finds it
    here, there = _first_steps(world, deal), _first_steps(world, fewer)
    swapped = two_swapped(here, there)
    parts = [list(dict.fromkeys(chain.from_iterable(map(world.primary, each.ranks)))) for each in (deal, fewer)]
    shared = [[index for index in part if index in here and index in there] for part in parts]
    if not swapped or shared[0] == shared[1]:
        return None
    first, second = swapped
    text = (
        f"the order depends on the number of ranks: index {first} comes before {second} here (steps {here[first]} and "
        f"{here[second]}), and after it on {counted(fewer.at.num_replicas, 'rank')} (steps {there[first]} and "
        f"{there[second]})"
    )
    return Breach(text, replace(deal.at, step=here[first], indices=swapped))


def _first_steps(world: World, deal: Deal) -> dict[int, int]:
    """The step in which each index comes first."""
    steps: dict[int, int] = {}
    for step, batches in enumerate(zip_longest(*deal.ranks, fillvalue=[])):
        for index in world.primary(batches):
            steps.setdefault(index, step)
    return steps


def two_swapped(here: dict[int, int], there: dict[int, int]) -> tuple[int, int] | None:
    """Two indices of which the first comes in an earlier step here and in a later one there.

    Sorted by the steps here and then there, neighbours are enough: if no step there falls, none falls further on.
    """
    shared = sorted(here.keys() & there.keys(), key=lambda index: (here[index], there[index], index))
    return next(((first, second) for first, second in pairwise(shared) if there[first] > there[second]), None)


def new_orders(world: World) -> Checks:
    """Rule 5: another seed or another epoch has another order."""
    if not _shuffles(world):
        return
    by_epoch = "set_epoch" in world.offers
    # Where all epochs have the same batches, whole batches are shuffled.
    contents = [sorted(sorted(batch) for batches in deal.ranks for batch in batches) for deal in world.deals]
    whole_batches = all(each == contents[0] for each in contents)
    many_orders = len(contents[0] if whole_batches else world.once) >= MANY_ORDERS
    some_differ = any(deal.ranks != world.deals[0].ranks for deal in world.deals)  # or else rule 6 finds it
    if by_epoch and many_orders and some_differ:
        for deal, later in combinations(world.deals, 2):
            text = f"epochs {deal.epoch} and {later.epoch} have one order"
            yield Breach(text, later.at) if deal.ranks == later.ranks else None
    if not world.asked.seeds or not (by_epoch or len(world.once) >= MANY_ORDERS):
        return  # without epochs there are only two orders to compare, and few indices may have the same by chance
    ways = [("seeds 0 and 1 give one order: the seed has no effect (torch.Generator goes by its low 32 bits)", 0)]
    if by_epoch:
        ways.append(("(seed 0, epoch 1) has the order of (seed 1, epoch 0), as the sum seed + epoch makes it", 1))
    for text, ahead in ways:
        pairs = ((world.deal(epoch + ahead, seed=0), world.deal(epoch, seed=1)) for epoch in range(MANY_EPOCHS))
        alike = all(deal.ranks == other.ranks and deal.ranks for deal, other in pairs)
        yield Breach(text, world.at(epoch=ahead)) if alike else None


def set_epoch_arrives(world: World) -> Checks:
    """Rule 6: the ``set_epoch`` that trainers call reaches the sampler, and changes the order."""
    if not world.deals or "set_epoch" not in world.offers:
        return
    for deal in world.deals:
        for at, batches in deal.by_rank():
            sampler = world.made(at)
            if not inner_epoch_setter(sampler.sampler):
                yield Breach(f"{INNER} does not exist", world.at())
            got = sampler.turned(deal.epoch, by=inner_epoch_setter).read()
            yield difference(at, got, batches, f"{INNER} is not the sampler's own")
    if _shuffles(world):
        text = f"set_epoch has no effect: epochs 0 to {MANY_EPOCHS - 1} have one order"
        repeats = all(world.deal(epoch).ranks == world.deals[0].ranks for epoch in range(MANY_EPOCHS))
        yield Breach(text, world.at(epoch=1)) if repeats else None


def _shuffles(world: World) -> bool:
    """Whether there is something to shuffle, and the sampler does shuffle."""
    if not world.deals or len(world.once) == 1 or world.unshuffled:
        return False
    return all(max(map(len, deal.ranks)) > 1 for deal in world.deals)


def sound_batches(world: World) -> Checks:
    """Rule 10: no batch is too large or repeats an index needlessly, and the cycled stream is used evenly.

    Its use counts never differ by more than 1 within an epoch.
    """
    for deal in world.deals:
        uses = Counter(dict.fromkeys(world.secondary, 0))
        for step, batches in enumerate(zip_longest(*deal.ranks, fillvalue=[])):
            for rank, batch in enumerate(batches):
                if batch:
                    yield from _sound(world, batch, replace(deal.at, rank=rank, step=step))
            uses.update(index for index in chain.from_iterable(batches) if index not in world.once)
            most, least = max(uses.values(), default=0), min(uses.values(), default=0)
            if most - least > 1:
                often = [index for index, count in uses.items() if count == most]
                seldom = [index for index, count in uses.items() if count == least]
                text = f"of the cycled stream, {listed(often)} had come {most} times, {listed(seldom)} {least} times"
                yield Breach(text, replace(deal.at, step=step, indices=(*often, *seldom)))


def _sound(world: World, batch: list[int], at: Counterexample) -> Checks:
    primary = world.primary([batch])
    # Beside a second stream, the size speaks for sure only of the primary indices.
    held = len(primary) if world.secondary else len(batch)
    text = f"the batch holds {held} indices, more than its batch_size of {world.batch_limit}: {shortened(batch)}"
    too_large = world.batch_limit is not None and held > world.batch_limit
    yield Breach(text, replace(at, indices=tuple(batch))) if too_large else None
    second_stream = [index for index in batch if index not in world.once]
    for indices, available in ((primary, len(world.once)), (second_stream, len(world.secondary))):
        again = [index for index, times in Counter(indices).items() if times > 1]
        text = f"the batch holds {listed(again)} more than once, and {available} could fill {len(indices)} places"
        yield Breach(text, replace(at, indices=tuple(again))) if again and len(indices) <= available else None


def usable_again(world: World) -> Checks:
    """Rule 11: it can be pickled, and iterated again and by two iterators at once."""
    for deal in world.deals:
        for at, batches in deal.by_rank():
            world.fresh(at).copied()
            for text, got in world.read_again(at):
                # If the sizes are right and another order comes, rule 4 finds it.
                same_sizes = sizes_of(got) == sizes_of(batches)
                yield None if same_sizes else difference(at, got, batches, text)


JUDGED_IN_ORDER: dict[int, Callable[[World], Checks]] = {
    1: covers_exactly_once,
    2: equal_counts,
    3: true_length,
    4: one_order,
    5: new_orders,
    6: set_epoch_arrives,
    7: resumes,
    10: sound_batches,
    11: usable_again,
    8: other_workers,
    9: other_world_size,
}
"""Each rule after those that it rests on."""
RESTS_ON = {8: {7, 11}, 9: {1, 4, 7}}
"""So that one fault is one violation, a rule is not judged if one of these is broken or left out."""
