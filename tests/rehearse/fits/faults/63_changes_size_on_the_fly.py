"""The batch size is halved for the second epoch and the Trainer goes by the first one's count: 32 of 64 are unread."""

from lightning.pytorch import Callback

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "changes"
WRONG, RIGHT = 32, 64  # samples of the second epoch


class Halve(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            pl_module.loader.batch_sampler.batch_size //= 2


class Run(Net):
    def __init__(self):
        super().__init__()
        self.loader = loader(batch_size=16)

    def train_dataloader(self):
        return self.loader


def build(reload):
    return quiet_trainer(callbacks=[Halve()], reload_dataloaders_every_n_epochs=reload), Run(), None


def make_run():
    return build(0)


def make_twin():
    return build(1)


def seen(*run):
    return len(fitted(*run).samples[1])
