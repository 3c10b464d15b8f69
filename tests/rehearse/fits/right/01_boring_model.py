"""Lightning's BoringModel with the loaders of its own."""

from lightning.pytorch.demos.boring_classes import BoringModel

from tests.rehearse.fits.parts import quiet_trainer


def make_run():
    return quiet_trainer(max_epochs=2), BoringModel(), None
