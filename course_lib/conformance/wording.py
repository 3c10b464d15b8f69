"""How the kit words numbers and lists, so that every message reads alike."""

from __future__ import annotations

from collections.abc import Sequence


def short(indices: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, indices[:most]))
    return f"[{shown}{', …' if len(indices) > most else ''}]"


def listed(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"index {indices[0]}"
    return f"{len(indices)} indices {short(indices)}"


def is_or_are(indices: Sequence[int]) -> str:
    return "is" if len(indices) == 1 else "are"


def named_rules(numbers: Sequence[int]) -> str:
    return ("rule " if len(numbers) == 1 else "rules ") + ", ".join(map(str, numbers))


def counted(number: int, one: str, more: str = "") -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"
