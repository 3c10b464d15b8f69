"""The two ways in: get a report, or have a test fail with it. Every rule is judged over every world."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

from course_lib._arguments import int_of_at_least
from course_lib._generators import generators_put_back
from course_lib.conformance.asked import (
    checked_factory,
    checked_rules,
    checked_shapes,
    checked_world_sizes,
    ordered_indices,
)
from course_lib.conformance.breaches import Breach, Checks
from course_lib.conformance.calls import SamplerFault, named_arguments
from course_lib.conformance.rules import IN_ORDER
from course_lib.conformance.simulated_world import Examination, SimulatedWorld
from course_lib.conformance.violations import RULES, ConformanceReport, Shape, Violation, listed, named_rules


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
    written over while the epoch goes on, and an epoch without an end are violations. Whether the sampler should
    shuffle is what ``shuffle`` of the shape says. Where it says nothing, the kit takes it for plain if all epochs are
    equal and in the order of ``exactly_once``. Of a plain one, rules 5 and 6 do not ask for another order.

    So that one fault is one violation, checks that depend on a broken or skipped rule are left out and noted: rule 9
    depends on 1, 4 and 7, and the resumes of rule 8 depend on 7. The fourth rule is strict: an order that changes when
    a sampler is iterated twice, with no set_epoch in between, is no function of (seed, epoch). Every epoch is read
    hundreds of times: keep shapes small.

    Raises:
        ValueError: An argument is out of its range, or there is nothing to judge: every shape was refused on every
            world size, or no epoch has a batch.
    """
    parameters = named_arguments(checked_factory(factory))
    sizes, given = checked_world_sizes(world_sizes), checked_shapes(shapes)
    if not sizes or not given:
        raise ValueError(f"there is nothing to judge: {len(sizes)} world sizes, {len(given)} shapes")
    examination = Examination(
        factory,
        by_name={"num_replicas", "rank"} <= parameters,
        seeds="seed" in parameters or all("seed" in shape for shape in given),
        epochs=range(int_of_at_least(2, "epochs", epochs)),
        skipped=checked_rules(skip_rules),
    )
    once = exactly_once if callable(exactly_once) else None
    smallest_first = [(shape, ordered_indices(once(shape) if once else exactly_once, shape)) for shape in given]
    smallest_first.sort(key=lambda entry: len(entry[1]))
    examination.worlds += [SimulatedWorld(examination, *entry, size) for size in sizes for entry in smallest_first]
    with generators_put_back(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        checks = {number: _judge(examination, number, rule) for number, rule in enumerate(IN_ORDER, start=1)}
        for warning in warned:
            examination.note("the sampler warned", str(warning.message))
        return _report(examination, checks)


def assert_batch_sampler(
    factory: Callable[..., Any], exactly_once: Collection[int] | Callable[[Shape], Collection[int]], **options: Any
) -> None:
    """Raise an ``AssertionError`` with the report if a rule is broken; arguments as in :func:`check_batch_sampler`."""
    __tracebackhide__ = True  # pytest shows the caller's line
    report = check_batch_sampler(factory, exactly_once, **options)
    if not report.ok:
        raise AssertionError(str(report))


def _judge(examination: Examination, number: int, rule: Callable[[SimulatedWorld], Checks]) -> int:
    """Run a rule over the worlds, up to its first violation, and return how many checks it passed."""
    passed = 0
    for world in [] if number in examination.skipped else examination.worlds:
        try:
            for breach in rule(world):
                if breach:
                    examination.broken[number] = _violation(number, breach)
                    return passed
                passed += 1
        except SamplerFault as fault:
            examination.broken[number] = _violation(number, Breach(str(fault), world.here))
            return passed
    return passed


def _violation(number: int, breach: Breach) -> Violation:
    name, meaning = RULES[number]
    message = f"Rule {number}, {name}: {breach.at}: {breach.text}.\n  In a training run: {breach.means or meaning}."
    return Violation(number, name, message, breach.at)


def _report(examination: Examination, checks: dict[int, int]) -> ConformanceReport:
    judged = [world for world in examination.worlds if world.recorded()]
    if not judged and not examination.broken:
        raise ValueError(f"nothing was judged, all was refused: {examination.notes['refused'][0]}")
    if not examination.broken and not any(world.has_batches for world in judged):
        raise ValueError("nothing was judged, no epoch has a batch: let a shape fill a step of all ranks")
    missing = [text for world in judged for text in world.offers.missing()]
    if any(world.batch_limit is None for world in judged):
        missing.append("no batch_size, of the shape or of the sampler: whether batches are too large is not judged")
    if not examination.seeds:
        missing.append("no keyword seed of the factory: rule 5 is not judged between seeds")
    for world in judged:
        if world.secondary:
            text = "indices outside exactly_once were taken for a second stream, which is cycled"
            examination.note(text, listed(sorted(world.secondary)))
        first = next(other for other in judged if other.shape is world.shape)
        if world is first and world.unshuffled and len(world.once) > 3:
            examination.note("does not shuffle, so rules 5 and 6 asked for no other order", str(world.at()))
    for number, needed in ((8, (7,)), (9, (1, 4, 7))):
        not_held = examination.not_held(*needed)
        if not_held and number not in examination.skipped and any(world.offers.state for world in judged):
            examination.note(f"the resumes of rule {number} were not judged", f"they rest on {named_rules(not_held)}")
    notes = []
    for kind, details in examination.notes.items():
        more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        notes.append(f"{kind}: {details[0]}{more}")
    violations = tuple(examination.broken[number] for number in sorted(examination.broken))
    skipped = tuple(sorted(examination.skipped))
    return ConformanceReport(violations, tuple(dict.fromkeys(missing)), tuple(notes), checks, skipped)
