"""What the caller gives to the kit, checked: bad arguments get a sentence."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any

import numpy as np

from course_lib._arguments import int_of_at_least
from course_lib.conformance.calls import describe_error
from course_lib.conformance.violations import Shape


def checked_factory(factory: Any) -> Callable[..., Any]:
    if not callable(factory):
        raise ValueError(
            "factory must be a callable that makes one rank's batch sampler from num_replicas and rank, "
            f"got {factory!r}"
        )
    return factory  # type: ignore[no-any-return]


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


def checked_switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def checked_batch_rule(rule: Any) -> Callable[[list[int]], object] | None:
    if rule is None:
        return None
    example = "lambda batch: len(set(batch)) == len(batch)"
    if not callable(rule):
        raise ValueError(f"batch_rule must be a function of one batch, a list of indices, as {example}, got {rule!r}")
    try:
        parameters = inspect.signature(rule)
    except (TypeError, ValueError):
        return rule  # type: ignore[no-any-return]  # Python cannot tell its arguments
    try:
        parameters.bind([])
    except TypeError:
        name = getattr(rule, "__name__", repr(rule))
        raise ValueError(
            f"batch_rule is called with one argument, a batch's list of indices, as {example}, and cannot be "
            f"{name}{parameters}"
        ) from None
    return rule  # type: ignore[no-any-return]


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


def asked_batch_size(factory: Callable[..., Any], shape: Shape) -> int | None:
    return _as_size(_asked_argument(factory, shape, "batch_size"))


def asked_to_shuffle(factory: Callable[..., Any], shape: Shape) -> bool | None:
    shuffle = _asked_argument(factory, shape, "shuffle")
    return shuffle if isinstance(shuffle, bool) else None


def _asked_argument(factory: Callable[..., Any], shape: Shape, name: str) -> Any:
    """An argument as the shape gives it, or as the factory's arguments do, bound ones and defaults; or None."""
    if name in shape:
        return shape[name]
    function, args, keywords = factory, (), {}
    if isinstance(factory, partial):
        function, args, keywords = factory.func, factory.args, factory.keywords
    try:
        bound = inspect.signature(function).bind_partial(*args, **keywords)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    return bound.arguments.get(name)


def own_batch_size(sampler: Any) -> int | None:
    return _as_size(getattr(sampler, "batch_size", None))


def _as_size(value: Any) -> int | None:
    try:
        return int_of_at_least(1, "batch_size", value)
    except ValueError:
        return None


def broken_batch_rule(rule: Callable[[list[int]], object], batch: list[int]) -> str | None:
    """Why the caller's rule does not hold for a batch, or None where it holds."""
    try:
        answer = rule(list(batch))
    except AssertionError as error:
        return str(error) or "its assertion failed"
    except Exception as error:
        return describe_error("batch_rule raised", error)
    if isinstance(answer, str):
        return answer or "it returned an empty string"
    if answer is None or isinstance(answer, bool | np.bool_):
        return "it returned False" if answer is not None and not answer else None
    raise ValueError(
        "batch_rule must return True or None where it holds, and False or a sentence where it does not, got "
        f"{answer!r} for the batch {batch}"
    )
