"""One sample is NaN, its steps are skipped, and a strict audit agrees; the run ends by updates."""

import torch

from course_lib.callbacks import SkipBadSteps, StepAudit
from tests.rehearse.fits.parts import Net, loader, quiet_trainer


def make_run():
    data = loader()
    data.dataset.x[20] = torch.nan
    return quiet_trainer(callbacks=[SkipBadSteps(), StepAudit(strict=True)]), Net(), data
