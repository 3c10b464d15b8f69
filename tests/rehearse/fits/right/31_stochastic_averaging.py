"""Stochastic weight averaging from the second epoch on, with its own schedule in place of none."""

from lightning.pytorch.callbacks import StochasticWeightAveraging

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


def make_run():
    callback = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    return quiet_trainer(max_epochs=4, callbacks=[callback]), Net(), loader()
