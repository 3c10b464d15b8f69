"""The batch size is decided when an epoch starts, after its loader was asked for: each size comes one epoch late."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "changes"
WRONG, RIGHT = [4, 4, 8], [4, 8, 16]  # batches of three epochs


class InTime(Net):
    batch_size = 16

    def decide(self):
        self.batch_size = 16 // 2**self.trainer.current_epoch

    def train_dataloader(self):
        self.decide()
        return loader(batch_size=self.batch_size)


class Late(InTime):
    def train_dataloader(self):
        return loader(batch_size=self.batch_size)

    def on_train_epoch_start(self):
        self.decide()


def build(model):
    return quiet_trainer(reload_dataloaders_every_n_epochs=1), model, None


def make_run():
    return build(Late())


def make_twin():
    return build(InTime())


def seen(*run):
    return fitted(*run).batches
