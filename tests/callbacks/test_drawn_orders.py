"""Orders that are drawn ahead of a run's seeds, or that no state holds: right, or refused."""

import random
import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from course_lib.callbacks import CheckpointError, ExactResume, StepAudit
from course_lib.callbacks._drawn_orders import draws_as_it_is_iterated, order_in_no_state
from tests.trainer_oracle import quiet_trainer

SAMPLES = 12


class Order:
    """A sampler of the author's own."""

    def __init__(self, draw, when="with its first index"):
        self.draw, self.when = draw, when

    def __len__(self):
        return SAMPLES

    def drawn(self):
        yield from self.draw()

    def __iter__(self):
        return iter(list(self.drawn())) if self.when == "at once" else self.drawn()


def by_torch():
    return torch.randperm(SAMPLES).tolist()


def by_python():
    return random.sample(range(SAMPLES), SAMPLES)


class Stream(IterableDataset):
    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(by_torch())


class OwnLoader:
    """No DataLoader at all."""

    def __len__(self):
        return SAMPLES // 2

    def __iter__(self):
        return iter(torch.randperm(SAMPLES).split(2))


class PassesOver(DataLoader):
    """As torchdata's StatefulDataLoader does where a sampler has no state: so many batches of a new order."""

    given = to_pass_over = 0

    def __iter__(self):
        batches, self.given, self.to_pass_over = super().__iter__(), self.to_pass_over, 0
        return self.those_left(batches, self.given)

    def those_left(self, batches, passed_over):
        for number, batch in enumerate(batches, 1):
            if number > passed_over:
                self.given += 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.to_pass_over = state["given"]


