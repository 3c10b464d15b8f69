"""Each batch averages over its own labels, 1 to 4 of 4 are masked, and every batch counts the same in its window."""

from course_lib.callbacks import ExactAccumulation
from tests.rehearse.fits.parts import fitted, loader, quiet_trainer
from tests.rehearse.fits.windows import WeighedSamples

CHECK = "window"
WRONG, RIGHT = 4.0, 1.0  # the heaviest label's weight, as a multiple of the lightest one's


class Masked(WeighedSamples):
    """Of the batches of 4, the first has one label, the second two, and so on."""

    def labelled(self, indices):
        return indices[indices % 4 <= indices // 4]


def build(exact):
    callbacks = [ExactAccumulation()] if exact else []
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=callbacks)
    return trainer, Masked(16, exact), loader(16, batch_size=4, shuffle=False)


def make_run():
    return build(False)


def make_twin():
    return build(True)


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return model.heaviest_to_lightest()
