"""The module keeps its schedule and steps it after each of 24 batches, with a horizon of 16: it comes back up."""

from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 40, 0  # the last rate in % of the highest


class Run(Net):
    def __init__(self, horizon):
        super().__init__()
        self.horizon = horizon

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedule = CosineAnnealingLR(optimizer, self.horizon)
        return optimizer

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.schedule.step()


def make_run():
    return quiet_trainer(), Run(16), loader()


def make_twin():
    return quiet_trainer(), Run(24), loader()


def seen(*run):
    return fitted(*run).final_percent
