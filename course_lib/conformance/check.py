"""The two ways in: get a report, or have a test fail with it. Every rule is judged over every world."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

from course_lib._arguments import int_of_at_least
from course_lib._generators import generators_put_back
from course_lib.conformance.asked import (
    by_position,
    checked_factory,
    checked_rules,
    checked_shapes,
    checked_world_sizes,
    ordered_indices,
)
from course_lib.conformance.rules import JUDGED_IN_ORDER, RESTS_ON
from course_lib.conformance.tried import NOT_OFFERED, Breach, named_arguments
from course_lib.conformance.violations import RULES, ConformanceReport, Shape, Violation, listed, named_rules
from course_lib.conformance.world import Asked, World


def check_batch_sampler(
    factory: Callable[..., Any],
    exactly_once: Collection[int] | Callable[[Shape], Collection[int]],
    *,
    world_sizes: Iterable[int] = (1, 2, 3, 5, 8),
    epochs: int = 3,
    shapes: Iterable[Shape] | None = None,
    skip_rules: Iterable[int] = (),
) -> ConformanceReport:
    """Judge a batch sampler by playing all ranks in this process.

    >>> from functools import partial
    >>> from course_lib.samplers import ShuffledBatchSampler
    >>> padded = partial(ShuffledBatchSampler, 11, 2, tail="pad")
    >>> print(check_batch_sampler(padded, range(11), world_sizes=(1, 2)).violations[0].counterexample)
    1 rank, epoch 0
    >>> check_batch_sampler(padded, range(11), world_sizes=(1, 2), skip_rules={1}).ok
    True

    Args:
        factory: ``factory(num_replicas, rank, **shape)`` makes one rank's batch sampler, for every shape. If it takes
            a keyword ``seed``, other seeds are judged too. ``partial(ShuffledBatchSampler, 100, 8)`` is one.
        exactly_once: The indices that an epoch must cover, or a function that tells them from the shape (a dict).
            Other indices are taken for a second stream, which is cycled; the two must not overlap. A list or range
            also gives the order in which a sampler that does not shuffle yields them; for a set it is the ascending
            order.
        world_sizes: Numbers of ranks.
        epochs: How many to read, at least 2.
        shapes: Keywords of the factory. A few small ones, some of them uneven, find what large ones would find. A
            sampler that groups by length needs one that is larger than a group.
        skip_rules: Numbers of ``RULES`` that are not judged, and what rests on them neither: {1} for a sampler that
            pads or drops, {1, 10} for one that draws with replacement. The report says which were left out.

    A batch is too large if it has more indices than ``batch_size`` of the shape, or else of the sampler; beside a
    second stream, its primary indices are counted.

    A sampler or factory that raises a ``ValueError`` before the first batch, on all ranks, refuses that shape or world
    size: this is a note, not a violation. Any other exception, a batch that is empty or holds no integers, one that is
    written over while the epoch goes on, and an epoch without an end (more than 100 batches and 10 for each index of
    ``exactly_once``) are violations. Whether the sampler should shuffle is what ``shuffle`` of the shape says. Where
    it says nothing, the kit takes it for plain if all epochs are equal and in the order of ``exactly_once``. Of a
    plain one, rules 5 and 6 do not ask for another order.

    So that one fault is one violation, a rule is not judged, and that is noted, if one that it rests on is broken or
    left out: 8 rests on 7 and 11, and 9 on 1, 4 and 7. The fourth rule is strict: an order that changes when a sampler
    is iterated twice, with no set_epoch in between, is no function of (seed, epoch). Every epoch is read hundreds of
    times: keep shapes small.

    Raises:
        ValueError: An argument is out of its range, or there is nothing to judge: every shape was refused on every
            world size, or no epoch has a batch.
    """
    parameters = named_arguments(checked_factory(factory))
    sizes, given = checked_world_sizes(world_sizes), checked_shapes(shapes)
    if not sizes or not given:
        raise ValueError(f"there is nothing to judge: {len(sizes)} world sizes, {len(given)} shapes")
    asked = Asked(
        by_position(factory, parameters),
        seeds="seed" in parameters or all("seed" in shape for shape in given),
        epochs=range(int_of_at_least(2, "epochs", epochs)),
        skipped=checked_rules(skip_rules),
    )
    once = exactly_once if callable(exactly_once) else None
    smallest_first = [(shape, ordered_indices(once(shape) if once else exactly_once, shape)) for shape in given]
    smallest_first.sort(key=lambda entry: len(entry[1]))
    asked.worlds += [World(asked, *entry, size) for size in sizes for entry in smallest_first]
    with generators_put_back(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        passed = {number: _judge(asked, number) for number in JUDGED_IN_ORDER}
        for warning in warned:
            asked.note("the sampler warned", str(warning.message))
        return _report(asked, {number: passed[number] for number in RULES})


def assert_batch_sampler(
    factory: Callable[..., Any], exactly_once: Collection[int] | Callable[[Shape], Collection[int]], **options: Any
) -> None:
    """Raise an ``AssertionError`` with the report if a rule is broken; arguments as in :func:`check_batch_sampler`."""
    __tracebackhide__ = True  # pytest shows the caller's line
    report = check_batch_sampler(factory, exactly_once, **options)
    if not report.ok:
        raise AssertionError(str(report))


def _judge(asked: Asked, number: int) -> int:
    """Ask a rule of the worlds, up to its first breach, and return how many checks it passed."""
    passed = 0
    if number in asked.skipped:
        return passed
    unsound = sorted(asked.unsound & RESTS_ON.get(number, set()))
    if unsound:
        asked.note(f"rule {number} was not judged", f"it rests on {named_rules(unsound)}")
        return passed
    try:
        for world in asked.worlds:
            for breach in JUDGED_IN_ORDER[number](world):
                if breach:
                    raise breach
                passed += 1
    except Breach as breach:
        name, meaning = RULES[number]
        message = f"Rule {number}, {name}: {breach.at}: {breach}.\n  In a training run: {meaning}."
        asked.broken[number] = Violation(number, name, message, breach.at)
    return passed


def _report(asked: Asked, checks: dict[int, int]) -> ConformanceReport:
    judged = [world for world in asked.worlds if world.deals]
    if not judged and not asked.broken:
        raise ValueError(f"nothing was judged, all was refused: {asked.notes['refused'][0]}")
    if not asked.broken and not any(batches for world in judged for deal in world.deals for batches in deal.ranks):
        raise ValueError("nothing was judged, no epoch has a batch: let a shape fill a step of all ranks")
    missing = [NOT_OFFERED[name] for world in judged for name in NOT_OFFERED if name not in world.offers]
    if any(world.batch_limit is None for world in judged):
        missing.append("no batch_size, of the shape or of the sampler: whether batches are too large is not judged")
    if not asked.seeds:
        missing.append("no keyword seed of the factory: rule 5 is not judged between seeds")
    for world in judged:
        if world.secondary:
            text = "indices outside exactly_once were taken for a second stream, which is cycled"
            asked.note(text, listed(sorted(world.secondary)))
        first = next(other for other in judged if other.shape is world.shape)
        if world is first and world.unshuffled and len(world.once) > 3:
            asked.note("does not shuffle, so rules 5 and 6 asked for no other order", str(world.at()))
    notes = []
    for kind, details in asked.notes.items():
        more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        notes.append(f"{kind}: {details[0]}{more}")
    violations = tuple(asked.broken[number] for number in sorted(asked.broken))
    skipped = tuple(sorted(asked.skipped))
    return ConformanceReport(violations, tuple(dict.fromkeys(missing)), tuple(notes), checks, skipped)
