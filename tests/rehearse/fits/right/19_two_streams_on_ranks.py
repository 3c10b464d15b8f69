"""Two streams of samples on two ranks."""

from torch.utils.data import DataLoader

from course_lib.samplers import TwoStreamBatchSampler
from tests.rehearse.fits.parts import Net, Points, quiet_trainer


def make_run():
    batch_sampler = TwoStreamBatchSampler(range(48), range(48, 64), 3, 1)
    return quiet_trainer(strategy="ddp", devices=2), Net(), DataLoader(Points(), batch_sampler=batch_sampler)
