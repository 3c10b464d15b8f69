"""A checkpoint follows each validation, in the middle of a window: a resume has lost two batches' gradients."""

from course_lib.callbacks import ExactResume
from course_lib.resume import ResumableDataLoader
from tests.rehearse.fits.parts import Points, loader, quiet_trainer
from tests.rehearse.fits.resuming import Validated, resumes_exactly, saves

CHECK = "resume"
WRONG, RIGHT = False, True  # whether the resumed run has the weights of the one that was not stopped


def build(callbacks):
    trainer = quiet_trainer(
        accumulate_grad_batches=4,
        val_check_interval=3,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, saves(monitor="val")],
        enable_checkpointing=True,
    )
    return trainer, Validated(loader(8, shuffle=False)), ResumableDataLoader(Points(), batch_size=8, shuffle=True)


def make_run():
    return build([])


def make_twin():
    return build([ExactResume()])


def seen(*run):
    return resumes_exactly(*run, at=7)
