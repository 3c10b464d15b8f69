"""The horizon leaves out each epoch's short batch, so the cosine reaches 0 after 40 of 50 updates and ends at 15 %."""

from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 15, 0  # the rate at the end, in % of its peak


def build(batches):
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 10 * batches))
    return quiet_trainer(max_epochs=10), model, loader(36, batch_size=8)


def make_run():
    return build(36 // 8)


def make_twin():
    return build(-(-36 // 8))


def seen(*run):
    return fitted(*run).final_percent
