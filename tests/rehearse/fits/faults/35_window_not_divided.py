"""A window of four batches adds up four mean losses and never divides by four: each update is four times too large."""

from tests.rehearse.fits.parts import loader, quiet_trainer
from tests.rehearse.fits.windows import ByHand, updates

CHECK = "window"
WRONG, RIGHT = 4.0, 1.0  # an update, as a multiple of the big batch's; every gradient is 1


class Run(ByHand):
    def __init__(self, divide_by):
        super().__init__()
        self.divide_by = divide_by

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.mean_loss(batch) / self.divide_by)
        if (batch_idx + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


def make_run():
    return quiet_trainer(), Run(1), loader()


def make_twin():
    return quiet_trainer(), Run(4), loader()


def seen(*run):
    return updates(*run)[-1]
