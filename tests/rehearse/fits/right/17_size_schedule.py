"""Samples that grow and batches that shrink within an epoch, by ``SizeScheduleDataModule``."""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from course_lib.callbacks import SizeScheduleDataModule
from course_lib.schedules import SizeSchedule
from tests.rehearse.fits.parts import Points, Scheduled, quiet_trainer


def cut(sample, size):
    """Only the first numbers of a sample: what stands for the size of an image."""
    x, y, index = sample
    return torch.cat([x[:size], torch.zeros(4 - size)]), y, index


def make_run():
    schedule = SizeSchedule({0: (2, 16), 1: (4, 8)})
    data = SizeScheduleDataModule(Points(), schedule, cut)
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, data.plan().total_steps))
    return quiet_trainer(), model, data
