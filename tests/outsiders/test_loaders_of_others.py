"""ExactResume with torchdata's StatefulDataLoader: a run that is stopped twice is right, or refused and then right."""

import random

import pytest
import torch
from torch.utils.data import IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests import effort
from tests.callbacks import test_other_loaders
from tests.callbacks.whole_run import SAVES, Dies, same


class Batches:
    """Drawn from torch's global generator; without a state."""

    def __init__(self, samples, at_once):
        self.samples, self.at_once = samples, at_once

    def __len__(self):
        return self.samples // 2

    def drawn(self):
        for indices in torch.randperm(self.samples).split(2):
            yield indices.tolist()

    def __iter__(self):
        return iter(list(self.drawn())) if self.at_once else self.drawn()


class Stream(IterableDataset):
    """Each pass over it has an order of its own, and its state says where it is."""

    def __init__(self, samples):
        self.samples, self.passes, self.at = samples, 0, 0

    def __len__(self):
        return len(self.samples)

    def __iter__(self):
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.passes))
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[order[self.at - 1]]
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self):
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state):
        self.passes, self.at = state["passes"], state["at"]


LOADERS = {
    "shuffled": lambda samples, **workers: StatefulDataLoader(samples, 2, shuffle=True, **workers),
    "shuffled by a generator": lambda samples, **workers: StatefulDataLoader(
        samples, 2, shuffle=True, generator=torch.Generator().manual_seed(7), **workers
    ),
    "weighted": lambda samples, **workers: StatefulDataLoader(
        samples, 2, sampler=WeightedRandomSampler([1.0] * len(samples), len(samples)), **workers
    ),
    "batches drawn with the first": lambda samples, **workers: StatefulDataLoader(
        samples, batch_sampler=Batches(len(samples), at_once=False), **workers
    ),
    "batches drawn at once": lambda samples, **workers: StatefulDataLoader(
        samples, batch_sampler=Batches(len(samples), at_once=True), **workers
    ),
    "a stream with a state": lambda samples, **workers: StatefulDataLoader(Stream(samples), 2, **workers),
}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:what the samples of a StatefulDataLoader draw at random")  # nothing, here
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("loader", LOADERS)
def test_it_goes_on_where_it_was_or_is_refused(loader, num_workers, tmp_path, monkeypatch):
    make = LOADERS[loader]
    monkeypatch.setattr(
        test_other_loaders, "Stateful", lambda samples, batch_size: make(samples, num_workers=num_workers)
    )
    rng = random.Random(f"{loader} {num_workers}")
    for case in range(effort.cases(4, 40)):
        saves = rng.choice(list(SAVES))
        flags = dict(accumulate_grad_batches=rng.choice([1, 2, 3]), limit_train_batches=rng.choice([1.0, 1.0, 4]))
        flags |= dict(val_check_interval=rng.choice([1.0, 2]))
        whole = test_other_loaders.life(tmp_path / f"whole {case}", saves, **flags)
        kills = [Dies(rng.randint(1, 28), rng.choice(("start", "forward", "end", "validation"))) for _ in range(2)]
        for seed, dies in enumerate([*kills, None]):
            ended = test_other_loaders.resumed(tmp_path / f"{case}", saves, dies, 1 + seed, **flags)
            if ended:
                break
        assert same(ended, whole), (saves, flags, [(dies.micro_batch, dies.place) for dies in kills])
