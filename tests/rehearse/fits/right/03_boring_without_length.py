"""Lightning's data module whose streams have no length; the run is counted in steps."""

from lightning.pytorch.demos.boring_classes import BoringDataModuleNoLen, BoringModel

from tests.rehearse.fits.parts import quiet_trainer


def make_run():
    return quiet_trainer(max_steps=20, limit_val_batches=2), BoringModel(), BoringDataModuleNoLen()
