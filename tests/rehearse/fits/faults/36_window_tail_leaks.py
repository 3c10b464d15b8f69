"""A window by hand steps on each 4th batch and not on an epoch's last: two gradients leak into the next epoch."""

from tests.rehearse.fits.parts import loader, quiet_trainer
from tests.rehearse.fits.windows import ByHand, updates

CHECK = "window"
WRONG, RIGHT = [1.0, 1.5, 1.5], [1.0, 1.0, 1.0]  # the first update of each epoch; every gradient is 1


class Run(ByHand):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.mean_loss(batch) / 4)
        if (batch_idx + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


def build(batches):
    return quiet_trainer(), Run(), loader(batches * 8)


def make_run():
    return build(6)


def make_twin():
    return build(4)


def seen(*run):
    return updates(*run)
