"""The two ways in: get a report, or have a test fail with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

from course_lib.conformance.counting_rules import covers_exactly_once, equal_counts, even_use, true_length, usable_again
from course_lib.conformance.generators import generators_put_back
from course_lib.conformance.lab import Lab
from course_lib.conformance.order_rules import new_orders, one_order, set_epoch_arrives
from course_lib.conformance.report import ConformanceReport, Shape
from course_lib.conformance.resume_rules import other_workers, other_world_size, resumes

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
    even_use,
    usable_again,
)
"""The rule at place 0 is number 1, as in :data:`~course_lib.conformance.report.RULES`."""


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
    lab = Lab(factory, exactly_once, world_sizes, epochs, shapes)
    with generators_put_back(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for number, rule in enumerate(IN_ORDER, start=1):
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
