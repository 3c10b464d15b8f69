"""A run that is stopped anywhere and resumed, again and again, ends as the one that was never stopped."""

import contextlib
import os
import random
import signal

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    Checkpoint,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.utils.data import DataLoader

from course_lib.callbacks import CheckpointError, ExactAccumulation, ExactResume, SkipBadSteps, StepAudit
from course_lib.launch import RankError, RankTimeout, run_ranks
from course_lib.resume import ResumableDataLoader
from tests import effort
from tests.callbacks.whole_run import SAVES, Dies, Killed, newest, resume, same, state_of, train
from tests.trainer_oracle import CountingModule, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:training had moved waiting")  # CountingModule's, which counts


def killed_twice(rng, folder, **arguments):
    """Train with two kills, and what remains to the end. What `train` returns, and where the kills were."""
    saves = rng.choice(list(SAVES))
    kills = [(rng.randrange(1, 46), rng.choice(Dies.PLACES)), (rng.randint(1, 3), rng.choice(Dies.PLACES)), None]
    for seed, kill in enumerate(kills):
        try:
            return resume(folder, REFUSED, saves=saves, dies=kill and Dies(*kill), seed=seed, **arguments), saves, kills
        except Killed:
            continue
    raise AssertionError("nobody kills the last one")


REFUSED: list[str] = []


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("k", [1, 4])
def test_a_run_that_is_killed_twice_anywhere_ends_as_if_it_had_not_been(k, tmp_path):
    rng = random.Random(f"killed twice {k}")
    whole = state_of(train(tmp_path / "whole", k=k, steps=48 // k)[0])
    for case in range(effort.cases(3, 60)):
        (module, _, audit), *where = killed_twice(rng, tmp_path / f"{case}", k=k, steps=48 // k)
        assert same(state_of(module), whole), where
        assert audit.agrees and audit.attempts == 48 // k, where
    assert all("in the middle of an update" in one or "ahead of the first step" in one for one in REFUSED)


@pytest.mark.thorough
def test_so_does_one_whose_sizes_follow_a_schedule(tmp_path):
    rng = random.Random("sizes, killed twice")
    whole = state_of(train(tmp_path / "whole", n=48, sized=True, k=2, steps=22)[0])
    for case in range(effort.cases(2, 30)):
        (module, *_), *where = killed_twice(rng, tmp_path / f"{case}", n=48, sized=True, k=2, steps=22)
        assert same(state_of(module), whole), where


@pytest.mark.parametrize("ranks", [2])
def test_two_ranks_that_are_killed_twice_end_as_if_they_had_not_been(ranks, tmp_path):
    # With real processes: both ranks die at one place, or one of them alone, by SIGKILL.
    def train_rank(rank, folder, dies=None, alone=False, seed=0):
        how = None if alone and rank == 0 else lambda: os.kill(os.getpid(), signal.SIGKILL)
        callback = Dies(*dies, how=how or (lambda: None)) if dies else None
        path = newest(folder)
        flags = dict(devices=ranks, strategy="ddp", k=2, n=48, steps=12)
        module, _, audit = train(folder, ckpt_path=path, dies=callback, seed=seed + rank, **flags)
        return state_of(module), audit.attempts, module.samples

    (whole, steps, _), other = (r.value for r in run_ranks(train_rank, ranks, args=(tmp_path / "whole",), timeout=120))
    assert steps == 12 and same(whole[:2], other[0][:2])
    rng = random.Random("two ranks, killed twice")
    for case in range(effort.cases(1, 12)):
        folder = tmp_path / f"{case}"
        for first, last in ((1, 23), (1, 3)):
            dies = (rng.randint(first, last), rng.choice(["start", "forward", "end"]))
            with pytest.raises((RankError, RankTimeout)):
                run_ranks(train_rank, ranks, args=(folder, dies, rng.random() < 0.5, case), timeout=30)
        again = [r.value for r in run_ranks(train_rank, ranks, args=(folder, None, False, 9), timeout=120)]
        assert same(again[0][0], whole)


MARKED = pytest.mark.filterwarnings("ignore:this checkpoint is saved in the middle of an update")


@MARKED
def test_an_update_that_was_cut_off_is_refused_and_said(tmp_path):
    saver = Dies(24, "after step", how=lambda: saver.trainer.save_checkpoint(tmp_path / "hook.ckpt"))
    callbacks = [ExactAccumulation(), SkipBadSteps(), ExactResume(), SetsTrainer(saver)]
    train(tmp_path / "whole", saves="every epoch", dies=saver, callbacks=callbacks)
    with pytest.raises(CheckpointError, match="in the middle of an update"):
        train(tmp_path / "again", ckpt_path=tmp_path / "hook.ckpt")
    callbacks = [ExactAccumulation(), SkipBadSteps(), ExactResume(strict=False)]
    with pytest.warns(UserWarning, match="in the middle of an update"):
        train(tmp_path / "again", ckpt_path=tmp_path / "hook.ckpt", callbacks=callbacks)


class SetsTrainer(Callback):
    def __init__(self, of):
        self.of = of

    def setup(self, trainer, pl_module, stage):
        self.of.trainer = trainer


def test_an_exception_in_the_middle_of_an_update_leaves_the_last_good_file(tmp_path):
    whole = state_of(train(tmp_path / "whole")[0])
    with pytest.raises(Killed):
        train(tmp_path / "cut", saves="an exception", dies=Dies(24, "after step"))
    refused = []
    assert same(state_of(resume(tmp_path / "cut", refused, saves="an exception", seed=5)[0]), whole)
    assert refused == []


def test_an_update_in_which_a_hook_saves_is_told_of_at_once_and_is_not_said_to_be_an_exceptions(tmp_path):
    saves = Dies(3, "after step", how=lambda: saves.trainer.save_checkpoint(tmp_path / "hook.ckpt"))
    saves.trainer = trainer = quiet_trainer(max_epochs=1, callbacks=[saves, ExactResume()])
    with pytest.warns(UserWarning, match="a resume will refuse it. Save in a callback that derives from"):
        trainer.fit(CountingModule(), ResumableDataLoader(range(8), 2))
    again = quiet_trainer(max_epochs=1, callbacks=[ExactResume()])
    with pytest.raises(CheckpointError, match="in the middle of an update, by an exception or by a hook"):
        again.fit(CountingModule(), ResumableDataLoader(range(8), 2), ckpt_path=tmp_path / "hook.ckpt")


@MARKED
def test_a_refusal_saves_nothing_and_the_next_exception_does_again(tmp_path):
    class Raises(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            raise Killed

    saves = Dies(3, "after step", how=lambda: saves.trainer.save_checkpoint(tmp_path / "on_exception.ckpt"))
    saves.trainer = trainer = quiet_trainer(max_epochs=1, callbacks=[saves, ExactResume()])
    trainer.fit(CountingModule(), ResumableDataLoader(range(8), 2))
    refused = (tmp_path / "on_exception.ckpt").read_bytes()

    on_exception = [OnExceptionCheckpoint(tmp_path), ModelCheckpoint(tmp_path, save_on_exception=True)]

    def fit(**arguments):
        callbacks = [*on_exception, ExactResume(), Raises()]
        trainer = quiet_trainer(max_epochs=1, callbacks=callbacks)
        trainer.fit(CountingModule(), ResumableDataLoader(range(8), 2), **arguments)

    with pytest.raises(CheckpointError, match="in the middle of an update"):
        fit(ckpt_path=tmp_path / "on_exception.ckpt")
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["on_exception.ckpt"]
    assert (tmp_path / "on_exception.ckpt").read_bytes() == refused

    (tmp_path / "on_exception.ckpt").unlink()
    with pytest.raises(Killed):
        fit()
    assert (tmp_path / "on_exception.ckpt").exists()


def test_a_checkpoint_inside_a_window_of_another_run_is_refused(tmp_path):
    # Saved by a Trainer alone, after 6 of 16 micro-batches; 4 make a window.
    class SavesAtSix(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 5:
                trainer.save_checkpoint(tmp_path / "six.ckpt")

    module, loader = Means(), ResumableDataLoader(range(32), 2, shuffle=True)
    quiet_trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=[SavesAtSix()]).fit(module, loader)
    told = r"after 2 of its 4 micro-batches \(4 samples\), by a run without ExactResume"

    def resume_with(*callbacks):
        resumed, module = quiet_trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=[*callbacks]), Means()
        resumed.fit(module, loader, ckpt_path=tmp_path / "six.ckpt", weights_only=False)
        return module.seen

    with pytest.raises(CheckpointError, match=told):
        resume_with(ExactResume())
    for callback in (ExactResume(strict=False), StepAudit(), ExactAccumulation(), SkipBadSteps()):
        with pytest.warns(UserWarning, match=told) as warned, contextlib.suppress(ValueError):
            assert resume_with(callback) == module.seen[12:]
        assert sum("by a run without" in str(one.message) for one in warned) == 1


@pytest.mark.parametrize("may_save", [True, False])
def test_a_run_that_may_lose_a_window_is_told_once_at_its_start(may_save, tmp_path, recwarn):
    saver = ModelCheckpoint(tmp_path, save_on_exception=may_save, every_n_train_steps=1)
    callbacks = [StepAudit(), SkipBadSteps(), saver]
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=callbacks)
    trainer.fit(Means(), ResumableDataLoader(range(8), 2))
    told = [str(one.message) for one in recwarn if "may save within a window of 2" in str(one.message)]
    assert len(told) == may_save


class Means(CountingModule):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.windows = []

    def training_step(self, batch):
        self.seen += batch.tolist()
        self.windows.append(self.trainer.accumulate_grad_batches)
        return super().training_step(batch)

    def validation_step(self, batch):
        pass


@pytest.mark.parametrize("flags", [dict(max_epochs=3), dict(max_epochs=-1, max_steps=10)])
def test_a_run_that_is_told_to_stop_within_an_epoch_goes_on_there(flags, tmp_path):
    class StopsAtSix(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.current_epoch == 1 and batch_idx == 5

    def fit(*callbacks, ckpt_path=None):
        module, loader = Means(), ResumableDataLoader(range(32), 2, shuffle=True)
        trainer = quiet_trainer(accumulate_grad_batches=4, callbacks=[ExactResume(), *callbacks], **flags)
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False)
        return module, trainer

    whole, _ = fit()
    stopped, trainer = fit(StopsAtSix())
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed, _ = fit(ckpt_path=tmp_path / "stopped.ckpt")
    assert stopped.seen[: (16 + 4) * 2] + resumed.seen == whole.seen  # the window that was cut off is trained again
    assert torch.equal(resumed.weight, whole.weight)


def test_an_epoch_that_max_epochs_leaves_out_is_refused(tmp_path):
    # Lightning alone returns at once, and a second fit would train what is left of that epoch but for a batch.
    def fit(max_epochs, *callbacks, ckpt_path=None):
        module, loader = Means(), ResumableDataLoader(range(12), 2, shuffle=True)
        trainer = quiet_trainer(max_epochs=max_epochs, callbacks=[ExactResume(), *callbacks])
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False)
        return module

    class SavesWithinEachEpoch(Checkpoint):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:
                trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

        def on_train_epoch_start(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"start of {trainer.current_epoch}.ckpt")

    whole = fit(3, SavesWithinEachEpoch())
    with pytest.raises(CheckpointError, match=r"within epoch 2, and Trainer\(max_epochs=2\) .* Take max_epochs=3 or"):
        fit(2, ckpt_path=tmp_path / "2.ckpt")
    assert fit(3, ckpt_path=tmp_path / "2.ckpt").seen == whole.seen[32:]
    assert fit(-1, StopsAtEpoch(3), ckpt_path=tmp_path / "2.ckpt").seen == whole.seen[32:]
    assert fit(2, ckpt_path=tmp_path / "start of 2.ckpt").seen == []  # two epochs are what it had asked for
    assert fit(2, ckpt_path=tmp_path / "1.ckpt").seen == whole.seen[20:24]


class StopsAtEpoch(Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 == self.epoch


def test_a_schedule_of_windows_goes_on_within_an_epoch(tmp_path):
    def fit(*callbacks, ckpt_path=None):
        module, loader = Means(), ResumableDataLoader(range(32), 2, shuffle=True)
        windows = GradientAccumulationScheduler({0: 1, 1: 4})
        trainer = quiet_trainer(max_epochs=2, callbacks=[windows, ExactResume(), *callbacks])
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False)
        return module

    class Saves(Checkpoint):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}-{batch_idx}.ckpt")

    whole = fit(Saves())
    for place, left in (("0-5", 26), ("0-15", 16), ("1-7", 8), ("1-9", 8)):
        resumed = fit(ckpt_path=tmp_path / f"{place}.ckpt")
        assert resumed.windows == whole.windows[-left:], place
        assert torch.equal(resumed.weight, whole.weight)


