"""The Trainer steps the schedule after each update and training_step does so too: the cosine comes back up."""

from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 100, 0  # the last rate in % of the highest


class Run(Scheduled):
    def __init__(self, steps_itself):
        super().__init__(lambda optimizer: CosineAnnealingLR(optimizer, 24))
        self.steps_itself = steps_itself

    def training_step(self, batch, batch_idx):
        if self.steps_itself:
            self.lr_schedulers().step()
        return super().training_step(batch, batch_idx)


def make_run():
    return quiet_trainer(), Run(steps_itself=True), loader()


def make_twin():
    return quiet_trainer(), Run(steps_itself=False), loader()


def seen(*run):
    return fitted(*run).final_percent
