"""Runs that are refused by a sentence before a batch is trained; each was trained wrongly, or in part."""

import pytest

from tests.hunt.judging import judge
from tests.hunt.pieces import DrawnRun, Kill

REFUSED = {
    # It was refused when that epoch came, and the epochs before it had been trained.
    "sizes that follow a schedule, the last of which three ranks cannot share": (
        DrawnRun(samples=8, batch_size=1, sized=True, ranks=(3,), kills=(Kill(1),)),
        "cannot deal the 8 samples to 3 ranks in epoch 1",
    ),
    # So it was still where max_steps ends the run.
    "sizes that follow a schedule, max_steps, and an epoch that two ranks cannot share": (
        DrawnRun(samples=5, batch_size=1, sized=True, max_epochs=3, max_steps=3, ranks=(2,), kills=(Kill(2),)),
        "cannot deal the 5 samples to 2 ranks in epoch 1",
    ),
    "the same, one rank fewer": (
        DrawnRun(
            samples=21,
            batch_size=1,
            sized=True,
            max_epochs=3,
            max_steps=3,
            limit_train_batches=2,
            ranks=(3, 2),
            kills=(Kill(1),),
        ),
        "cannot deal the 21 samples to 2 ranks in epoch 1",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_now(name):
    run, sentence = REFUSED[name]
    verdict = judge(run)
    assert verdict.outcome == "refused" and sentence in verdict.why, verdict.why
