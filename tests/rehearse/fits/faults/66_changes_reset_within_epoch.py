"""A validation's hook resets the loader for smaller batches, and the epoch that it is in ends at the new count."""

from tests.rehearse.fits.parts import fitted, loader, quiet_trainer
from tests.rehearse.fits.resuming import Validated

CHECK = "changes"
WRONG, RIGHT = 32, 64  # samples of the first epoch


class Run(Validated):
    def __init__(self, reset):
        super().__init__(loader(8, shuffle=False))
        self.reset, self.batch_size = reset, 8

    def train_dataloader(self):
        return loader(batch_size=self.batch_size)

    def on_validation_end(self):
        if self.reset:
            self.batch_size = 16
            self.trainer.fit_loop._combined_loader = None
            self.trainer.fit_loop.setup_data()


def build(reset):
    return quiet_trainer(val_check_interval=4, num_sanity_val_steps=0), Run(reset), None


def make_run():
    return build(reset=True)


def make_twin():
    return build(reset=False)


def seen(*run):
    return len(fitted(*run).samples[0])
