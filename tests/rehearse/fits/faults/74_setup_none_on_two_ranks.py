"""training_step returns None for batches that it does not want, and the run has two ranks: Lightning refuses that."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "setup"
RANKS = 2
WRONG, RIGHT = 0, 4  # batches


class Run(Net):
    def __init__(self, skips):
        super().__init__()
        self.skips = skips

    def training_step(self, batch, batch_idx):
        return None if self.skips else super().training_step(batch, batch_idx)


def build(skips):
    return quiet_trainer(max_epochs=1, devices=2, strategy="ddp"), Run(skips), loader()


def make_run():
    return build(True)


def make_twin():
    return build(False)


def seen(trainer, model, data):
    try:
        return sum(fitted(trainer, model, data).batches)
    except RuntimeError:
        return 0
