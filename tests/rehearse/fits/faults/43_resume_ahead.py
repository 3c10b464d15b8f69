"""The loader's state counts what its sampler gave out, and a worker fetches ahead: a resume misses that."""

from torch.utils.data import DataLoader, Sampler

from tests.rehearse.fits.parts import Net, Points, quiet_trainer
from tests.rehearse.fits.resuming import killed_and_resumed, saves

CHECK = "resume"
WRONG, RIGHT = False, True  # whether each sample is trained once in the epoch of the resume


class Counts(Sampler):
    """In the order 0, 1, 2 …, from where it is."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        for index in range(self.given, 64):
            self.given += 1
            yield index
        self.given = 0

    def __len__(self):
        return 64


class Stateful(DataLoader):
    def state_dict(self):
        return {"given": self.sampler.given}

    def load_state_dict(self, state):
        self.sampler.given = state["given"]


def build(num_workers):
    trainer = quiet_trainer(callbacks=[saves(every_n_train_steps=3)], enable_checkpointing=True)
    return trainer, Net(), Stateful(Points(), 8, sampler=Counts(), num_workers=num_workers)


def make_run():
    return build(1)


def make_twin():
    return build(0)


def seen(*run):
    samples, _, _ = killed_and_resumed(*run, at=4)
    return sorted(samples) == list(range(64))
