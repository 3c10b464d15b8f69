"""``training_step`` returns ``None`` for a bad batch, which a Trainer refuses on two ranks: the run ends there."""

import torch

from course_lib.callbacks import SkipBadSteps
from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "bad_step"
RANKS = 2
WRONG, RIGHT = "raises", 3  # epochs, where all samples are NaN


class Run(Net):
    def __init__(self, drop):
        super().__init__()
        self.drop = drop

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.drop and not loss.isfinite() else loss


def make_run():
    return quiet_trainer(strategy="ddp", devices=2), Run(drop=True), loader()


def make_twin():
    return quiet_trainer(strategy="ddp", devices=2, callbacks=[SkipBadSteps()]), Run(drop=False), loader()


def seen(trainer, model, data):
    data.dataset.x[:] = torch.nan
    try:
        return len(fitted(trainer, model, data).batches)
    except RuntimeError as error:
        return "raises" if "returning None in distributed training" in str(error) else str(error)
