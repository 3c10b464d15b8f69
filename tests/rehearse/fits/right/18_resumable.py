"""Checkpoints within epochs and within windows, a loader that goes on where it was, and ``ExactResume``."""

from course_lib.callbacks import ExactResume
from course_lib.resume import ResumableDataLoader
from tests.rehearse.fits.parts import Points, loader, quiet_trainer
from tests.rehearse.fits.resuming import Validated, saves


def make_run():
    flags = dict(accumulate_grad_batches=4, val_check_interval=3, enable_checkpointing=True)
    trainer = quiet_trainer(callbacks=[ExactResume(), saves(monitor="val")], **flags)
    data = ResumableDataLoader(Points(), batch_size=8, shuffle=True, num_workers=1)
    return trainer, Validated(loader(8, shuffle=False)), data
