"""A cosine with warm restarts: the rate turns up again because it was asked to."""

from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from tests.rehearse.fits.parts import Scheduled, loader, quiet_trainer


def make_run():
    model = Scheduled(lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=8))
    return quiet_trainer(), model, loader()
