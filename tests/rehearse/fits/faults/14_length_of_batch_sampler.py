"""The batch sampler's ``__len__`` rounds down, so the Trainer stops before the short batch: 4 of 36 are unread."""

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "length"
WRONG, RIGHT = 32, 36  # samples in an epoch


class RoundsDown(BatchSampler):
    def __len__(self):
        return len(self.sampler) // self.batch_size


def build(batch_sampler_class):
    batch_sampler = batch_sampler_class(RandomSampler(range(36)), 8, drop_last=False)
    return quiet_trainer(), Net(), DataLoader(Points(36), batch_sampler=batch_sampler)


def make_run():
    return build(RoundsDown)


def make_twin():
    return build(BatchSampler)


def seen(*run):
    return len(fitted(*run).samples[0])
