"""A rehearsal's bad_step where the run's own code refuses what is not finite."""

import pytest
from torch import nn

from rehearse import CHECKS, rehearse
from tests.rehearse.fits.parts import Net, loader, quiet_trainer

REST = [name for name in CHECKS if name != "bad_step"]


class Probability(Net):
    """Its loss takes nothing but probabilities, as that of many discriminators."""

    def training_step(self, batch, batch_idx):
        guess = self(batch[0]).sigmoid()
        return nn.functional.binary_cross_entropy(guess, guess.detach().round())


class Broken(Probability):
    def training_step(self, batch, batch_idx):
        raise ValueError("no batch at all")


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "ok"), [(Probability, True), (Broken, None)])
def test_a_run_that_refuses_a_batch_of_nan_is_judged(model, ok):
    report = rehearse(quiet_trainer(), model(), loader(), skip=REST)
    assert report.ok is ok and report.passed == (("bad_step",) if ok else ())
    assert any("a batch of NaN ends the run: RuntimeError" in note for note in report.notes) == bool(ok)
