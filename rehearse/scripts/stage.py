"""The process in which a script is rehearsed: ``python -m rehearse.scripts.stage TASK``, begun by ``player``.

The rooms take the places of torch's functions, the script runs as ``__main__``, and the journal is written to a file,
however the script ends.
"""

from __future__ import annotations

import ast
import builtins
import faulthandler
import functools
import importlib
import inspect
import os
import signal
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from course_lib._processes import end_with
from course_lib._tensors import parameters_of
from rehearse._checkpoints import saves_of, validates
from rehearse._own_files import write_only_below
from rehearse.scripts.cycles import record_cycles
from rehearse.scripts.events import Backward
from rehearse.scripts.gradients import Gradients, held_by_none
from rehearse.scripts.journal import CUT, ENDED, FAILED, REFUSED, Journal
from rehearse.scripts.lapse import Lapse, instead_of, is_librarys
from rehearse.scripts.loaders import RecordedLoaders
from rehearse.scripts.modules import ReplayedModules
from rehearse.scripts.optimizers import RecordedOptimizers
from rehearse.scripts.player import Task
from rehearse.scripts.ranks import pretend_ranks, see_what_is_averaged_by_none
from rehearse.scripts.saves import record_saves
from rehearse.scripts.schedules import RecordedSchedules

FRAMES = 6
"""Of a traceback that are told."""
WRITTEN = "written"
"""The folder of what the script writes, in that of its rehearsal."""


class Recorders:
    """The rooms that record one run, in the places of torch's functions once they are installed."""

    def __init__(
        self,
        journal: Journal,
        *,
        folder: str,
        limit: float,
        end: Callable[[str], None],
        ends_at: int | None = None,
        values: int = 0,
    ) -> None:
        self.journal = journal
        self.lapse = Lapse(journal, folder=folder, limit=limit, end=end, ends_at=ends_at)
        self.replayed = ReplayedModules(self.lapse, values)
        self.gradients = Gradients(self.lapse, self.replayed)
        self.schedules = RecordedSchedules(self.lapse)
        self.loaders = RecordedLoaders(self.lapse)
        self.optimizers = RecordedOptimizers(self.lapse, self.gradients)

    def install(self) -> None:
        self.replayed.install()
        self.gradients.install()
        self.optimizers.install()
        self.schedules.install()
        self.loaders.install()
        record_cycles(self.lapse)
        _see_checkpointing(self.lapse)

    def see_the_end(self) -> None:
        """Put into the journal what is known when the run has ended."""
        journal = self.journal
        self._see_what_is_held()
        names = {
            id(parameter): name
            for module in self.replayed.numbers.things
            for name, parameter in module.named_parameters()
        }
        without_gradient = self.gradients.never | self.gradients.not_yet
        for number, (optimizer, played) in enumerate(
            zip(self.lapse.optimizers.things, journal.optimizers, strict=False)
        ):
            played.gradients_of_zero = number in self.gradients.zero - self.gradients.not_zero
            played.without_gradient = tuple(
                names.get(id(parameter), "a parameter")
                for parameter in parameters_of(optimizer)
                if id(parameter) in without_gradient and parameter.requires_grad
            )
        if journal.has_group:
            see_what_is_averaged_by_none(self.lapse, self.gradients.trained, names)
        if self.gradients.changes_by_hand:  # in each of the real micro-batches, so in the others as well
            journal.changed_by_hand = sum(isinstance(event, Backward) for event in journal.events)
        journal.seconds = time.process_time()
        self.loaders.see_what_is_known_at_the_end()
        if self.lapse.trainer is not None:
            _see_what_a_trainer_has(journal, self.lapse.trainer)
        self.schedules.see_which_were_never_stepped()
        self.schedules.walk_on(journal.micro_batches())

    def _see_what_is_held(self) -> None:
        held_in = [set(map(id, parameters_of(optimizer))) for optimizer in self.lapse.optimizers.things]
        for module in self.replayed.numbers.things:
            own = set(map(id, module.parameters()))
            self.journal.optimizers_of.append({number for number, held in enumerate(held_in) if held & own})
        loose_names: list[str] = []
        whole: list[str] = []
        for module in self.replayed.numbers.things:
            loose, holds_others = held_by_none(self.gradients, module, self.lapse.optimizers.things)
            if loose and holds_others:
                loose_names += [name for name in loose if name not in loose_names]
            elif loose and self.lapse.optimizers.things:
                whole.append(type(module).__name__)
        if self.lapse.steps_made:
            held, known = self.lapse.optimizers.things, self.replayed.parameters()
            self.journal.in_no_module = tuple(self.gradients.leaves.held_by_none(held, known))
        self.journal.held_by_none, self.journal.modules_held_by_none = tuple(loose_names), tuple(whole)


@dataclass
class Stage:
    """A script's own process."""

    task: Task
    recorders: Recorders

    @property
    def is_closed(self) -> bool:
        """Whether it is known how the rehearsal ends; the journal may still be written."""
        return self.recorders.journal.end in (ENDED, FAILED, REFUSED, CUT)

    def close(self, end: str, says: str = "") -> None:
        """Write the journal; what it knows at the end is put into it first."""
        if not self.is_closed:
            journal = self.recorders.journal
            journal.end, journal.says = end, says
            if end == ENDED:
                journal.saving_lines = _saving_lines(Path(self.task.script))
            self.recorders.see_the_end()
            self.task.give_back(journal)


