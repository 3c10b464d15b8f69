"""Lightning's BoringModel with manual optimization."""

from lightning.pytorch.demos.boring_classes import BoringDataModule, ManualOptimBoringModel

from tests.rehearse.fits.parts import quiet_trainer


def make_run():
    return quiet_trainer(max_epochs=2), ManualOptimBoringModel(), BoringDataModule()
