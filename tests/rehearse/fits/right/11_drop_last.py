"""67 samples in full batches of 8: three other samples are left out in each epoch, as was asked."""

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


def make_run():
    return quiet_trainer(), Net(), loader(67, drop_last=True)
