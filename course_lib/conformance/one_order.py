"""Whether all world sizes deal out one order: what a rule about one world size cannot see."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, groupby, zip_longest

from course_lib._words import counted
from course_lib.conformance.breaches import Breach, Checks
from course_lib.conformance.simulated_world import Batches, SimulatedWorld


def same_order_on_fewer_ranks(world: SimulatedWorld, epoch: int, ranks: list[Batches]) -> Checks:
    """Whether this world size deals out the order that each smaller one does, in whatever way it deals.

    If each step takes the next indices of one order, in contiguous parts or in strides, then no index comes before
    another on one world size and after it on another, counted in steps. (Both may come in the same step on either.) If
    each *rank* takes one contiguous part of the order, then the ranks' parts one after the other are the same sequence
    on both. A sampler is right if one of the two holds; one that seeds its order with the world size or the rank
    violates both. Of an index that comes again, its first use counts.
    """
    for fewer in world.on_all_world_sizes():
        others = fewer.record(epoch).ranks
        if fewer.num_replicas >= world.num_replicas or not others:
            continue
        if all(world.missing_and_repeated(ranks)) or all(world.missing_and_repeated(others)):
            continue  # ranks that lose and repeat indices at once share no order: rule 1 finds it
        breach = _step_by_step(world, ranks, fewer, others, epoch)
        yield None if _rank_by_rank(world, ranks, others) else breach


def _step_by_step(
    world: SimulatedWorld, ranks: list[Batches], fewer: SimulatedWorld, others: list[Batches], epoch: int
) -> Breach | None:
    """Where the steps do not take the next indices of the order that fewer ranks have."""
    steps, other_steps = _first_steps(world, ranks), _first_steps(world, others)
    swapped = _swapped(steps, other_steps)
    if not swapped:
        return None
    first, second = swapped
    text = (
        f"the order depends on the number of ranks: index {first} comes before {second} here (steps {steps[first]} and "
        f"{steps[second]}), and after it on {counted(fewer.num_replicas, 'rank')} (steps {other_steps[first]} and "
        f"{other_steps[second]})"
    )
    return Breach(text, replace(world.at(epoch=epoch), step=steps[first], indices=swapped))


def _first_steps(world: SimulatedWorld, ranks: list[Batches]) -> dict[int, int]:
    """The step in which each index comes first."""
    steps: dict[int, int] = {}
    for number, step in enumerate(zip_longest(*ranks, fillvalue=[])):
        for index in world.primary(list(step)):
            steps.setdefault(index, number)
    return steps


def _swapped(steps: dict[int, int], other_steps: dict[int, int]) -> tuple[int, int] | None:
    """Two indices of which the first comes earlier in ``steps`` and later in ``other_steps``."""
    latest = (-1, -1)  # of the indices of all earlier steps: the last step on the other side, and the index
    entries = sorted((steps[index], other_steps[index], index) for index in steps.keys() & other_steps.keys())
    for _, group in groupby(entries, key=lambda entry: entry[0]):
        of_step = [(other, index) for _, other, index in group]
        earliest = of_step[0]
        if earliest[0] < latest[0]:
            return latest[1], earliest[1]
        latest = max(latest, of_step[-1])
    return None


def _rank_by_rank(world: SimulatedWorld, ranks: list[Batches], others: list[Batches]) -> bool:
    """Whether the ranks' parts one after the other are the same sequence."""
    these, those = (list(dict.fromkeys(chain.from_iterable(map(world.primary, each)))) for each in (ranks, others))
    shared = set(these) & set(those)
    return [index for index in these if index in shared] == [index for index in those if index in shared]
