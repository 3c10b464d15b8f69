"""Lightning's BoringModel and its data module."""

from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from tests.rehearse.fits.parts import quiet_trainer


def make_run():
    return quiet_trainer(max_epochs=2), BoringModel(), BoringDataModule()