def test_a_callback_of_others_may_keep_a_list(tmp_path):
    class KeepsAList(Callback):
        def state_dict(self):
            return [1, 2]

    def fit(max_epochs, ckpt_path=None):
        trainer = quiet_trainer(max_epochs=max_epochs, callbacks=[KeepsAList(), ExactResume()])
        trainer.fit(CountingModule(), ResumableDataLoader(range(8), 2), ckpt_path=ckpt_path, weights_only=False)
        return trainer

    fit(1).save_checkpoint(tmp_path / "first.ckpt")
    assert fit(2, tmp_path / "first.ckpt").global_step == 8


@pytest.mark.parametrize("k", [1, 4])
def test_a_checkpoint_of_an_epochs_start_loses_no_batch(k, tmp_path):
    class Saves(Checkpoint):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    def fit(*callbacks, ckpt_path=None):
        module, loader = Means(), ResumableDataLoader(range(12), 2, shuffle=True)
        trainer = quiet_trainer(max_epochs=3, accumulate_grad_batches=k, callbacks=[ExactResume(), *callbacks])
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False)
        return module

    whole = fit(Saves())
    with pytest.raises(CheckpointError, match="ahead of the first step of its run"):
        fit(ckpt_path=tmp_path / "0.ckpt")
    for epoch in (1, 2):
        resumed = fit(ckpt_path=tmp_path / f"{epoch}.ckpt")
        assert resumed.seen == whole.seen[12 * epoch :]
        assert torch.equal(resumed.weight, whole.weight)