class WithState(Order):
    """It knows its order."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch):
        self.seen.append(batch.tolist())
        return self.weight * batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class SavesAhead(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_start(self, trainer, pl_module):
        if not trainer.current_epoch:
            trainer.save_checkpoint(self.path)


def fit(loader, *callbacks, **given):
    module, saves = Small(), any(isinstance(one, ModelCheckpoint) for one in callbacks)
    trainer = quiet_trainer(max_epochs=2, callbacks=[*callbacks], enable_checkpointing=saves)
    trainer.fit(module, loader, weights_only=False, **given)
    return module.seen


DRAWN_AT_ONCE = {
    "a sampler, by torch's generator": lambda: DataLoader(
        torch.arange(SAMPLES), batch_size=None, sampler=Order(by_torch, "at once")
    ),
    "a sampler, by Python's generator": lambda: DataLoader(
        torch.arange(SAMPLES), batch_size=None, sampler=Order(by_python, "at once")
    ),
    "a batch sampler": lambda: DataLoader(range(SAMPLES), batch_sampler=Batches(Order(by_torch, "at once"))),
    "a stream": lambda: DataLoader(Stream()),
    "a loader of the author's own": OwnLoader,
}


class Batches(BatchSampler):
    """Of one sample each, and not by a function with ``yield``."""

    def __init__(self, sampler):
        super().__init__(sampler, 1, False)

    def __iter__(self):
        return iter([[index] for index in self.sampler])


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Your .IterableDataset. has .__len__.")
@pytest.mark.parametrize("what", DRAWN_AT_ONCE)
def test_an_order_that_was_drawn_ahead_of_the_seeds_is_refused(what, tmp_path):
    path, make = tmp_path / "begun.ckpt", DRAWN_AT_ONCE[what]
    fit(make(), SavesAhead(path), ExactResume())
    torch.manual_seed(1)
    name = type(make()).__name__
    with pytest.raises(CheckpointError, match=rf"ahead of the run's first batch, and a {name} had drawn its order"):
        fit(make(), ExactResume(), ckpt_path=path)
    with pytest.warns(UserWarning, match="Nothing is trained yet: begin without a checkpoint"):
        fit(make(), StepAudit(), ckpt_path=path)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("draw", [by_torch, by_python])
def test_one_that_is_drawn_with_the_first_index_comes_again(draw, tmp_path):
    path = tmp_path / "begun.ckpt"
    whole = fit(DataLoader(range(SAMPLES), sampler=Order(draw)), SavesAhead(path), ExactResume())
    seed = torch.initial_seed()
    torch.manual_seed(seed + 1), random.seed(1)
    assert fit(DataLoader(range(SAMPLES), sampler=Order(draw)), ExactResume(), ckpt_path=path) == whole


def test_asking_moves_no_generator_and_no_count():
    class Counts(Order):
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            return iter(by_torch())

    counts, own = Counts(by_torch), torch.Generator().manual_seed(3)
    by_its_own = Order(lambda: torch.randperm(SAMPLES, generator=own), "at once")
    by_its_own.generator = own
    before, before_own = torch.get_rng_state(), own.get_state()
    assert draws_as_it_is_iterated(DataLoader(range(SAMPLES), batch_sampler=Batches(counts)))
    assert not draws_as_it_is_iterated(DataLoader(range(SAMPLES), batch_sampler=by_its_own))
    assert counts.epochs == 1  # inside Batches, which is what is copied
    loader = DataLoader(range(SAMPLES), batch_sampler=counts)
    assert draws_as_it_is_iterated(loader)
    assert counts.epochs == 1
    assert order_in_no_state(loader, within_epoch=True) == "its Counts, which has no state"
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(own.get_state(), before_own)


def with_sampler(sampler, **options):
    return PassesOver(range(SAMPLES), 2, sampler=sampler, **options)


def with_a_generator():
    sampler = Order(by_torch)
    sampler.generator = torch.Generator()
    return sampler


def batches_that_come_once():
    """No sampler at all: it can neither be copied nor begin again."""
    yield from ([index] for index in range(SAMPLES))


IN_NO_STATE = {
    "its WeightedRandomSampler": lambda: with_sampler(WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "its SubsetRandomSampler": lambda: with_sampler(SubsetRandomSampler(range(SAMPLES))),
    "its RandomSampler": lambda: with_sampler(RandomSampler(range(SAMPLES))),
    "its Order, which has no state": lambda: with_sampler(Order(by_python)),
    "the generator of its Order": lambda: with_sampler(with_a_generator()),
    "its generator, which has no state": lambda: PassesOver(range(SAMPLES), batch_sampler=batches_that_come_once()),
    "its generator=": lambda: with_sampler(SequentialSampler(range(SAMPLES)), generator=torch.Generator()),
}
IN_A_STATE = {
    "one after the other": lambda: with_sampler(SequentialSampler(range(SAMPLES))),
    "always the same": lambda: with_sampler(Order(lambda: reversed(range(SAMPLES)))),
    "a state of its own": lambda: with_sampler(WithState(by_torch)),
    "a list of batches": lambda: PassesOver(range(SAMPLES), batch_sampler=[[0, 1], [2, 3], [4, 5]]),
}
WITHIN_AN_EPOCH = dict(every_n_train_steps=2, save_top_k=-1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("what", IN_NO_STATE)
def test_a_loader_with_a_state_that_lacks_its_samplers_is_refused_within_an_epoch(what, tmp_path):
    make = IN_NO_STATE[what]
    fit(make(), ExactResume(), ModelCheckpoint(tmp_path, filename="{step}", **WITHIN_AN_EPOCH))
    with pytest.raises(CheckpointError, match=rf"the order of a PassesOver comes from {what}"):
        fit(make(), ExactResume(), ckpt_path=tmp_path / "step=4.ckpt")
    with pytest.warns(UserWarning, match=r"if the loader's own state holds the order all the same"):
        fit(make(), ExactResume(strict=False), ckpt_path=tmp_path / "step=4.ckpt")


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("what", IN_A_STATE)
def test_one_that_has_its_order_goes_on(what, tmp_path):
    make = IN_A_STATE[what]
    whole = fit(make(), ExactResume(), ModelCheckpoint(tmp_path, filename="{step}", **WITHIN_AN_EPOCH))
    if what != "a state of its own":  # which does not keep its word here
        assert fit(make(), ExactResume(), ckpt_path=tmp_path / "step=2.ckpt") == whole[2:]
    else:
        assert len(fit(make(), ExactResume(), ckpt_path=tmp_path / "step=2.ckpt")) == len(whole) - 2


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_at_an_epochs_end_nothing_is_left_of_an_order(tmp_path):
    make = IN_NO_STATE["its WeightedRandomSampler"]
    whole = fit(make(), ExactResume(), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1))
    torch.manual_seed(1)
    assert fit(make(), ExactResume(), ckpt_path=tmp_path / "epoch=0.ckpt") == whole[len(whole) // 2 :]


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Your .IterableDataset. has .__len__.")
def test_a_stream_that_is_read_again_is_warned_of(tmp_path):
    fit(PassesOver(Stream(), 2), ExactResume(), ModelCheckpoint(tmp_path, filename="{step}", **WITHIN_AN_EPOCH))
    with pytest.warns(UserWarning, match="its stream is read again up to where it was, and draws its order"):
        fit(PassesOver(Stream(), 2), ExactResume(), ckpt_path=tmp_path / "step=2.ckpt")
    knows = PassesOver(Stream(), 2)
    knows.dataset.load_state_dict = lambda state: None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is read again")
        fit(knows, ExactResume(), ckpt_path=tmp_path / "step=2.ckpt")
