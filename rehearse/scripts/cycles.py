"""``itertools.cycle``: it keeps the batches of its first loop, and gives them again without asking the loader."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from rehearse.scripts.events import Delivered, PassBegun, PassEnded, loop_of
from rehearse.scripts.journal import Journal
from rehearse.scripts.lapse import Lapse


def record_cycles(lapse: Lapse) -> None:
    """A batch stands in the journal as often as ``itertools.cycle`` gives it."""
    real = itertools.cycle

    class cycle:
        def __new__(cls, iterable: Iterable[Any], /) -> Any:
            return real(iterable) if isinstance(iterable, Collection) else super().__new__(cls)

        def __init__(self, iterable: Iterable[Any], /) -> None:
            self.items = _endless(lapse, iterable)
            next(self.items)  # real cycles begin the loop over a loader where they are made as well

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return next(self.items)

    itertools.cycle = cycle  # type: ignore[misc, assignment]


def _endless(lapse: Lapse, iterable: Iterable[Any]) -> Iterator[Any]:
    """None where the loop has begun; then the items, and again those that were kept, with what their loaders wrote."""
    journal = lapse.journal
    at = len(journal.events)
    iterator = iter(iterable)
    begins = _of_loaders(journal, at)
    yield None
    kept = []
    at = len(journal.events)
    for item in iterator:
        kept.append((item, _of_loaders(journal, at)))
        yield item
        at = len(journal.events)
    ends = _of_loaders(journal, at)
    given = [event for _, events in kept for event in events]
    begun = {loop_of(event) for event in (*begins, *given) if isinstance(event, PassBegun)}
    # A loop that had begun before the cycle was made, as by zip.
    begins += [PassBegun(loader, None, loop) for loader, loop in {loop_of(event) for event in given} - begun]
    while kept:
        for event in begins:
            lapse.write(event)
        for item, events in kept:
            for event in events:
                journal.loaders[event.loader].cycled = True
                lapse.write(event)
            yield item
        for event in ends:
            lapse.write(event)


def _of_loaders(journal: Journal, since: int) -> list[PassBegun | Delivered | PassEnded]:
    return [event for event in journal.events[since:] if isinstance(event, PassBegun | Delivered | PassEnded)]
