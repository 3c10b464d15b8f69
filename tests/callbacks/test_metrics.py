"""A run that is resumed within an epoch: the metrics that training gathers are those of the whole epoch, or refused."""

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader

from course_lib.callbacks import CheckpointError, ExactResume
from course_lib.launch import RankError, run_ranks
from course_lib.resume import ResumableDataLoader
from tests.trainer_oracle import CountingModule, quiet_trainer


class Logs(CountingModule):
    def __init__(self):
        super().__init__()
        self.gathers = torchmetrics.MeanMetric()

    def training_step(self, batch):
        loss = super().training_step(batch) + torch.sin(batch.float()).mean()
        for reduce_fx in ("mean", "max", "min", "sum"):
            self.log(reduce_fx, loss, on_step=reduce_fx == "max", on_epoch=True, reduce_fx=reduce_fx)
        self.gathers.update(loss)
        self.log("gathers", self.gathers, on_step=False, on_epoch=True)
        return loss


class Watches(Callback):
    """What is known at each epoch's end; saves behind each micro-batch, and can end the run there."""

    def __init__(self, folder, ends_after=None):
        self.folder, self.ends_after, self.seen = folder, ends_after, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / "newest.ckpt")
        if batch_idx == self.ends_after:
            raise KeyboardInterrupt

    def on_train_epoch_end(self, trainer, pl_module):
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.seen[trainer.current_epoch] = {name: metrics[name] for name in metrics if name != "gathers"}


def train(folder, *callbacks, ends_after=None, resumes=False):
    watches = Watches(folder, ends_after)
    trainer = quiet_trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[ExactResume(), watches, *callbacks])
    try:
        loader = ResumableDataLoader(range(11), 2, shuffle=True)
        trainer.fit(Logs(), loader, ckpt_path=folder / "newest.ckpt" if resumes else None)
    except (KeyboardInterrupt, SystemExit):
        pass
    return watches.seen


@pytest.mark.thorough
def test_they_are_those_of_the_whole_epoch_after_any_number_of_resumes(tmp_path):
    whole = train(tmp_path)
    for stop, again in ((0, 1), (1, 2), (2, 2), (4, 4)):
        train(tmp_path, ends_after=stop)
        train(tmp_path, ends_after=again, resumes=True)
        seen = train(tmp_path, resumes=True)
        assert seen and seen == {epoch: whole[epoch] for epoch in seen}, stop


def test_one_that_gathers_by_itself_is_refused_where_a_stop_goes_by_it(tmp_path):
    train(tmp_path, ends_after=2)
    with pytest.raises(CheckpointError, match="goes by gathers, a mean over all of the epoch's batches"):
        train(tmp_path, EarlyStopping("gathers"), resumes=True)
    train(tmp_path, EarlyStopping("mean"), resumes=True)


@pytest.mark.thorough
def test_what_two_ranks_have_gathered_is_refused_where_a_stop_goes_by_it(tmp_path):
    class SavesAtThree(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "three.ckpt")

    def train_rank(rank, path=None):
        stop = EarlyStopping("mean", check_on_train_epoch_end=True)
        callbacks = [ExactResume(), stop, SavesAtThree()]
        trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=1, callbacks=callbacks)
        trainer.fit(Logs(), ResumableDataLoader(range(20), 2), ckpt_path=path)

    run_ranks(train_rank, 2)
    with pytest.raises(RankError, match="what several ranks, or a"):
        run_ranks(train_rank, 2, args=(tmp_path / "three.ckpt",))


class Validates(Logs):
    """Within epochs of five batches, it validates behind the second and the fourth, and gets worse from the third."""

    def validation_step(self, batch):
        step = self.trainer.global_step
        self.log("val", torch.tensor(float(abs(step - 4))))


