"""The dataset holds a lambda, and workers that are spawned get it pickled: the run raises before its first batch."""

from torch.utils.data import DataLoader

from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer

CHECK = "workers"
WRONG, RIGHT = "raises", 1  # epochs


class Transformed(Points):
    def __init__(self, transform):
        super().__init__()
        self.transform = transform

    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        return self.transform(x), y, index


def twice(x):
    return 2 * x


def build(transform):
    data = DataLoader(Transformed(transform), 8, shuffle=True, num_workers=1, multiprocessing_context="spawn")
    return quiet_trainer(max_epochs=1), Net(), data


def make_run():
    return build(lambda x: 2 * x)


def make_twin():
    return build(twice)


def seen(*run):
    try:
        return len(fitted(*run).batches)
    except Exception as error:
        return "raises" if "lambda" in str(error.__context__) else str(error)
