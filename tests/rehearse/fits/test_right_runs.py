"""The right runs run: to the end of what they ask for, with every weight finite. Nothing here needs a rehearsal."""

import pytest
import torch

from course_lib.launch import run_ranks
from tests.rehearse.fits.parts import fitted, looped, script, scripts

NAMES = scripts("right")


def ends_as_it_should(rank: int, name: str) -> bool:
    right = script("right", name)
    if getattr(right, "LOOP", False):
        run = right.make_run()
        return len(looped(**run).samples) == run["max_epochs"]
    trainer, model, data = right.make_run()
    fitted(trainer, model, data)
    finite = all(weight.isfinite().all() for weight in model.parameters())
    ended = trainer.global_step == trainer.max_steps or trainer.current_epoch == trainer.max_epochs
    return finite and (ended or trainer.should_stop)


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("name", [name for name in NAMES if "ranks" not in name])
def test_a_right_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of the checkpoints
    torch.manual_seed(0)
    assert ends_as_it_should(0, name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in NAMES if "ranks" in name])
def test_a_right_run_of_two_ranks(name):
    assert all(result.value for result in run_ranks(ends_as_it_should, 2, args=(name,)))


def test_there_are_enough_and_each_says_what_it_is():
    assert len(NAMES) >= 20 and all(script("right", name).__doc__ for name in NAMES)
