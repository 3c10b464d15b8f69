"""A run that goes on within an epoch on another number of ranks, by the Trainer's own restoring: right, or refused."""

import contextlib
import functools

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from course_lib.callbacks import ExactAccumulation, ExactResume, StepAudit
from course_lib.launch import RankError, run_ranks
from course_lib.resume import ResumableDataLoader
from course_lib.samplers import ShuffledBatchSampler
from tests.callbacks.whole_run import newest
from tests.trainer_oracle import CountingModule, quiet_trainer

EPOCHS = 4


class CutOff(RuntimeError):
    pass


class Keeps(Callback):
    """The samples of each batch with its epoch, and whether each epoch ended with a validation; cuts the run off."""

    def __init__(self, dies):
        self.dies = dies
        self.seen, self.validated = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.dies:
            raise CutOff
        self.seen.append((trainer.current_epoch, batch.tolist()))

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validated.append(trainer.current_epoch)


class Module(CountingModule):
    def validation_step(self, batch):
        pass


class Sums(Module):
    def training_step(self, batch):
        return super().training_step(batch) * len(batch) * torch.ones(()), len(batch)


PIECES = {
    "nothing": lambda: [],
    "ExactResume": lambda: [ExactResume()],
    "StepAudit": lambda: [ExactResume(), StepAudit(strict=True)],
    "ExactAccumulation": lambda: [ExactAccumulation(), StepAudit(strict=True), ExactResume()],
}


def train_rank(rank, ranks, folder, dies, num_samples, batch_size, k, piece, load, saves):
    loader, keeps = ResumableDataLoader(range(num_samples), batch_size, shuffle=True), Keeps(dies)
    path = newest(folder)
    if load:
        (state,) = torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        loader.load_state_dict(state)
    saves = ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1, **saves)
    trainer = quiet_trainer(
        max_epochs=EPOCHS, accumulate_grad_batches=k, devices=ranks, strategy="ddp" if ranks > 1 else "auto",
        callbacks=[*PIECES[piece](), keeps, saves],
    )  # fmt: skip
    module = Sums() if piece == "ExactAccumulation" else Module()
    with contextlib.suppress(*([CutOff] if dies else [])):
        trainer.fit(module, loader, DataLoader(range(4), 2), ckpt_path=path, weights_only=False)
    return keeps.seen, keeps.validated


ON_EXCEPTION = dict(save_on_exception=True)


def live(folder, lives, num_samples=60, batch_size=3, k=1, piece="ExactResume", load=False, saves=ON_EXCEPTION):
    """Train with as many processes as there are ranks, life by life; [(ranks, where it is cut off)]."""
    train = functools.partial(run_ranks, train_rank, timeout=120)
    fits = []
    for number, (ranks, dies) in enumerate(lives):
        if number:
            (state,) = torch.load(newest(folder), weights_only=False)["loops"]["fit_loop"]["state_dict"][
                "combined_loader"
            ]
        else:
            state = {"epoch": 0, "position": 0}
        arguments = (ranks, folder, dies, num_samples, batch_size, k, piece, load and number > 0, saves)
        fits.append((state, [result.value for result in train(ranks, args=arguments)]))
    return fits


def samples_of(fit, epoch):
    return [sample for seen, _ in fit[1] for e, batch in seen if e == epoch for sample in batch]


ROWS = [
    ([(2, (1, 3)), (1, None)], dict(num_samples=60, batch_size=3)),
    ([(3, (1, 3)), (2, None)], dict(num_samples=60, batch_size=2)),
    ([(2, (1, 3)), (1, (1, 9)), (3, None)], dict(num_samples=60, batch_size=3)),
    ([(3, (1, 4)), (1, None)], dict(num_samples=60, batch_size=2, k=4, piece="StepAudit")),
    ([(1, (1, 5)), (2, None)], dict(num_samples=60, batch_size=3, k=2, piece="StepAudit")),
    ([(2, (1, 3)), (3, None)], dict(num_samples=47, batch_size=2, piece="ExactAccumulation")),
    ([(4, (1, 3)), (2, None)], dict(num_samples=96, batch_size=3, k=2)),
    ([(3, (0, 2)), (2, (1, 4)), (1, None)], dict(num_samples=50, batch_size=3, k=2, piece="StepAudit")),
    ([(2, (1, 3)), (1, None)], dict(num_samples=60, batch_size=3, load=True)),
]


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(
    ("lives", "run"), ROWS, ids=lambda row: str([life[0] for life in row]) if row and isinstance(row, list) else ""
)
def test_the_rest_of_the_epoch_is_trained_once_and_the_later_ones_are_whole(lives, run, tmp_path):
    fits = live(tmp_path, lives, **run)
    n = run["num_samples"]
    state, ranks = fits[-1]
    assert state["epoch"] == 1 and 0 < state["position"] < n
    for epoch in range(1, EPOCHS):
        seen = samples_of(fits[-1], epoch)
        assert len(seen) == len(set(seen)) == (n - state["position"] if epoch == 1 else n), epoch
    assert set().union(*(samples_of(fit, 1) for fit in fits)) == set(range(n))
    for seen, validated in ranks:
        assert validated == [1, 2, 3]
        assert len(seen) == len(ranks[0][0])


@pytest.mark.thorough
def test_a_trainer_that_would_count_once_is_refused_before_a_batch_is_trained(tmp_path):
    # 2 to 1, 1 to 2, and with the state loaded ahead of the fit: no ExactResume is there to count again.
    for number, (before, after, load) in enumerate([(2, 1, False), (1, 2, False), (2, 1, True)]):
        folder = tmp_path / str(number)
        with pytest.raises(RankError, match=r"In a Lightning Trainer add course_lib\.callbacks\.ExactResume\(\)"):
            live(folder, [(before, (1, 3)), (after, None)], piece="nothing", load=load)


@pytest.mark.thorough
def test_a_trainer_alone_goes_on_with_as_many_ranks_and_at_an_epochs_end_with_others(tmp_path):
    same = live(tmp_path / "same", [(2, (1, 3)), (2, None)], piece="nothing")
    other = live(tmp_path / "other", [(2, (1, 0)), (1, None)], piece="nothing")
    for fits in (same, other):
        for epoch in (2, 3):
            assert sorted(samples_of(fits[-1], epoch)) == list(range(60))
    assert sorted(samples_of(other[-1], 1)) == list(range(60))


@pytest.mark.thorough
def test_a_checkpoint_of_an_epochs_last_batch_goes_on_with_the_next_epoch_on_fewer_ranks(tmp_path):
    fits = live(tmp_path, [(2, (1, 0)), (1, None)], saves=dict(every_n_train_steps=1))
    assert fits[-1][0]["position"] in (0, 60)
    for epoch in (1, 2, 3):
        assert sorted(samples_of(fits[-1], epoch)) == list(range(60)), epoch


def test_a_loop_of_its_own_loads_the_state_before_it_asks_for_the_length():
    def loader(ranks):
        sampler = ShuffledBatchSampler(12, 2, shuffle=False, num_replicas=ranks, rank=0)
        return ResumableDataLoader(range(12), batch_sampler=sampler)

    next(iter(before := loader(2)))
    state = before.state_dict()
    for ranks in (1, 2, 3):
        later = loader(ranks)
        later.load_state_dict(state)  # first
        assert len(later) == 1 + sum(1 for _ in later)
    asked = loader(2)
    assert len(asked) == 3
    asked.load_state_dict(state)  # on as many ranks, in whatever order
    asked = loader(1)
    assert len(asked) == 6
    with pytest.raises(ValueError, match="load the state before anybody asks for len"):
        asked.load_state_dict(state)
