"""Bytes in words, the same in every table of this package."""

from __future__ import annotations

from collections.abc import Mapping

MIB = 2**20


def readable(count: float) -> str:
    """``"1,536 B"``; from 10 KiB on ``"12.0 KiB"``, ``"3.4 MiB"``, ``"80.0 GiB"``."""
    if abs(count) < 10 * 1024:
        return f"{count:,.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:,.1f} {unit}"
    return f"{count / 1024:,.1f} GiB"


def in_categories(by_category: Mapping[str, int]) -> list[str]:
    """A line for each category that has bytes: its name, its bytes, its share."""
    total = sum(by_category.values())
    return [f"  {name:<12} {readable(count):>11} {count / total:7.1%}" for name, count in by_category.items() if count]
