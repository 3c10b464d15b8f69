"""Lightning's averages of weights in every order of callbacks, killed anywhere: those of the run that was not."""

import functools
import random

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch.optim.lr_scheduler import StepLR

from course_lib.callbacks import CheckpointError, ExactAccumulation, ExactResume, SkipBadSteps
from tests import effort
from tests.callbacks import whole_run
from tests.callbacks.whole_run import SAVES, Dies, Everything, Killed, newest, same, state_of, train

AVERAGES = {
    "average": WeightAveraging,
    "moving average": lambda: EMAWeightAveraging(decay=0.9, use_buffers=False),
    "every other step": lambda: EMAWeightAveraging(decay=0.9, update_starting_at_step=5, update_every_n_steps=2),
    "of epochs": lambda: EMAWeightAveraging(decay=0.9, update_every_n_steps=0, update_starting_at_epoch=1),
    "stochastic, from the first epoch": lambda: StochasticWeightAveraging(0.02, 1, 3, annealing_strategy="linear"),
    "stochastic, from the second epoch": lambda: StochasticWeightAveraging(0.02, 2, 10),
    "stochastic, from the third epoch": lambda: StochasticWeightAveraging(0.02, 3, 2, annealing_strategy="linear"),
}
ORDERS = ("ax", "xa", "axs", "sax", "xsa", "arx", "rxa", "ra", "ar")
EPOCHS = 4
BATCHES = 16 * EPOCHS


@pytest.fixture(autouse=True)
def four_epochs(monkeypatch):
    # Weights of the last epoch are in no stochastic average: it is taken when epochs start.
    monkeypatch.setattr(whole_run, "EPOCHS", EPOCHS)


def fit(folder, average, order, schedule, **arguments):
    """A run with the callbacks in this order; the weights that it ends with, and the averages."""
    pieces = {"a": AVERAGES[average], "x": ExactAccumulation, "s": SkipBadSteps, "r": ExactResume}
    callbacks = [pieces[letter]() for letter in order]
    bad = whole_run.BAD_SAMPLE
    if "s" not in order or average.startswith("stochastic"):  # in its epoch for BatchNorm's statistics nobody skips
        whole_run.BAD_SAMPLE = slice(0, 0)
    make = Everything.configure_optimizers

    def configure_optimizers(self):
        made = make(self)
        if schedule == "epoch":
            made["lr_scheduler"] = {"scheduler": StepLR(made["optimizer"], 1, 0.5), "interval": "epoch"}
        return made if schedule else made["optimizer"]

    step = Everything.training_step
    if "x" not in order:
        Everything.training_step = lambda self, batch: step(self, batch)[0] / len(batch[0])
    Everything.configure_optimizers = configure_optimizers
    try:
        module, trainer, _ = train(folder, callbacks=callbacks, steps=4 * EPOCHS, **arguments)
    finally:
        whole_run.BAD_SAMPLE = bad
        Everything.configure_optimizers, Everything.training_step = make, step
    (averaging,) = (one for one in trainer.callbacks if isinstance(one, WeightAveraging | StochasticWeightAveraging))
    parameters = [parameter.detach().clone() for parameter in averaging._average_model.parameters()]
    return state_of(module) + parameters


def killed(folder, average, order, schedule, saves, kills):
    """The same, killed at these places of each life, from the newest checkpoint that is not refused each time."""
    for seed, kill in enumerate([*kills, None]):
        while True:
            path = newest(folder)
            try:
                return fit(
                    folder, average, order, schedule, saves=saves, ckpt_path=path, seed=seed,
                    dies=kill and Dies(*kill),
                )  # fmt: skip
            except Killed:
                break
            except CheckpointError as error:
                REFUSED.append(str(error))
                path.unlink()
    raise AssertionError("nobody kills the last one")


REFUSED: list[str] = []


@functools.cache
def uninterrupted(folder, average, order, schedule):
    return fit(folder / "whole", average, order, schedule)


FOUND = [
    # A window's BatchNorm buffers went into the average, and came from it.
    ("average", "xa", "step", "a time", [(17, "start"), (9, "start"), (2, "end")]),
    ("moving average", "ax", "step", "an exception", [(40, "start"), (5, "start")]),
    # An update that was made, and was not in the average yet.
    ("average", "xa", "step", "an exception", [(8, "end")]),
    # An epoch whose end no hook tells, as the checkpoint is of its last batch.
    ("of epochs", "ax", None, "an exception", [(40, "forward")]),
    ("of epochs", "axs", None, "an exception", [(36, "end"), (4, "end")]),
    # Nobody began the averaging again within an epoch: its schedule, and BatchNorm's own epoch.
    ("stochastic, from the first epoch", "xa", "step", "a time", [(10, "start")]),
    ("stochastic, from the second epoch", "axs", None, "a time", [(BATCHES + 5, "start")]),
    # The next epoch has one batch more, and the one that ended was taken for it.
    ("stochastic, from the second epoch", "rxa", "epoch", "a time", [(BATCHES + 1, "start")]),
]


@pytest.mark.thorough
@pytest.mark.parametrize("case", FOUND)
def test_what_was_killed_where_it_had_gone_wrong(case, tmp_path):
    average, order, schedule, *where = case
    assert same(killed(tmp_path, *case), uninterrupted(tmp_path, average, order, schedule)), where


def random_case(rng):
    average, order = rng.choice(list(AVERAGES)), rng.choice(ORDERS)
    schedule, saves = rng.choice(["step", "epoch", None]), rng.choice(list(SAVES))
    kills = [(rng.randint(1, BATCHES + 16), rng.choice(Dies.PLACES))]
    kills += [(rng.randint(1, 12), rng.choice(Dies.PLACES)) for _ in range(rng.choice([0, 0, 1, 2, 4]))]
    return average, order, schedule, saves, kills


@pytest.mark.thorough
def test_averages_are_those_of_the_run_that_was_not_killed(tmp_path):
    rng = random.Random("averages")
    for number in range(effort.cases(3, 80)):
        average, order, schedule, saves, kills = random_case(rng)
        ended = killed(tmp_path / str(number), average, order, schedule, saves, kills)
        assert same(ended, uninterrupted(tmp_path, average, order, schedule)), (average, order, schedule, saves, kills)
    assert all("in the middle of an update" in message for message in REFUSED)
