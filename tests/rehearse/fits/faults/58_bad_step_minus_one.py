"""A callback returns -1 for a bad batch to skip it; to a Trainer that means to skip the rest of the epoch."""

import torch

from course_lib.callbacks import SkipBadSteps
from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "bad_step"
WRONG, RIGHT = 2, 8  # batches trained, where the third holds a NaN sample; the right run skips its step alone


class Run(Net):
    def __init__(self, skip):
        super().__init__()
        self.skip = skip

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.skip and not batch[0].isfinite().all() else None


def make_run():
    return quiet_trainer(max_epochs=1), Run(skip=True), loader(shuffle=False)


def make_twin():
    return quiet_trainer(max_epochs=1, callbacks=[SkipBadSteps()]), Run(skip=False), loader(shuffle=False)


def seen(trainer, model, data):
    data.dataset.x[20] = torch.nan
    return len(fitted(trainer, model, data).rates)
