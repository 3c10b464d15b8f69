"""Checkpoints are saved within epochs and the loader has no state: a resume reads some samples twice, others never."""

from torch.utils.data import DataLoader

from course_lib.resume import ResumableDataLoader
from tests.rehearse.fits.parts import Net, Points, quiet_trainer
from tests.rehearse.fits.resuming import killed_and_resumed, saves

CHECK = "resume"
WRONG, RIGHT = False, True  # whether each sample is trained once in the epoch of the resume


def build(loader_class):
    trainer = quiet_trainer(callbacks=[saves(every_n_train_steps=3)], enable_checkpointing=True)
    return trainer, Net(), loader_class(Points(), batch_size=8, shuffle=True)


def make_run():
    return build(DataLoader)


def make_twin():
    return build(ResumableDataLoader)


def seen(*run):
    samples, _, _ = killed_and_resumed(*run, at=4)
    return sorted(samples) == list(range(64))
