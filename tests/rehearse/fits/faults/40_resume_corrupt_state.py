"""To save space the checkpoint's momentum is left out, and a resume starts with none."""

import torch

from tests.rehearse.fits.parts import Net, loader, quiet_trainer
from tests.rehearse.fits.resuming import resumes_exactly, saves

CHECK = "resume"
WRONG, RIGHT = False, True  # whether the resumed run has the weights of the one that was not stopped


class Run(Net):
    def __init__(self, drop):
        super().__init__()
        self.drop = drop

    def on_save_checkpoint(self, checkpoint):
        if self.drop:
            checkpoint["optimizer_states"][0]["state"] = {}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def build(drop):
    trainer = quiet_trainer(callbacks=[saves()], enable_checkpointing=True)
    return trainer, Run(drop), loader(shuffle=False)


def make_run():
    return build(drop=True)


def make_twin():
    return build(drop=False)


def seen(*run):
    return resumes_exactly(*run, at=12)
