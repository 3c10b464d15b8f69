"""From what a sampler of an author's own draws its indices: a loader's state holds torch's generators alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from course_lib._generators import marks
from course_lib._held_generators import fingerprint_of
from course_lib.samplers.sharded import generators_of, is_of_torch

NAMES = ("Python's random", "NumPy's global generator", "torch's global generator between others' draws")


def indices_of(sampler: Any, order_generator: torch.Generator, position: dict[str, Any]) -> Iterator[Any]:
    """``iter(sampler)``; what no state holds, and draws it nevertheless, is noted in ``position["drawn_by"]``."""
    if is_of_torch(sampler) or hasattr(sampler, "load_state_dict"):
        return iter(sampler)
    return _NotedIndices(sampler, order_generator is torch.default_generator, position)


def held_apart(sampler: Any, order_generator: torch.Generator) -> list[int]:
    """How the generators stand that the sampler holds beside the one of its order; none where it has a state itself."""
    if hasattr(sampler, "load_state_dict"):
        return []
    return [fingerprint_of(one) for one in generators_of(sampler) if one is not order_generator]


def refuse_another_order(sampler: Any, state: Mapping[str, Any], held: list[int]) -> None:
    """Raise a ValueError where an epoch's order does not come out again, of which a state holds a position.

    ``held``: :func:`held_apart` here; none where the state is ahead of the epoch's first batch, which they may draw.
    """
    elsewhere = bool(held) and state.get("held", held) != held
    drawn_by = state.get("drawn_by") or ("a generator of its own" if elsewhere else "")
    if drawn_by:
        raise ValueError(
            f"the state is within an epoch whose order {type(sampler).__name__} drew from {drawn_by}, which is not in "
            "the state: another order would come, with some samples twice and others never. Draw it from torch's "
            "global generator, all at once; or wrap the batch sampler in a ShardedBatchSampler, and read that through "
            "a course_lib.resume.ResumableDataLoader; or take a state from between two epochs"
        )


class _NotedIndices:
    def __init__(self, sampler: Any, by_the_global_one: bool, position: dict[str, Any]) -> None:
        self._position = position
        self._by_the_global_one = by_the_global_one
        self._begins, self._others_draw = True, False
        self._before = self._after = marks()
        self._indices = iter(sampler)
        self._note()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._before = marks()
        self._others_draw |= not self._begins and self._before[-1] != self._after[-1]
        try:
            return next(self._indices)
        finally:
            self._note()
            self._begins = False

    def _note(self) -> None:
        self._after = marks()
        *own, of_torch = (now != before for now, before in zip(self._after, self._before, strict=True))
        # The state holds torch's global generator as it stood at the first index: later ones are drawn again from
        # there, which is right where nobody else has drawn from it in between.
        moved = (*own, of_torch and not self._begins and self._by_the_global_one and self._others_draw)
        for name, has_moved in zip(NAMES, moved, strict=True):
            if has_moved and self._position:
                self._position["drawn_by"] = name
