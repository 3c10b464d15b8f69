"""What stays wrong where repeating or dropping is by design: empty epochs, and ranks that are dealt the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, combinations

from course_lib._words import counted
from course_lib.conformance.breaches import Breach
from course_lib.conformance.one_order import is_explained
from course_lib.conformance.simulated_world import MANY_ORDERS, Batches, SimulatedWorld, all_equal
from course_lib.conformance.violations import Counterexample, listed


def not_empty(world: SimulatedWorld, ranks: list[Batches], at: Counterexample) -> Breach | None:
    """An epoch without a batch is by design only where the indices do not fill one step, and are dropped."""
    if any(map(len, ranks)):
        return None
    if world.examination.drops and len(world.once) < world.full_step:
        world.examination.note("drops all indices, as they fill no step", str(at))
        return None
    text = f"no rank has a batch, and the epoch has {counted(len(world.once), 'index', 'indices')}"
    return Breach(text, at, "the epoch trains on nothing, and no error says so")


def different_ranks(world: SimulatedWorld) -> Breach | None:
    """Whether two ranks have the same batches in all epochs, where repeating is by design.

    Repeated augmentation does that, too: its one order has each index several times in a row.
    """
    epochs = [ranks for _, ranks in world.recorded() if any(ranks)]
    if all(len(batches) <= 1 for ranks in epochs for batches in ranks):
        return None  # a single step may be padded with itself
    contents = [[sorted(batch) for ranks in epochs for batch in ranks[rank]] for rank in range(world.num_replicas)]
    for rank, other in combinations(range(world.num_replicas), 2):
        if contents[rank] != contents[other] or _may_be_alike(contents, rank) or _repeats_in_a_row(world):
            continue
        batch = tuple(epochs[0][other][0])
        text = f"ranks {rank} and {other} are dealt the same batches, in step 0 {listed(batch)}"
        means = f"the gradients of {counted(world.num_replicas, 'rank')} are those of fewer ranks"
        return Breach(text, replace(world.at(), rank=other, step=0, indices=batch), means)
    return None


def _may_be_alike(contents: list[Batches], rank: int) -> bool:
    """Whether a rank has what another has by chance, or because short batches were cut for more ranks than indices."""
    indices = list(chain.from_iterable(contents[rank]))
    by_chance = len(indices) < MANY_ORDERS or len(set(indices)) < 4
    cut_for_too_many = len(indices) == len(contents[rank]) and not all_equal(contents)  # one index in each batch
    return by_chance or cut_for_too_many


def _repeats_in_a_row(world: SimulatedWorld) -> bool:
    return any(
        all(is_explained(world, ranks, fewer, fewer.record(epoch).ranks) for epoch, ranks in world.recorded())
        for fewer in world.with_fewer_ranks
    )


def dealt_once(world: SimulatedWorld, ranks: list[Batches], at: Counterexample) -> Breach | None:
    """Whether the ranks together have only that share of an epoch that each of them should have alone."""
    if not world.examination.drops:
        return None
    size = world.size_of_epoch(ranks)
    for fewer in world.with_fewer_ranks:
        others = fewer.record(at.epoch or 0).ranks
        whole = fewer.size_of_epoch(others)
        dealt_twice = (whole + world.num_replicas) * fewer.num_replicas // world.num_replicas
        if others and whole - size >= world.full_step and size <= dealt_twice:
            text = (
                f"the ranks have {counted(size, 'index', 'indices')} together, and on "
                f"{counted(fewer.num_replicas, 'rank')} there are {whole}: the epoch seems to be dealt twice"
            )
            return Breach(text, at, "most samples of the epoch are left out, and no error says so")
    return None


def same_uses(
    world: SimulatedWorld, other: SimulatedWorld, epoch: int, had: list[Batches], at: Counterexample
) -> Breach | None:
    """Whether an epoch that went on with another number of ranks used what a whole one uses, but for less than a step.

    Args:
        world, other: Before and after the resume.
        epoch: Of both.
        had: What the ranks had before the stop, and after it.
        at: The place to report.
    """
    uses = _uses(world, had)
    before, after = _uses(world, world.record(epoch).ranks), _uses(world, other.record(epoch).ranks)
    less_than = max(world.full_step, other.full_step)
    lost, again = (before & after) - uses, uses - (before | after)
    if lost.total() >= less_than:
        return Breach(f"{_listed(lost)} of the whole epoch never came", at)
    if again.total() >= less_than:
        return Breach(f"{_listed(again)} came more often than in a whole epoch", at)
    return None


def _uses(world: SimulatedWorld, ranks: list[Batches]) -> Counter[int]:
    return Counter(chain.from_iterable(map(world.primary, ranks)))


def _listed(uses: Counter[int]) -> str:
    return listed(sorted(uses))
