"""What the hunt has found: each was wrong once."""

import pytest

from tests.hunt.judging import judge
from tests.hunt.pieces import DrawnRun, Kill

FOUND = {
    # The steps of the next epochs were taken as done, so that a strict audit refused a right run.
    "an epoch that limit_train_batches ends, then one rank fewer": DrawnRun(
        samples=28,
        batch_size=4,
        callbacks=("ExactResume", "StepAudit"),
        limit_train_batches=2,
        ranks=(2, 1),
        saves="every epoch",
        kills=(Kill(3, "before step"),),
    ),
    # The window's length came back before the scheduler had looked at the Trainer's, and the resume was refused.
    "ExactResume ahead of a GradientAccumulationScheduler": DrawnRun(
        samples=15,
        accumulate_grad_batches=3,
        windows_by_epoch=True,
        kills=(Kill(5), Kill(2, "end")),
    ),
    # The state stood within an epoch that the Trainer had ended, and was loaded once more in the next one.
    "an epoch that limit_train_batches ends, killed in its validation": DrawnRun(
        samples=5, limit_train_batches=2, val_check_interval=2, kills=(Kill(1, "validation"),)
    ),
    "an epoch that limit_train_batches ends, killed at its end": DrawnRun(
        samples=5, limit_train_batches=2, kills=(Kill(2, "epoch end"),)
    ),
    # Lightning steps it neither in an epoch that it has resumed nor for one whose end it has saved.
    "ReduceLROnPlateau, resumed within an epoch": DrawnRun(
        samples=9, shuffle=False, schedule="plateau", kills=(Kill(2, "start"),)
    ),
    "ReduceLROnPlateau, resumed at an epoch's end": DrawnRun(
        samples=9, schedule="plateau", max_epochs=4, saves="every epoch", kills=(Kill(7, "start"),)
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_right_now(name):
    verdict = judge(FOUND[name])
    assert verdict.outcome == "right", verdict.why
