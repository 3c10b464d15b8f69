"""Nobody zeroes the gradients in manual optimization, so the last update applies those of all 24 batches once more."""

from tests.rehearse.fits.parts import loader, quiet_trainer
from tests.rehearse.fits.windows import ByHand, updates

CHECK = "window"
WRONG, RIGHT = 24.0, 1.0  # the last update, as a multiple of the right one; every gradient is 1


class Run(ByHand):
    def __init__(self, zero):
        super().__init__()
        self.zero = zero

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if self.zero:
            optimizer.zero_grad()
        self.manual_backward(self.mean_loss(batch))
        optimizer.step()


def make_run():
    return quiet_trainer(), Run(zero=False), loader()


def make_twin():
    return quiet_trainer(), Run(zero=True), loader()


def seen(*run):
    return updates(*run)[-1]
