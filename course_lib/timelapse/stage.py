"""The process in which a script is played: ``python -m course_lib.timelapse.stage TASK``, begun by ``play``.

The rooms take the places of torch's functions, the script runs as ``__main__``, and the journal is written to a file,
however the script ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from course_lib.timelapse.gradients import Gradients, held_by_none
from course_lib.timelapse.journal import CUT, ENDED, FAILED, REFUSED, Journal
from course_lib.timelapse.lapse import Lapse
from course_lib.timelapse.loaders import RecordedLoaders
from course_lib.timelapse.modules import ReplayedModules
from course_lib.timelapse.optimizers import RecordedOptimizers
from course_lib.timelapse.ranks import pretend_ranks
from course_lib.timelapse.saves import record_saves
from course_lib.timelapse.schedules import RecordedSchedules
from course_lib.timelapse.values import Comparisons

FRAMES = 6
"""Of a traceback that are told."""


@dataclass(frozen=True)
class Task:
    """What is to be played, and where."""

    script: str
    arguments: tuple[str, ...]
    folder: str
    """Where the journal is written to."""
    seconds: float
    """Of CPU time that the script may take."""
    rank: int = 0
    flipped: str = ""
    """The line that answers the other way round."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Stage:
    """The rooms, set up around one script."""

    task: Task
    journal: Journal
    lapse: Lapse
    replayed: ReplayedModules
    gradients: Gradients
    schedules: RecordedSchedules

    def close(self, end: str, says: str = "") -> None:
        """Write the journal; what it knows at the end is put into it first."""
        journal = self.journal
        if journal.end in (ENDED, FAILED, REFUSED, CUT):
            return
        journal.end, journal.says = end, says
        names = {
            id(parameter): name
            for module in self.replayed.numbers.things
            for name, parameter in module.named_parameters()
        }
        journal.held_by_none = held_by_none(self.gradients, self.lapse.optimizers.things, names)
        for optimizer, played in zip(self.lapse.optimizers.things, journal.optimizers, strict=False):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            played.without_gradient = tuple(
                names.get(id(parameter), "a parameter")
                for parameter in parameters
                if id(parameter) in self.gradients.never and parameter.requires_grad
            )
        self.schedules.walk_on(journal.micro_batches())
        near = str(Path(self.task.script).parent)
        files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
        own = {file for file in files if file.startswith(near) and file.endswith(".py") and "site-packages" not in file}
        journal.sources = sorted({self.task.script, *own})
        unfinished = Path(self.task.folder, "journal.unfinished")
        unfinished.write_bytes(pickle.dumps(journal))
        unfinished.rename(Path(self.task.folder, "journal"))


def set_up(task: Task, end: Callable[[str], None]) -> Stage:
    journal = Journal(rank=task.rank)
    lapse = Lapse(journal, limit=task.seconds, end=end)
    replayed = ReplayedModules(lapse)
    gradients = Gradients(lapse, replayed)
    schedules = RecordedSchedules(lapse)
    Comparisons(lapse, task.flipped).install()
    replayed.install()
    gradients.install()
    RecordedOptimizers(lapse, gradients).install()
    schedules.install()
    RecordedLoaders(lapse).install()
    record_saves(lapse)
    pretend_ranks(lapse)
    _see_checkpointing(lapse)
    with contextlib.suppress(Exception):
        torch.compiler.set_stance("force_eager")
    return Stage(task, journal, lapse, replayed, gradients, schedules)


def _see_checkpointing(lapse: Lapse) -> None:
    """A reentrant checkpoint runs its forward without a graph, and it is no evaluation."""
    from torch.utils.checkpoint import CheckpointFunction

    run: Any = CheckpointFunction.forward

    def forward(*arguments: Any) -> Any:
        lapse.inside["checkpoint"] += 1
        try:
            return run(*arguments)
        finally:
            lapse.inside["checkpoint"] -= 1

    CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]


def main(task: Task) -> NoReturn:
    stages: list[Stage] = []

    def leave(end: str) -> NoReturn:
        # Not by an exception: a script may catch it and go on.
        stages[0].close(end)
        sys.stdout.flush()
        os._exit(0)

    stages.append(set_up(task, leave))
    signal.signal(signal.SIGTERM, lambda *_: leave(CUT))
    end, says = ENDED, ""
    sys.argv = [task.script, *task.arguments]
    sys.path[0] = str(Path(task.script).parent)
    try:
        runpy.run_path(task.script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            end, says = REFUSED, str(error.code)
    except BaseException as error:
        end, says = FAILED, _told(error, task.script)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stages[0].close(end, says)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and exit handlers of the script would run on


def _told(error: BaseException, script: str) -> str:
    """The traceback without the frames of this process, of torch and of the lapse."""
    here = str(Path(__file__).parent)
    hidden = (here, str(Path(torch.__file__).parent), "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(hidden)]
    lines = [f"  {Path(frame.filename).name}, line {frame.lineno}: {frame.line}" for frame in frames[-FRAMES:]]
    return "\n".join([*lines, "".join(traceback.format_exception_only(error)).strip()])


if __name__ == "__main__":
    main(Task(**{**json.loads(sys.argv[1]), "arguments": tuple(json.loads(sys.argv[1])["arguments"])}))
