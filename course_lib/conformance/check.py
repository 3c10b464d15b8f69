"""The two ways in: get a report, or have a test fail with it. Every rule is judged over every world."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

from course_lib._arguments import int_of_at_least
from course_lib._generators import generators_put_back
from course_lib.conformance.asked import (
    checked_batch_rule,
    checked_factory,
    checked_shapes,
    checked_switch,
    checked_world_sizes,
    ordered_indices,
)
from course_lib.conformance.breaches import Breach, Checks
from course_lib.conformance.calls import SamplerFault, named_arguments
from course_lib.conformance.rules import IN_ORDER, own_rule
from course_lib.conformance.simulated_world import Examination, SimulatedWorld
from course_lib.conformance.violations import (
    OWN_MEANING,
    OWN_RULE,
    RULES,
    ConformanceReport,
    Shape,
    Violation,
    listed,
    named_rules,
)


def check_batch_sampler(
    factory: Callable[..., Any],
    exactly_once: Collection[int] | Callable[[Shape], Collection[int]],
    *,
    world_sizes: Iterable[int] = (1, 2, 3, 5, 8),
    epochs: int = 3,
    shapes: Iterable[Shape] | None = None,
    repeats: bool = False,
    drops: bool = False,
    batch_rule: Callable[[list[int]], object] | None = None,
) -> ConformanceReport:
    """Judge a batch sampler by playing all ranks in this process.

    >>> from functools import partial
    >>> from course_lib.samplers import ShardedBatchSampler
    >>> def both_classes(batch):  # even and odd indices
    ...     return len({index % 2 for index in batch}) == 2
    >>> def report_on(batches):
    ...     sharded = partial(ShardedBatchSampler, batches, tail="drop")  # "spread" would cut some of them
    ...     return check_batch_sampler(sharded, range(8), world_sizes=(1, 2), drops=True, batch_rule=both_classes)
    >>> report_on([[0, 1], [2, 3], [4, 5], [6, 7]]).ok
    True
    >>> print(report_on([[0, 1, 2], [3, 4, 5], [6], [7]]).violations[0])
    Rule 12, your batch_rule: 1 rank, epoch 0, rank 0, step 2: it returned False; the batch is [6].
      In a training run: the batches are not what you ask of them.

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
        repeats: The indices of ``exactly_once`` may come any number of times, but at least once: padding, repeated
            augmentation, oversampling.
        drops: They may be left out, any of them, but do not come twice: ``drop_last``, a new subset in each epoch.
            With both, they come any number of times or not at all: weighted sampling.
        batch_rule: Your own rule for the indices of a batch: called with the list of each batch, after resumes too,
            it returns True or None where it holds, and where it does not, it raises, or returns False or a sentence
            that says why. It is rule 12.

    ``repeats`` and ``drops`` change only how often an index may come. Then a world size alone no longer shows whether
    its ranks share an order, so each is compared with all smaller ones, and with one rank even if that was not asked
    for. Still refused are: an epoch without a batch, unless the indices fill no step and are dropped; ranks that are
    dealt the same, unless the epoch is a single step; ranks that draw orders of their own; an epoch that is dealt
    twice, so that each rank has a share of its share; and a resume on another number of ranks that loses or adds a
    step or more against a whole epoch. The epoch may have as many steps on more ranks (each rank draws as many
    batches) or fewer of them (the ranks share out as many indices).

    A batch is too large if it has more indices than ``batch_size``, where the shape or the factory's arguments have
    that name, or else the sampler; beside a second stream, its primary indices are counted.

    A sampler or factory that raises a ``ValueError`` before the first batch, on all ranks, refuses that shape or world
    size: this is a note, not a violation. Any other exception, a batch that is empty or holds no integers, one that is
    written over while the epoch goes on, and an epoch without an end are violations. Whether the sampler should
    shuffle is what ``shuffle`` says, where the shape or the factory's arguments have that name. Where they do not, the
    kit takes it for plain if all epochs are equal and in the order of ``exactly_once``. Of a plain one, rules 5 and 6
    do not ask for another order.

    So that one fault is one violation, checks that depend on a broken rule are left out and noted: rule 9 depends on
    1, 4 and 7, and the resumes of rule 8 depend on 7. The fourth rule is strict: an order that changes when a sampler
    is iterated twice, with no set_epoch in between, is no function of (seed, epoch). Every epoch is read hundreds of
    times: keep shapes small.

    Raises:
        ValueError: An argument is out of its range, ``batch_rule`` returns something else, or there is nothing to
            judge: every shape was refused on every world size, or no epoch has a batch.
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
        repeats=checked_switch("repeats", repeats),
        drops=checked_switch("drops", drops),
        batch_rule=checked_batch_rule(batch_rule),
    )
    once = exactly_once if callable(exactly_once) else None
    smallest_first = [(shape, ordered_indices(once(shape) if once else exactly_once, shape)) for shape in given]
    smallest_first.sort(key=lambda entry: len(entry[1]))
    examination.worlds += [SimulatedWorld(examination, *entry, size) for size in sizes for entry in smallest_first]
    rules = dict(enumerate(IN_ORDER, start=1))
    if batch_rule is not None:
        rules[OWN_RULE] = own_rule
    with generators_put_back(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        checks = {number: _judge(examination, number, rule) for number, rule in rules.items()}
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
    for world in examination.worlds:
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
    name, meaning = OWN_MEANING if number == OWN_RULE else RULES[number]
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
        missing.append("no batch_size, as an argument or as an attribute: whether batches are too large is not judged")
    if not examination.seeds:
        missing.append("no keyword seed of the factory: rule 5 is not judged between seeds")
    for world in judged:
        if world.secondary:
            text = "indices outside exactly_once were taken for a second stream, which is cycled"
            examination.note(text, listed(sorted(world.secondary)))
        first = next(other for other in judged if other.shape is world.shape)
        if world is first and world.unshuffled and len(world.once) > 3:
            examination.note("does not shuffle, so rules 5 and 6 asked for no other order", str(world.at()))
    for number, needed in ((8, {7}), (9, {1, 4, 7})):
        broken = sorted(examination.broken.keys() & needed)
        if broken and any(world.offers.state for world in judged):
            examination.note(f"the resumes of rule {number} were not judged", f"they rest on {named_rules(broken)}")
    if examination.repeats:
        examination.note("repeats by design", "rules 1, 9 and 10 allowed it")
    if examination.drops:
        examination.note("drops by design", "rules 1 and 9 allowed it")
    notes = []
    for kind, details in examination.notes.items():
        more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        notes.append(f"{kind}: {details[0]}{more}")
    violations = tuple(examination.broken[number] for number in sorted(examination.broken))
    return ConformanceReport(violations, tuple(dict.fromkeys(missing)), tuple(notes), checks)
