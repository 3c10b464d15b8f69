"""A StepLR that counts epochs is stepped after each batch: a tenth of a tenth, until nothing is trained."""

from torch.optim.lr_scheduler import StepLR

from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 3, 23  # batches before which the rate is at least a hundredth of its first


def build(interval):
    return quiet_trainer(), Scheduled(lambda optimizer: StepLR(optimizer, 1, 0.1), interval), loader()


def make_run():
    return build("step")


def make_twin():
    return build("epoch")


def seen(*run):
    rates = fitted(*run).rates
    return sum(rate >= 0.0099 * rates[0] for rate in rates)
