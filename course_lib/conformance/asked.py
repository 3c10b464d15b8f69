"""What the caller gives to the kit, checked: bad arguments get a sentence."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from course_lib._arguments import int_of_at_least
from course_lib.conformance.violations import RULES, Shape


def checked_factory(factory: Any) -> Callable[..., Any]:
    if not callable(factory):
        raise ValueError(
            "factory must be a callable that makes one rank's batch sampler from num_replicas and rank, "
            f"got {factory!r}"
        )
    return factory  # type: ignore[no-any-return]


def by_position(factory: Callable[..., Any], parameters: set[str]) -> Callable[..., Any]:
    """The factory, called with ``num_replicas`` and ``rank`` in front, also if it takes them by name alone."""
    if not {"num_replicas", "rank"} <= parameters:
        return factory
    return lambda num_replicas, rank, **shape: factory(**shape, num_replicas=num_replicas, rank=rank)


def checked_world_sizes(world_sizes: Any) -> list[int]:
    if not isinstance(world_sizes, Iterable):
        raise ValueError(f"world_sizes must be a collection of numbers of ranks such as (1, 2, 3), got {world_sizes!r}")
    return sorted({int_of_at_least(1, "every world size", size) for size in world_sizes})


def checked_shapes(shapes: Any) -> list[Shape]:
    if shapes is None:
        return [{}]
    if not isinstance(shapes, Iterable) or isinstance(shapes, Mapping):
        raise ValueError(f"shapes must be a list of dicts such as [dict(n=20), dict(n=50)], got {shapes!r}")
    given = list(shapes)
    for shape in given:
        if not isinstance(shape, Mapping):
            raise ValueError(f"every shape must be a dict of the factory's keywords, got {shape!r}")
    return [dict(shape) for shape in given]


def checked_rules(skip_rules: Any) -> frozenset[int]:
    if isinstance(skip_rules, str) or not isinstance(skip_rules, Iterable):
        raise ValueError(
            f"skip_rules must be a collection of the numbers of rules such as {{1, 9}}, got {skip_rules!r}"
        )
    numbers = list(skip_rules)
    for number in numbers:
        if isinstance(number, bool) or number not in RULES:
            raise ValueError(f"skip_rules takes the numbers of RULES, 1 to {len(RULES)}, got {number!r}")
    return frozenset(numbers)


def ordered_indices(once: Any, shape: Shape) -> list[int]:
    """The indices of ``exactly_once``, in the order given; a set has none, so that of a set is ascending."""
    for_shape = f" for the shape {dict(shape)}"
    try:
        indices = [operator.index(index) for index in once]
    except TypeError:
        raise ValueError(
            f"exactly_once must be a collection of integers such as range(40), or a function of the shape that "
            f"returns one, got {once!r}{for_shape}"
        ) from None
    if not indices:
        raise ValueError(f"exactly_once must name at least one index, got {once!r}{for_shape}")
    twice = [index for index, count in Counter(indices).items() if count > 1]
    if twice:
        raise ValueError(f"exactly_once must name every index once, got {twice[0]} more than once{for_shape}")
    return sorted(indices) if isinstance(once, Set) else indices
