"""Whether all world sizes deal out one order: what a rule about one world size cannot see."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, groupby, zip_longest

from course_lib._words import counted
from course_lib.conformance.breaches import Breach, Checks
from course_lib.conformance.simulated_world import Batches, SimulatedWorld

Use = tuple[int, int]
"""An index, and its how-manieth use in the epoch, from 1."""


def same_order_on_fewer_ranks(world: SimulatedWorld, epoch: int, ranks: list[Batches]) -> Checks:
    """Whether this world size deals out the order that each smaller one does, in whatever way it deals.

    If each step takes the next indices of one order, in contiguous parts or in strides, then no use of an index comes
    before another on one world size and after it on another, counted in steps. (Both may come in the same step on
    either.) If each *rank* takes one contiguous part of the order, then the ranks' parts one after the other are the
    same sequence on both. A sampler is right if one of the two holds; one that seeds its order with the world size or
    the rank violates both. What is padded or dropped has no use on the other side that it could be compared with.
    """
    by_design = world.examination.repeats and world.examination.drops
    for fewer in world.with_fewer_ranks:
        others = fewer.record(epoch).ranks
        if not others:
            continue
        if not by_design and (all(world.missing_and_repeated(ranks)) or all(world.missing_and_repeated(others))):
            continue  # ranks that lose and repeat indices at once share no order: rule 1 finds it
        breach = _step_by_step(world, ranks, fewer, others, epoch)
        yield None if _rank_by_rank(world, ranks, fewer, others) else breach


def _step_by_step(
    world: SimulatedWorld, ranks: list[Batches], fewer: SimulatedWorld, others: list[Batches], epoch: int
) -> Breach | None:
    """Where the steps do not take the next indices of the order that fewer ranks have."""
    at = world.at(epoch=epoch)
    first_uses = any(_is_padded_with_itself(step) for step in chain(_steps(world, ranks), _steps(fewer, others)))
    steps = _steps_of_uses(world, ranks, first_uses)
    other_steps = _steps_of_uses(fewer, others, first_uses)
    ranks_of_others = counted(fewer.num_replicas, "rank")
    swapped = _swapped(steps, other_steps)
    if swapped:
        first, second = swapped
        text = (
            f"the order depends on the number of ranks: index {first[0]} comes before {second[0]} here (steps "
            f"{steps[first]} and {steps[second]}), and after it on {ranks_of_others} (steps "
            f"{other_steps[first]} and {other_steps[second]})"
        )
        return Breach(text, replace(at, step=steps[first], indices=(first[0], second[0])))
    early = _repeated_too_early(world, ranks, steps, other_steps)
    if early:
        index, use = early
        text = (
            f"the ranks do not share one order: by step {steps[early]} they have had index {index} {use} times, and "
            f"{ranks_of_others} {'has' if fewer.num_replicas == 1 else 'have'} it {use - 1} times in the whole epoch"
        )
        means = "the ranks train on the same samples in one step, and on fewer different ones than their number says"
        return Breach(text, replace(at, step=steps[early], indices=(index,)), means)
    return None


def _steps(world: SimulatedWorld, ranks: list[Batches]) -> list[list[list[int]]]:
    """Of each step, the primary indices of every rank's batch."""
    return [[world.primary([batch]) for batch in step] for step in zip_longest(*ranks, fillvalue=[])]


def _is_padded_with_itself(step: list[list[int]]) -> bool:
    """Whether the ranks have an index each, and not enough different ones: a short batch was cut for too many ranks.

    Such a step repeats its indices in the midst of the order, so that later uses can no longer be told apart.
    """
    indices = list(chain.from_iterable(step))
    return len(step) > 1 and max(map(len, step)) == 1 and len(set(indices)) < len(indices)


def _steps_of_uses(world: SimulatedWorld, ranks: list[Batches], first_uses: bool) -> dict[Use, int]:
    """For each use of an index, the step in which it comes."""
    had: Counter[int] = Counter()
    steps: dict[Use, int] = {}
    for number, step in enumerate(_steps(world, ranks)):
        for index in chain.from_iterable(step):
            had[index] += 1
            if had[index] == 1 or not first_uses:
                steps[index, had[index]] = number
    return steps


def _swapped(steps: dict[Use, int], other_steps: dict[Use, int]) -> tuple[Use, Use] | None:
    """Two uses of which the first comes earlier in ``steps`` and later in ``other_steps``."""
    latest = (-1, (-1, 0))  # of the uses of all earlier steps: the last step on the other side, and the use
    entries = sorted((steps[use], other_steps[use], use) for use in steps.keys() & other_steps.keys())
    for _, group in groupby(entries, key=lambda entry: entry[0]):
        of_step = [(other, use) for _, other, use in group]
        earliest = of_step[0]
        if earliest[0] < latest[0]:
            return latest[1], earliest[1]
        latest = max(latest, of_step[-1])
    return None


def _repeated_too_early(
    world: SimulatedWorld, ranks: list[Batches], steps: dict[Use, int], other_steps: dict[Use, int]
) -> Use | None:
    """A use that fewer ranks do not have in their whole epoch, though these have not had as many indices yet.

    An order that goes on where the fewer ranks' epoch ends has new uses after that end; padding has them in the last
    step. Ranks that are dealt the same have them from the first step on.
    """
    ends = []  # of each step: how many indices all ranks have had then
    had = 0
    for step in _steps(world, ranks):
        had += sum(map(len, step))
        ends.append(had)
    new = (use for use, step in steps.items() if use[1] > 1 and use not in other_steps and step < len(ends) - 1)
    return next((use for use in new if ends[steps[use]] <= len(other_steps)), None)


def is_explained(world: SimulatedWorld, ranks: list[Batches], fewer: SimulatedWorld, others: list[Batches]) -> bool:
    """Whether both have had exactly the same indices, each as often, whenever they have had as many."""
    had, other_had = _had_by_size(world, ranks), _had_by_size(fewer, others)
    both = had.keys() & other_had.keys()
    return bool(both) and all(had[size] == other_had[size] for size in both)


def _had_by_size(world: SimulatedWorld, ranks: list[Batches]) -> dict[int, Counter[int]]:
    """After each step but the last, which may be padded: how many indices all ranks have had, and which."""
    had: Counter[int] = Counter()
    after = {}
    for step in _steps(world, ranks)[:-1]:
        had.update(chain.from_iterable(step))
        after[had.total()] = had.copy()
    return after


def _rank_by_rank(world: SimulatedWorld, ranks: list[Batches], fewer: SimulatedWorld, others: list[Batches]) -> bool:
    """Whether the ranks' parts one after the other are the same sequence, but for less than a step of padding."""
    uses, other_uses = _uses_one_after_the_other(world, ranks), _uses_one_after_the_other(fewer, others)
    in_others, in_these = set(other_uses), set(uses)
    shared = [use for use in uses if use in in_others]
    extra = len(uses) - len(shared)
    return extra < world.full_step and shared == [use for use in other_uses if use in in_these]


def _uses_one_after_the_other(world: SimulatedWorld, ranks: list[Batches]) -> list[Use]:
    had: Counter[int] = Counter()
    uses = []
    for index in chain.from_iterable(map(world.primary, ranks)):
        had[index] += 1
        uses.append((index, had[index]))
    return uses
