"""The fit of a script, judged where it would begin: ``python -m rehearse.fits TASK``, begun by ``script``.

The script runs until its Trainer is asked to fit; there :func:`rehearse.rehearse` judges that fit.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NoReturn

from course_lib._processes import end_with
from rehearse._own_files import write_only_below
from rehearse.judge import rehearse
from rehearse.scripts.player import Task
from rehearse.scripts.stage import leave_now, run_as_main


def main(task: Task) -> NoReturn:
    end_with(task.caller, Path(task.folder))
    write_only_below(Path(task.folder))
    module: Any = importlib.import_module(task.options["module"])
    real = module.Trainer.fit

    def fit(
        trainer: Any,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        **_: Any,
    ) -> None:
        module.Trainer.fit = real  # the trials fit
        data = datamodule or train_dataloaders
        (data if hasattr(data, "prepare_data") else model).prepare_data()
        task.give_back(rehearse(trainer, model, data, val_dataloaders, skip=task.options["skip"]))
        leave_now()

    module.Trainer.fit = fit
    _, says = run_as_main(task)
    task.give_back(says or "it ended before a fit")
    leave_now()


if __name__ == "__main__":
    main(Task.given())
