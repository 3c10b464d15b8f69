"""A window's one label lies in one of its 4 micro-batches, and counts a quarter; the last window is right."""

from course_lib.callbacks import ExactAccumulation
from tests.rehearse.fits.parts import fitted, loader, quiet_trainer
from tests.rehearse.fits.windows import WeighedSamples

CHECK = "window"
WRONG, RIGHT = 0.25, 1.0  # what the label of the first window weighs


class OneLabel(WeighedSamples):
    def labelled(self, indices):
        return indices[(indices == 0) | (indices >= 8)]

    def training_step(self, batch, batch_idx):
        indices = self.labelled(batch[2])
        loss_sum = self.weights[indices].sum()
        return (loss_sum, len(indices)) if self.exact else loss_sum / max(1, len(indices))


def build(exact):
    callbacks = [ExactAccumulation()] if exact else []
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=callbacks)
    return trainer, OneLabel(16, exact), loader(16, batch_size=2, shuffle=False)


def make_run():
    return build(False)


def make_twin():
    return build(True)


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return -model.weights[0].item()
