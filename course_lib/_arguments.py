"""Checks of arguments that every topic shares: what was given, what is allowed."""

from __future__ import annotations

import operator


def int_of_at_least(minimum: int, name: str, value: object) -> int:
    """Return ``value`` as an int, or raise a ``ValueError`` that names the argument.

    Takes whatever is an integer (NumPy's and torch's too), and neither a bool nor a float.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or number < minimum:
        kind = "a positive int" if minimum == 1 else f"an int of at least {minimum}"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    return number
