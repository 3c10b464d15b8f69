"""Batches of 8, 8 and 4 share a window, each counts a third, and so a sample of the last weighs twice as much."""

from course_lib.callbacks import ExactAccumulation
from tests.rehearse.fits.parts import fitted, loader, quiet_trainer
from tests.rehearse.fits.windows import WeighedSamples

CHECK = "window"
WRONG, RIGHT = 2.0, 1.0  # the heaviest sample's weight, as a multiple of the lightest one's


def build(exact):
    callbacks = [ExactAccumulation()] if exact else []
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=3, callbacks=callbacks)
    return trainer, WeighedSamples(20, exact), loader(20)


def make_run():
    return build(False)


def make_twin():
    return build(True)


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return model.heaviest_to_lightest()
