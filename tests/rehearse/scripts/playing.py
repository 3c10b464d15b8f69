"""One rehearsal of a script, as most tests want it."""

import os
from collections.abc import Sequence

from rehearse.scripts.journal import Journal
from rehearse.scripts.player import Play, play_each


def play(script: str | os.PathLike[str], arguments: Sequence[str] = (), **options) -> Journal:
    [journal] = play_each([Play(script, tuple(arguments), **options)])
    return journal
