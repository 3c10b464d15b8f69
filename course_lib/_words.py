"""Numbers, bytes and refused arguments in words, the same in every message."""

from __future__ import annotations

import operator
from collections.abc import Sequence


def plural(number: int, one: str, more: str = "") -> str:
    """The noun for a number: ``"batch"``, ``"batches"``; ``more`` is ``one`` with an s where it is not given."""
    return one if number == 1 else more or one + "s"


def counted(number: int, one: str, more: str = "") -> str:
    """The number and its noun: ``"1 step"``, ``"1,200 steps"``."""
    return f"{number:,} {plural(number, one, more)}"


def first_of(numbers: Sequence[object], most: int = 8) -> str:
    """The first numbers or words, and whether there are more: ``"0, 1, 2"``, ``"0, 1, 2, 3, 4, 5, 6, 7, …"``."""
    shown = ", ".join(map(str, numbers[:most]))
    return f"{shown}, …" if len(numbers) > most else shown


def readable_bytes(count: float) -> str:
    """``"1,536 B"``; from 10 KiB on ``"12.0 KiB"``, ``"3.4 MiB"``, ``"80.0 GiB"``."""
    if abs(count) < 10 * 1024:
        return f"{count:,.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:,.1f} {unit}"
    return f"{count / 1024:,.1f} GiB"


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
