"""On two ranks the Trainer makes the batch sampler again, without the argument ``group``: batches of 16 become 1."""

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from course_lib.samplers import ShardedBatchSampler
from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "dealing"
RANKS = 2
WRONG, RIGHT = 32, 2  # batches of a rank in an epoch


class Groups(BatchSampler):
    """Batches of so many groups of samples."""

    def __init__(self, sampler, batch_size=1, drop_last=False, group=1):
        super().__init__(sampler, batch_size * group, drop_last)
        self.batch_size = batch_size
        self.group = group

    def __iter__(self):
        return iter(BatchSampler(self.sampler, self.batch_size * self.group, self.drop_last))

    def __len__(self):
        return len(BatchSampler(self.sampler, self.batch_size * self.group, self.drop_last))


def build(batch_sampler):
    return quiet_trainer(strategy="ddp", devices=2), Net(), DataLoader(Points(), batch_sampler=batch_sampler)


def make_run():
    return build(Groups(RandomSampler(range(64)), group=16))


def make_twin():
    return build(ShardedBatchSampler(Groups(RandomSampler(range(64)), group=16)))


def seen(*run):
    return fitted(*run).batches[0]
