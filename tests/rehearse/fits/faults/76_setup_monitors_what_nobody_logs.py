"""The checkpoint monitors ``val_los``, and the validation logs ``val_loss``: the fit raises after its first epoch."""

import contextlib

from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Subset

from tests.rehearse.fits.parts import Net, Points, fitted, loader, quiet_trainer

CHECK = "setup"
WRONG, RIGHT = 0, 3  # epochs that were trained


class Run(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().training_step(batch, batch_idx))

    def val_dataloader(self):
        return DataLoader(Subset(Points(80), range(64, 80)), 8)


def build(monitor):
    return quiet_trainer(callbacks=[EarlyStopping(monitor, patience=9)]), Run(), loader()


def make_run():
    return build("val_los")


def make_twin():
    return build("val_loss")


def seen(trainer, model, data):
    with contextlib.suppress(MisconfigurationException, RuntimeError):
        fitted(trainer, model, data)
    return trainer.current_epoch
