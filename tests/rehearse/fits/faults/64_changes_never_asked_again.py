"""``train_dataloader`` decides the batch size by the epoch, and without a reload flag the Trainer asks it once."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "changes"
WRONG, RIGHT = [4, 4, 4], [4, 8, 16]  # batches of three epochs


class Run(Net):
    def train_dataloader(self):
        return loader(batch_size=16 // 2**self.trainer.current_epoch)


def build(reload):
    return quiet_trainer(reload_dataloaders_every_n_epochs=reload), Run(), None


def make_run():
    return build(0)


def make_twin():
    return build(1)


def seen(*run):
    return fitted(*run).batches
