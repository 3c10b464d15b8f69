"""A rehearsal says nothing of right runs that were drawn, and finds the one fault that is planted in each."""

import pytest

from tests import effort
from tests.rehearse.fits.drawn import FAULTS, drawn, faulty, made, wrong_of
from tests.rehearse.fits.parts import fitted

SEEDS = range(effort.cases(quick=1, thorough=24))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_run_has_no_finding(seed):
    assert wrong_of(drawn(seed)) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
def test_a_planted_fault_is_found_and_nothing_else(seed):
    run, check = faulty(drawn(seed), seed)
    assert wrong_of(run, check) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(effort.cases(quick=2, thorough=24)))
def test_a_right_run_fits_to_its_end(seed, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = drawn(seed)
    trainer, model, data = made(run)
    record = fitted(trainer, model, data)
    assert record.batches == [run.batches] * run.epochs or "stopping" in run.callbacks
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_every_fault_is_drawn_in_some_run():
    assert {faulty(drawn(seed), seed)[0].fault for seed in range(100)} == set(FAULTS)