def test_a_loader_that_does_not_know_its_position_is_refused_within_an_epoch(tmp_path):
    def fit(*callbacks, ckpt_path=None):
        module = Means()
        trainer = quiet_trainer(max_epochs=2, callbacks=[*callbacks])
        trainer.fit(module, DataLoader(range(12), 2), ckpt_path=ckpt_path, weights_only=False)
        return module.seen

    class Saves(Checkpoint):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}-{batch_idx}.ckpt")

    fit(Saves(), ExactResume())
    within, at_end = tmp_path / "0-2.ckpt", tmp_path / "0-5.ckpt"
    with pytest.raises(CheckpointError, match="after 3 batches, and a DataLoader does not know where it was"):
        fit(ExactResume(), ckpt_path=within)
    with pytest.warns(UserWarning, match="a DataLoader does not know where it was"):
        fit(ExactResume(strict=False), ckpt_path=within)
    assert fit(ExactResume(), ckpt_path=at_end) == list(range(12))


@pytest.mark.parametrize("flags", [dict(accumulate_grad_batches=3), dict(windows={0: 1, 1: 2})])
def test_lbfgs_with_windows_is_refused_before_a_batch_is_trained(flags):
    class WithLBFGS(Means):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    module, flags = WithLBFGS(), dict(flags)
    windows = flags.pop("windows", None)
    callbacks = [ExactResume(), *([GradientAccumulationScheduler(windows)] if windows else [])]
    trainer = quiet_trainer(max_epochs=2, callbacks=callbacks, **flags)
    with pytest.raises(MisconfigurationException, match="LBFGS evaluates the loss many times a step"):
        trainer.fit(module, DataLoader(range(12), 2))
    assert module.seen == []


