"""Half of the batches in each epoch, as ``limit_train_batches=0.5`` says, and a rate that is halved with each epoch."""

from torch.optim.lr_scheduler import StepLR

from tests.rehearse.fits.parts import Scheduled, loader, quiet_trainer


def make_run():
    model = Scheduled(lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5), interval="epoch")
    return quiet_trainer(limit_train_batches=0.5), model, loader()
