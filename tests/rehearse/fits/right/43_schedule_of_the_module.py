"""A cosine that the module keeps and steps itself: Lightning never sees it."""

from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class Own(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedule = CosineAnnealingLR(optimizer, 24)
        return optimizer

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.schedule.step()


def make_run():
    return quiet_trainer(), Own(), loader()
