"""``check_val_every_n_epoch=10`` in a run of 5 epochs: nothing is ever validated."""

from torch.utils.data import DataLoader, Subset

from tests.rehearse.fits.parts import Net, Points, fitted, loader, quiet_trainer

CHECK = "length"
WRONG, RIGHT = 0, 5  # validations


class Run(Net):
    validations = 0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().training_step(batch, batch_idx))

    def on_validation_end(self):
        self.validations += not self.trainer.sanity_checking

    def val_dataloader(self):
        return DataLoader(Subset(Points(80), range(64, 80)), 8)


def build(every):
    return quiet_trainer(max_epochs=5, check_val_every_n_epoch=every), Run(), loader()


def make_run():
    return build(10)


def make_twin():
    return build(1)


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return model.validations
