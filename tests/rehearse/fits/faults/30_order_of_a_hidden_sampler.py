"""The batch sampler keeps its sampler under a name that no Trainer looks for: ``set_epoch`` never reaches it."""

from torch.utils.data import DataLoader, DistributedSampler

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer, rank_and_world

CHECK = "order"
RANKS = 2
WRONG, RIGHT = 1, 3  # different orders in three epochs


class Pairs:
    """Batches of two of what an inner sampler draws."""

    def __init__(self, name):
        rank, world = rank_and_world()
        self.inner = DistributedSampler(range(64), world, rank)
        setattr(self, name, self.inner)

    def __iter__(self):
        drawn = iter(self.inner)
        return map(list, zip(drawn, drawn, strict=True))

    def __len__(self):
        return len(self.inner) // 2


class Run(Net):
    """Makes its loader when the ranks are there."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def train_dataloader(self):
        return DataLoader(Points(), batch_sampler=Pairs(self.name))


def build(name):
    return quiet_trainer(strategy="ddp", devices=2, use_distributed_sampler=False), Run(name), None


def make_run():
    return build("base")


def make_twin():
    return build("sampler")


def seen(*run):
    return len(set(map(tuple, fitted(*run).samples)))
