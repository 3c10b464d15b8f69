"""The cosine's horizon counts micro-batches, four to an update, so the rate ends at 85 % of its peak and not at 0."""

from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 85, 0  # the rate at the end, in % of its peak


def build(horizon):
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, horizon))
    return quiet_trainer(accumulate_grad_batches=4), model, loader()


def make_run():
    return build(3 * 8)


def make_twin():
    return build(3 * 8 // 4)


def seen(*run):
    return fitted(*run).final_percent
