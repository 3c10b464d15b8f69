"""The loss's weight follows a plain counter of batches, so a resume begins its warm-up again."""

import torch

from tests.rehearse.fits.parts import Net, loader, quiet_trainer
from tests.rehearse.fits.resuming import resumes_exactly, saves

CHECK = "resume"
WRONG, RIGHT = False, True  # whether the resumed run has the weights of the one that was not stopped


class Run(Net):
    """The loss is weighed by the share of 24 batches that have been seen."""

    def __init__(self, saved):
        super().__init__()
        if saved:
            self.register_buffer("batches", torch.zeros(()))
        else:
            self.batches = 0

    def training_step(self, batch, batch_idx):
        self.batches = self.batches + 1
        return super().training_step(batch, batch_idx) * self.batches / 24


def build(saved):
    return quiet_trainer(callbacks=[saves()], enable_checkpointing=True), Run(saved), loader(shuffle=False)


def make_run():
    return build(saved=False)


def make_twin():
    return build(saved=True)


def seen(*run):
    return resumes_exactly(*run, at=12)
