"""The topics as Lightning callbacks, and what a Trainer alone needs: the exact resume.

- ``StepAudit``: plan a run's optimizer steps, count them, and say where the two differ (``course_lib.steps``).
- ``ExactAccumulation``: a window's gradient is the one big batch's (``course_lib.accumulation``).
- ``ExactResume``: a checkpoint can be taken anywhere, and the resumed run is the one that was not stopped.
- ``SkipBadSteps``: a bad step is skipped on all ranks, and leaves nothing behind (``course_lib.skipping``).
- ``SizeScheduleDataModule``: sizes and batches that follow a schedule (``course_lib.schedules``).
"""

try:
    import lightning.pytorch  # noqa: F401 - to see whether it is there
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ModuleNotFoundError(
        "course_lib.callbacks needs Lightning, which is an extra: from the project's folder, "
        'pip install ".[lightning]"; the other topics do without',
        name="lightning",
    ) from error

from course_lib.callbacks._other_ranks import run_so_far
from course_lib.callbacks.exact_accumulation import ExactAccumulation
from course_lib.callbacks.exact_resume import CheckpointError, ExactResume
from course_lib.callbacks.size_schedule import SizeScheduleDataModule
from course_lib.callbacks.skip_bad_steps import SkipBadSteps
from course_lib.callbacks.step_audit import StepAudit, StepCountError

__all__ = [
    "CheckpointError",
    "ExactAccumulation",
    "ExactResume",
    "SizeScheduleDataModule",
    "SkipBadSteps",
    "StepAudit",
    "StepCountError",
    "run_so_far",
]
