"""An exponential average of the weights, by Lightning's callback."""

from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


def make_run():
    return quiet_trainer(callbacks=[EMAWeightAveraging(decay=0.9)]), Net(), loader()