def test_sigterm_saves_what_can_be_resumed(tmp_path):
    whole = state_of(train(tmp_path / "whole")[0])
    dies = Dies(22, "forward", how=lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SIGTERMException):
        train(tmp_path / "cut", saves="an exception", dies=dies)
    assert same(state_of(resume(tmp_path / "cut", REFUSED, saves="an exception", seed=5)[0]), whole)


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "sequential"])
def test_what_it_cannot_resume_it_refuses(mode):
    trainer = quiet_trainer(max_epochs=1, callbacks=[ExactResume()])
    loaders = CombinedLoader([ResumableDataLoader(range(20), 2), ResumableDataLoader(range(12), 2)], mode)
    with pytest.raises(MisconfigurationException, match=r"reads a ResumableDataLoader.*\(batches: 10, 6\)"):
        trainer.fit(CountingModule(), loaders)
    assert trainer.global_step == 0


def test_loaders_of_two_lengths_are_taken_where_no_epoch_goes_on_behind_the_shorter_one():
    for mode, limit in (("min_size", 1.0), ("max_size_cycle", 6)):
        trainer = quiet_trainer(max_epochs=1, callbacks=[ExactResume()], limit_train_batches=limit)
        loaders = CombinedLoader([ResumableDataLoader(range(20), 2), ResumableDataLoader(range(12), 2)], mode)
        trainer.fit(CountingPairs(), loaders)
        assert trainer.global_step == 6


class CountingPairs(CountingModule):
    def training_step(self, batches):
        return super().training_step(batches[0])


def test_the_generators_of_training_are_a_function_of_the_place_in_the_run(tmp_path):
    # Neither what the process has drawn before, nor a validation, moves them; each window has its own.
    class Draws(CountingModule):
        def __init__(self, validates):
            super().__init__()
            self.draws, self.validates = [], validates

        def training_step(self, batch):
            self.draws.append((torch.rand(()).item(), random.random(), float(np.random.rand())))  # noqa: NPY002
            return super().training_step(batch)

        def validation_step(self, batch):
            if self.validates:
                torch.rand(7)

    def draws(seed, validates, *callbacks):
        torch.manual_seed(5)
        module = Draws(validates)
        trainer = quiet_trainer(max_epochs=2, callbacks=[*callbacks], val_check_interval=2, num_sanity_val_steps=seed)
        trainer.fit(module, DataLoader(range(8), 2), DataLoader(range(4), 2))
        return module.draws

    with_it = draws(0, False, ExactResume())
    assert draws(2, True, ExactResume()) == with_it
    assert len(set(with_it)) == len(with_it) == 8
    assert draws(2, True) != draws(0, False)