def set_up(task: Task, end: Callable[[str], None]) -> Stage:
    journal = Journal(rank=task.rank)
    folder = str(Path(task.script).parent)
    recorders = Recorders(journal, folder=folder, limit=task.seconds, end=end, ends_at=task.ends_at, values=task.values)
    recorders.install()
    write_only_below(Path(task.folder), written=WRITTEN)
    record_saves(recorders.lapse)
    pretend_ranks(recorders.lapse)
    _see_what_is_missing(journal)
    _compile_nothing()
    return Stage(task, recorders)


def _see_what_a_trainer_has(journal: Journal, trainer: Any) -> None:
    module = trainer.lightning_module
    journal.savers = tuple(way.setting for way in saves_of(trainer, module))
    journal.has_validation = validates(trainer, module) and trainer.val_dataloaders is not None


def _saving_lines(script: Path) -> tuple[str, ...]:
    tree = ast.parse(script.read_bytes())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    saves = [call.lineno for call in calls if ast.unparse(call.func) == "torch.save"]
    return tuple(f"{script.name}:{line}" for line in sorted(saves))


def _see_checkpointing(lapse: Lapse) -> None:
    """A reentrant checkpoint runs its forward without a graph, and it is no evaluation."""
    from torch.utils.checkpoint import CheckpointFunction

    run: Any = CheckpointFunction.forward

    def forward(*arguments: Any) -> Any:
        with lapse.going_on("checkpoint"):
            return run(*arguments)

    CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]


def _compile_nothing() -> None:
    """Compiled modules run as they are written; what compiles is loaded only where a script asks for it."""

    @instead_of(torch)
    def compile(compile_it: Any, *arguments: Any, **options: Any) -> Any:
        torch.compiler.set_stance("force_eager")
        return compile_it(*arguments, **options)


def _see_what_is_missing(journal: Journal) -> None:
    """A GPU that is asked for and is not there; a line that nobody types; the size of a screen, where it is a file."""

    @instead_of(torch.cuda)
    def _lazy_init(begin: Any) -> None:
        journal.asked_for_gpu = not torch.cuda.is_available()
        begin()

    @instead_of(builtins)
    def input(_: Any, prompt: object = "") -> str:
        raise EOFError(f"the script asks for an input ({prompt}); nobody answers: give it as an argument, or a default")

    @instead_of(os)
    def get_terminal_size(ask: Any, *number: int) -> os.terminal_size:
        try:
            size: os.terminal_size = ask(*number)
        except OSError:
            size = ask(0)  # its input is a terminal
        return size


def main(task: Task) -> NoReturn:
    end_with(task.caller, Path(task.folder))
    newest = _newest_checkpoint(Path(task.folder, WRITTEN))  # ahead of what redirects paths
    stages: list[Stage] = []

    def leave(end: str) -> NoReturn:
        # Not by an exception: a script may catch it and go on.
        stages[0].close(end)
        leave_now()

    stages.append(set_up(task, leave))
    own = os.getpid()

    def told_to_end(*_: Any) -> None:
        if os.getpid() != own:  # a worker of the script has inherited this
            os._exit(1)
        if not stages[0].is_closed:  # or it is about to end, and only writes its journal
            leave(CUT)

    @instead_of(os)
    def _exit(end_process: Callable[[int], NoReturn], status: int) -> NoReturn:
        if os.getpid() == own:  # by the script; or by leave_now, when the journal is closed
            stages[0].close(REFUSED if status else ENDED, f"exit code {status}")
            sys.stdout.flush()
        end_process(status)

    signal.signal(signal.SIGTERM, told_to_end)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    if "fits_of" in task.options:
        _have_fits_go_on(task.options["fits_of"], newest)
    end, says = run_as_main(task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stages[0].close(end, says)
    leave_now()


def _newest_checkpoint(written: Path) -> Path | None:
    """That a Trainer wrote there in a first life; links are to files of the reader's."""
    files = [file for file in written.rglob("*.ckpt") if not file.is_symlink()]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def _have_fits_go_on(package: str, newest: Path | None) -> None:
    """Let the first fit of a Trainer resume from a checkpoint, unless the script says from which."""
    module: Any = importlib.import_module(package)
    real = module.Trainer.fit

    @functools.wraps(real)
    def fit(trainer: Any, *arguments: Any, **options: Any) -> Any:
        module.Trainer.fit = real
        given = inspect.signature(real).bind(trainer, *arguments, **options).arguments
        if newest is not None and given.get("ckpt_path") is None:
            given |= {"ckpt_path": str(newest)}
            if "weights_only" in inspect.signature(real).parameters:
                given |= {"weights_only": False}
        return real(**{"self": trainer, **given})

    module.Trainer.fit = fit


def run_as_main(task: Task) -> tuple[str, str]:
    """Run the script; how it ends, and its exception or exit code where that is no good end."""
    sys.argv = [task.script, *task.arguments]
    sys.path[0] = str(Path(task.script).parent)
    try:
        main_module = sys.modules["__main__"] = types.ModuleType("__main__")
        vars(main_module)["__file__"] = task.script
        exec(compile(Path(task.script).read_bytes(), task.script, "exec", dont_inherit=True), vars(main_module))
    except SystemExit as error:
        if error.code not in (None, 0):
            return REFUSED, error.code if isinstance(error.code, str) else f"exit code {error.code}"
    except BaseException as error:
        return FAILED, _told(error)
    return ENDED, ""


def leave_now() -> NoReturn:
    """End this process; threads and exit handlers of the script would run on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _told(error: BaseException) -> str:
    """The traceback without the frames of this process, of torch and of the lapse."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_librarys(frame.filename)]
    lines = [f"  {Path(frame.filename).name}, line {frame.lineno}: {frame.line}" for frame in frames[-FRAMES:]]
    return "\n".join([*lines, "".join(traceback.format_exception_only(error)).strip()])


if __name__ == "__main__":
    main(Task.given())
