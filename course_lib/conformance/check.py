"""The two ways in: get a report, or have a test fail with it. Every rule is judged over every world."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any

from course_lib._generators import generators_put_back
from course_lib._words import int_of_at_least
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
            Their order (of a set, the ascending one) is that of a sampler that does not shuffle. Other indices are
            taken for a second stream, which is cycled.
        world_sizes: Numbers of ranks.
        epochs: How many to read, at least 2.
        shapes: Keywords of the factory. Every epoch is read hundreds of times, so a few small ones, some of them
            uneven. A sampler that groups by length needs one that is larger than a group.
        skip_rules: Numbers of ``RULES`` that are not judged: {1} for a sampler that pads or drops, {1, 10} for one
            that draws with replacement.

    A ``ValueError`` before the first batch, on all ranks, refuses that shape or world size: this is a note, not a
    violation. Any other exception, an empty batch, one that holds no integers or is written over later, and an epoch
    without an end (more than 100 batches and 10 for each index of ``exactly_once``) are violations. A batch is too
    large if it has more indices (beside a second stream: primary ones) than ``batch_size`` of the shape, or else of the
    sampler. A sampler is plain, and need not have other orders, if ``shuffle`` of the shape says so; where that says
    nothing, if all epochs are equal and in the order of ``exactly_once``.

    So that one fault is one violation, a rule is not judged, and that is noted, if one that it rests on is broken or
    left out: 8 rests on 7 and 11, and 9 on 1, 4 and 7. The fourth rule is strict: an order that changes when a sampler
    is iterated twice, with no set_epoch in between, is no function of (seed, epoch).

    Raises:
        ValueError: An argument is out of its range, or there is nothing to judge: every shape was refused on every
            world size, or no epoch has a batch.
    """
    if not callable(factory):
        raise ValueError(f"factory must make one rank's batch sampler from num_replicas and rank, got {factory!r}")
    parameters = named_arguments(factory)
    sizes = sorted({int_of_at_least(1, "every world size", size) for size in _listed("world_sizes", world_sizes)})
    given = [{}] if shapes is None else _listed("shapes", shapes)
    if not sizes or not given:
        raise ValueError(f"there is nothing to judge: {len(sizes)} world sizes, {len(given)} shapes")
    if not all(isinstance(shape, Mapping) for shape in given):
        raise ValueError(f"every shape must be a dict of the factory's keywords such as dict(n=20), got {given!r}")
    skipped = frozenset(_listed("skip_rules", skip_rules))
    if not skipped <= RULES.keys():
        raise ValueError(f"skip_rules takes the numbers of RULES, 1 to {len(RULES)}, got {skip_rules!r}")
    asked = Asked(
        _by_position(factory, parameters),
        seeds="seed" in parameters or all("seed" in shape for shape in given),
        epochs=range(int_of_at_least(2, "epochs", epochs)),
        skipped=skipped,
    )
    once = exactly_once if callable(exactly_once) else None
    smallest_first = [(dict(shape), _in_order(once(shape) if once else exactly_once, shape)) for shape in given]
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


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise ValueError(f"{name} must be a collection such as a list, got {value!r}")
    return list(value)


def _by_position(factory: Callable[..., Any], parameters: set[str]) -> Callable[..., Any]:
    """The factory, called with ``num_replicas`` and ``rank`` in front, also if it takes them by name alone."""
    if not {"num_replicas", "rank"} <= parameters:
        return factory
    return lambda num_replicas, rank, **shape: factory(**shape, num_replicas=num_replicas, rank=rank)


def _in_order(once: Any, shape: Shape) -> list[int]:
    """The indices of ``exactly_once``, in the order given; a set has none, so that of a set is ascending."""
    try:
        indices = [operator.index(index) for index in once]
    except TypeError:
        indices = []
    if not indices or len(set(indices)) < len(indices):
        raise ValueError(
            "exactly_once must be a collection of at least one integer, each once, such as range(40), or a function "
            f"of the shape that returns one, got {once!r} for the shape {shape}"
        )
    return sorted(indices) if isinstance(once, Set) else indices


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
