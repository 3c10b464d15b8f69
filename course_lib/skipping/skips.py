"""One skipped attempt: why it was skipped, where it was in the data, and the error when there are too many of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from course_lib._words import first_of, plural

NON_FINITE_LOSS = "non-finite loss"
NON_FINITE_GRADIENT = "non-finite gradient"
SPIKE = "gradient-norm spike"
NO_GRADIENT = "no gradient"
OVERFLOW = "overflow in the scaled gradients"

Samples = Iterable[int] | Callable[[], Iterable[int] | None] | None
"""A window's indices in the dataset, or a function that finds them, called for a window that is skipped."""


@dataclass(frozen=True)
class Skip:
    """One attempt that was skipped, as one rank saw it: a line of its journal."""

    run: str
    """When the guard was made, the same on all ranks: a run that was restarted appends to the same files."""
    attempt: int
    """1 for the run's first."""
    updates: int
    """How many updates had been made before it."""
    epoch: int | None
    batch_indices: list[int] | None
    """The window's micro-batches, as the loop numbers them."""
    sample_indices: list[int] | None
    """The samples that this rank had in them."""
    rank: int
    """The rank that writes."""
    reason: str
    caused_here: bool | None
    """True: this rank's own loss or `reject`. None: unknown, or of all ranks (a spike, a NaN made by a backward)."""
    norm: float | None
    """Of the gradients after the reduction; None where there were none."""
    norm_limit: float | None
    """What a norm had to stay below; None where norms were not judged."""

    @property
    def overflow(self) -> bool:
        """The loss was finite, and its scaled gradients were not: the scale is lowered, and no batch is at fault."""
        return self.reason == OVERFLOW

    def place(self) -> str:
        parts = [f"attempt {self.attempt}"]
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch}")
        if self.batch_indices:
            parts.append(f"{plural(len(self.batch_indices), 'batch', 'batches')} {first_of(self.batch_indices)}")
        if self.sample_indices:
            parts.append(f"samples {first_of(self.sample_indices)} on rank {self.rank}")
        return ", ".join(parts)


class TooManySkips(RuntimeError):
    """So many steps in a row were skipped that single samples can't be the cause. ``skips`` holds them all."""

    def __init__(self, skips: Sequence[Skip]) -> None:
        self.skips = list(skips)
        told = "\n".join(f"  {skip.place()}: {skip.reason}" for skip in self.skips)
        super().__init__(
            f"{len(self.skips):,} steps in a row were skipped, as many as max_consecutive_skips allows. Parameters and "
            f"optimizer are as they were before the first of them:\n{told}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.skips,)


class WindowLocation(NamedTuple):
    """Where a window is in the data, as the loop gave it: read only when the window is skipped, as reading may wait."""

    epoch: int | None = None
    batch_indices: int | Iterable[int] | None = None
    sample_indices: Samples = None

    def fields(self) -> dict[str, Any]:
        """The fields of a :class:`Skip`, in plain ints."""
        batches = self.batch_indices
        if batches is not None and (not isinstance(batches, Iterable) or getattr(batches, "ndim", 1) == 0):
            batches = [operator.index(batches)]  # type: ignore[arg-type]
        samples = self.sample_indices() if callable(self.sample_indices) else self.sample_indices
        return {
            "epoch": None if self.epoch is None else int(self.epoch),
            "batch_indices": None if batches is None else [int(index) for index in batches],
            "sample_indices": None if samples is None else [int(index) for index in samples],
        }
