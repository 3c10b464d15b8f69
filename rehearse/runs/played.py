"""A fit, rehearsed as a script is, in the process of a trial: its journal, which the checks of scripts judge."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rehearse.report import Judgement
from rehearse.runs.run import Enough, TrainingRun
from rehearse.scripts.journal import CUT, ENDED, Journal
from rehearse.scripts.stage import Recorders


def judged_as_a_script(
    run: TrainingRun, judge: Callable[[Journal], Judgement], seconds: float
) -> Callable[[Path], Judgement]:
    """A trial: rehearse the run to its end, or for so many seconds of CPU time, and judge its journal."""

    def trial(folder: Path) -> Judgement:
        def end(how: str) -> NoReturn:
            recorders.journal.end = how
            raise Enough

        home = str(Path(inspect.getfile(type(run.model))).parent)
        recorders = Recorders(Journal(), folder=home, limit=time.process_time() + seconds, end=end)
        recorders.install()
        run.start(folder)
        if recorders.journal.end != CUT:
            recorders.journal.end = ENDED
        recorders.see_the_end()
        return judge(recorders.journal)

    return trial
