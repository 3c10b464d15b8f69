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
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_right_now(name):
    verdict = judge(FOUND[name])
    assert verdict.outcome == "right", verdict.why
