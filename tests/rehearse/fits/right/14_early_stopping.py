"""Validation in each epoch, early stopping, and a rate that falls where the validation's loss does not."""

import torch
from lightning.pytorch.callbacks import EarlyStopping

from tests.rehearse.fits.parts import loader, quiet_trainer
from tests.rehearse.fits.resuming import Validated


class Run(Validated):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


def make_run():
    trainer = quiet_trainer(max_epochs=5, callbacks=[EarlyStopping("val", patience=3)])
    return trainer, Run(loader(16, shuffle=False)), loader()
