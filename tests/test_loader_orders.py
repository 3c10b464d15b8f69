"""An author's batch sampler in a MiniDataLoader, stopped within an epoch: the rest comes out again, or is refused."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Sampler

from course_lib.loader import MiniDataLoader

BATCHES = [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9, 10], [11], [12, 13, 14]]
DRAWS = {
    "torch": lambda sampler, n: int(torch.randint(n, ())),
    "own torch": lambda sampler, n: int(torch.randint(n, (), generator=sampler.generator)),
    "python": lambda sampler, n: random.randrange(n),
    "numpy": lambda sampler, n: int(np.random.randint(n)),  # noqa: NPY002
    "own numpy": lambda sampler, n: int(sampler.rng.integers(n)),
}


class Drawn(Sampler):
    """Shuffles its batches by ``draw``: in ``__iter__``, at the first one, or each one when it is asked for."""

    def __init__(self, draw, when):
        self.draw, self.when = draw, when
        if draw == "own torch":
            self.generator = torch.Generator().manual_seed(3)
        self.rng = np.random.default_rng(3) if draw == "own numpy" else None

    def __len__(self):
        return len(BATCHES)

    def __iter__(self):
        return iter(self._order()) if self.when == "at once" else self._lazily()

    def _order(self):
        left = list(BATCHES)
        return [left.pop(DRAWS[self.draw](self, len(left))) for _ in BATCHES]

    def _lazily(self):
        if self.when == "at first":
            yield from self._order()
            return
        left = list(BATCHES)
        while left:
            yield left.pop(DRAWS[self.draw](self, len(left)))


def lived(draw, when, workers, noise, seed, stop=(9, 9), state=None, begin=0):
    """The batches of two epochs, from a state on, and the state after a stop ``(epoch, batches)``."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    loader = MiniDataLoader(range(15), batch_sampler=Drawn(draw, when), num_workers=workers)
    if state:
        loader.load_state_dict(state)
    seen = {epoch: [] for epoch in (0, 1)}
    for epoch in range(begin, 2):
        for number, batch in enumerate(loader, start=1):
            seen[epoch].append(batch.tolist())
            if noise:
                _ = torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002
            if (epoch, number) == stop:
                return seen, loader.state_dict()
    return seen, None


def is_refused(draw, when, noise, epoch):
    """A loader knows of torch's generators alone."""
    if draw == "own numpy":
        return epoch > 0  # in the first one, a new process holds it as it was
    return draw in ("python", "numpy") or (draw == "torch" and when == "each" and noise)


@pytest.mark.thorough
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("draw", DRAWS)
def test_stopped_within_an_epoch_the_order_comes_out_again_or_is_refused(draw):
    rng = random.Random(f"orders {draw}")
    for when, noise, epoch in itertools.product(("at once", "at first", "each"), (False, True), (0, 1)):
        workers = [0, 0] if rng.random() < 0.8 else rng.choice([[0, 2], [2, 0], [2, 2]])
        number = rng.randint(1, len(BATCHES) - 1)
        case = (draw, when, noise, epoch, number, workers)
        whole, _ = lived(draw, when, workers[0], noise, seed=7)
        before, state = lived(draw, when, workers[0], noise, seed=7, stop=(epoch, number))
        said = ""
        try:
            after, _ = lived(draw, when, workers[1], noise, seed=8, state=state, begin=epoch)
        except ValueError as error:
            said = str(error)
        assert not said or ("Drawn drew from" in said and "ResumableDataLoader" in said), said
        assert said or before[epoch] + after[epoch] == whole[epoch], case
        assert workers != [0, 0] or bool(said) == is_refused(draw, when, noise, epoch), case


@pytest.mark.filterwarnings("ignore:the state that was loaded stood behind")
def test_a_state_behind_the_last_batch_and_one_of_before_are_taken():
    _, state = lived("python", "at first", 0, False, seed=7, stop=(0, len(BATCHES)))
    after, _ = lived("python", "at first", 0, False, seed=7, state=state)
    assert after[0] == [] and sorted(after[1]) == BATCHES, "of the epoch nothing is left, whatever its order was"
    before, state = lived("torch", "at first", 0, False, seed=7, stop=(0, 3))
    of_before = {name: state[name] for name in state if name not in ("drawn_by", "held")}
    after, _ = lived("torch", "at first", 0, False, seed=8, state=of_before)
    assert sorted(before[0] + after[0]) == BATCHES


@pytest.mark.parametrize(("when", "workers"), [("at once", 0), ("at first", 2)])
def test_an_order_that_is_drawn_ahead_of_the_first_batch_is_refused_as_well(when, workers):
    loader = MiniDataLoader(range(15), batch_sampler=Drawn("numpy", when), num_workers=workers)
    iterator = iter(loader)
    state = loader.state_dict()
    assert state["batches_delivered"] == 0
    with pytest.raises(ValueError, match="an epoch whose order Drawn drew from NumPy's global generator"):
        MiniDataLoader(range(15), batch_sampler=Drawn("numpy", when)).load_state_dict(state)
    del iterator