def validated_steps(folder, *callbacks, resumes=False):
    """How many optimizer steps a run made until it stopped early, and those behind which it validated."""
    seen, stop = [], EarlyStopping("val", patience=2)

    class Sees(Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(trainer.global_step)

    trainer = quiet_trainer(
        max_epochs=4,
        val_check_interval=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[ExactResume(), stop, Sees(), *callbacks],
    )
    try:
        loader, held_out = ResumableDataLoader(range(10), 2, shuffle=True), torch.utils.data.DataLoader(range(4), 4)
        trainer.fit(Validates(), loader, held_out, ckpt_path=folder / "newest.ckpt" if resumes else None)
    except (KeyboardInterrupt, SystemExit):
        pass
    return trainer.global_step, stop.wait_count, seen


class SavesAndEnds(Callback):
    def __init__(self, folder, step, in_validation):
        self.path, self.step, self.in_validation = folder / "newest.ckpt", step, in_validation

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and not self.in_validation:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if trainer.global_step == self.step and self.in_validation:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


@pytest.mark.thorough
def test_a_validation_that_was_due_is_made_when_the_run_is_resumed(tmp_path):
    whole = validated_steps(tmp_path)
    assert whole == (9, 2, [2, 4, 7, 9])
    for step, in_validation in ((1, False), (2, False), (2, True), (3, False), (4, False), (7, False), (7, True)):
        validated_steps(tmp_path, SavesAndEnds(tmp_path, step, in_validation))
        steps, waited, seen = validated_steps(tmp_path, resumes=True)
        assert (steps, waited) == whole[:2] and seen == [one for one in whole[2] if one >= step], (step, in_validation)


def test_an_end_of_an_epoch_that_is_yet_to_come_is_refused_where_a_stop_goes_by_it(tmp_path):
    validated_steps(tmp_path, SavesAndEnds(tmp_path, 5, False))
    with pytest.raises(CheckpointError, match="an EarlyStopping goes by a metric that is yet to come"):
        validated_steps(tmp_path, resumes=True)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*not what Hand.state_dict put into it")
def test_validations_within_a_window_that_is_trained_again_are_seen_once(tmp_path):
    class Hand(Callback):
        """Saves behind each micro-batch, and counts them, which nobody sets back."""

        seen = 0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seen += 1
            if not trainer.ckpt_path:
                trainer.save_checkpoint(tmp_path / f"{self.seen}.ckpt")

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state_dict):
            self.seen = state_dict["seen"]

    class Constant(CountingModule):
        def validation_step(self, batch):
            self.log("val", 1.0)

    def fit(ckpt_path=None):
        stop, hand, module = EarlyStopping("val", patience=8), Hand(), Constant()
        flags = dict(max_epochs=9, accumulate_grad_batches=4, val_check_interval=2)
        loader = ResumableDataLoader(torch.arange(20.0), batch_size=2)
        trainer = quiet_trainer(callbacks=[ExactResume(), stop, hand], **flags)
        trainer.fit(module, loader, DataLoader(range(4), 2), ckpt_path=ckpt_path, weights_only=False)
        return stop.wait_count, module.weight.item(), hand.seen

    whole = fit()
    assert whole[::2] == (8, 18)  # nine validations, of two micro-batches each
    for saved in (3, 7, 13):  # each behind a validation in its window
        resumed = fit(tmp_path / f"{saved}.ckpt")
        assert resumed[:2] == whole[:2]
        assert resumed[2] > whole[2]


def test_what_was_logged_last_is_known_when_the_run_goes_on(tmp_path):
    # Numbers alone: whoever writes into callback_metrics may put in anything, which no checkpoint must trip over.
    class Reads(CountingModule):
        def __init__(self):
            super().__init__()
            self.seen = []

        def training_step(self, batch):
            self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items() if value})
            self.log("batch", batch.double().sum())
            self.trainer.callback_metrics.update({"by hand": 1.5 * len(self.seen), "a name": None})
            return super().training_step(batch)

    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    def fit(*callbacks, ckpt_path=None):
        module, loader = Reads(), ResumableDataLoader(range(12), 2)
        trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=[ExactResume(), *callbacks])
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
        return module.seen

    whole = fit(Saves())
    assert whole[4] == {"batch": 6 + 7, "by hand": 1.5 * 4}
    for saved_behind, begins_with in {1: 2, 2: 2, 3: 4, 4: 4}.items():
        assert fit(ckpt_path=tmp_path / f"{saved_behind}.ckpt")[0] == whole[begins_with]
