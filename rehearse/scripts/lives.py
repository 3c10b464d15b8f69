"""A second life: a rehearsal is killed behind a save and started again with what it saved.

What the two make together is held against the run that was not stopped: its steps, their rates, its order.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from rehearse.scripts.events import Backward, Loaded, Saved, Step
from rehearse.scripts.journal import Journal
from rehearse.scripts.player import Play, play_each

BEHIND = 2
"""Backward passes behind a save that the first life still makes, and that are lost."""


@dataclass(frozen=True)
class SecondLife:
    """A run that was killed and started again."""

    journal: Journal
    saved_at: int
    """The place, among the events of the run that was not stopped, of the save that is gone on from."""
    line: str
    """That makes it."""
    steps_before: int
    """Optimizer steps ahead of that save."""
    loads: bool
    """Whether it loads a file ahead of its first backward pass, as the first life does not."""


def second_life(journal: Journal, asked: Play, resume_with: Sequence[str]) -> SecondLife | None:
    """Kill the script behind one of its saves, and start it again; None where no save has any training behind it."""
    saves = {at: event.line for at, event in enumerate(journal.events) if isinstance(event, Saved)}
    passes = [at for at, event in enumerate(journal.events) if isinstance(event, Backward)]
    ends = {at: [one for one in passes if one > at][:BEHIND] for at in saves}
    usable = [at for at in saves if len(ends[at]) == BEHIND]
    if not usable:
        return None
    saved_at = usable[len(usable) // 2]
    options = {"fits_of": journal.trainer} if journal.trainer else {}
    with tempfile.TemporaryDirectory(prefix="lives-", ignore_cleanup_errors=True) as kept:
        asked = dataclasses.replace(asked, kept=kept)
        play_each([dataclasses.replace(asked, ends_at=ends[saved_at][-1])])
        arguments = (*asked.arguments, *resume_with)
        [second] = play_each([dataclasses.replace(asked, arguments=arguments, options=options)])
    steps = sum(isinstance(event, Step) and not event.within for event in journal.events[:saved_at])
    loads = _loads_first(second) and not _loads_first(journal)
    return SecondLife(second, saved_at, saves[saved_at], steps, loads)


def _loads_first(journal: Journal) -> bool:
    for event in journal.events:
        if isinstance(event, Loaded):
            return True
        if isinstance(event, Backward):
            break
    return False
