"""A run of this process, recorded as a script is: its journal, which the checks of scripts judge. For a fork alone."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

from rehearse.report import Judgement
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.run import Enough
from rehearse.scripts.journal import CUT, ENDED, Journal
from rehearse.scripts.stage import Recorders

SHARE = 0.7
"""Of a trial's CPU time, for which its run is recorded; the rest is for what judges it."""


def played(
    train: Callable[[], object], author: Any, *, seconds: float, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> Journal:
    """Record ``train()`` to its end, or for so many seconds; the own files are those beside ``author``'s.

    ``optimizers``: those that were made before.
    """

    def end(how: str) -> NoReturn:
        recorders.journal.end = how
        raise Enough

    folder = str(Path(inspect.getfile(author)).parent)
    recorders = Recorders(Journal(), folder=folder, limit=time.process_time() + seconds, end=end)
    recorders.install()
    for optimizer in optimizers:
        recorders.optimizers.take(optimizer)
    with contextlib.suppress(Enough):
        train()
    if recorders.journal.end != CUT:
        recorders.journal.end = ENDED
    recorders.see_the_end()
    return recorders.journal


def judged_as_a_script(
    run: LightningRun, judge: Callable[[Journal], Judgement], seconds: float
) -> Callable[[Path], Judgement]:
    """A trial: rehearse a fit as a script that fits, and judge its journal."""

    def trial(folder: Path) -> Judgement:
        return judge(played(lambda: run.start(folder), type(run.model), seconds=SHARE * seconds))

    return trial
