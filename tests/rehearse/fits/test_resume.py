"""A rehearsal's resume: when a run saves, what its loader does after it, and what a checkpoint does not hold."""

from datetime import timedelta

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from course_lib.resume import ResumableDataLoader
from rehearse import rehearse
from rehearse._checkpoints import saves_of
from tests.rehearse.fits.parts import Net, Points, fitted, loader, quiet_trainer, script, scripts
from tests.rehearse.fits.resuming import Validated, killed_and_resumed, saves

BESIDE = ["workers", "window", "bad_step", "growth", "dealing", "order"]
"""Checks that are left out here."""


def resume_findings(trainer, model, data, *, deep):
    report = rehearse(trainer, model, data, deep=deep, skip=BESIDE)
    assert "resume" in report.passed or report.findings, str(report)
    return [finding.says for finding in report.findings if finding.check == "resume"]


# ------------------------------------------------------------------------------------------------- oracle: a real fit


class Tells(ModelCheckpoint):
    """Tells in which epoch, and after how many of its batches, it saved."""

    def _save_checkpoint(self, trainer, filepath):
        self.saved = [*getattr(self, "saved", []), self.place(trainer)]
        self._last_global_step_saved = trainer.global_step

    @staticmethod
    def place(trainer):
        return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("batches", [7, 8])
@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, {}),
        ({"every_n_train_steps": 1}, {}),
        ({"every_n_train_steps": 3}, {}),
        ({"every_n_train_steps": 3}, {"accumulate_grad_batches": 2}),
        ({"every_n_train_steps": 4}, {"accumulate_grad_batches": 2}),
        ({"every_n_train_steps": 5}, {"accumulate_grad_batches": 3}),
        ({"every_n_train_steps": 20}, {}),
        ({}, {"val_check_interval": 3}),
        ({}, {"val_check_interval": 0.5}),
        ({}, {"val_check_interval": 7}),
        ({}, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
        ({"save_top_k": 0}, {"val_check_interval": 3}),
        ({"save_on_train_epoch_end": True}, {"val_check_interval": 3}),
        ({"monitor": "val"}, {"val_check_interval": 2, "accumulate_grad_batches": 4}),
    ],
)
def test_when_a_run_saves_first_within_an_epoch(options, flags, batches, tmp_path):
    callback = Tells(dirpath=tmp_path, **options)
    trainer = quiet_trainer(callbacks=[callback], enable_checkpointing=True, num_sanity_val_steps=0, **flags)
    model = Validated(loader(8))
    k = flags.get("accumulate_grad_batches", 1)
    said = [first for way in saves_of(trainer, model) if (first := way.first_within_epoch(batches, k))]
    cut = any(way.may_cut_a_window(batches, k) for way in saves_of(trainer, model))
    fitted(trainer, model, loader(8 * batches))
    within = [(epoch, batch) for epoch, batch in getattr(callback, "saved", []) if batch < batches]
    assert [first for first in said if first[0] < 3] == within[:1]
    assert cut == any(batch % k for _, batch in within)


@pytest.mark.thorough
@pytest.mark.parametrize("option", [{"train_time_interval": timedelta(seconds=30)}, {"save_on_exception": True}])
def test_what_time_or_chance_decides_may_fall_anywhere(option):
    trainer = quiet_trainer(callbacks=[saves(**option)], enable_checkpointing=True)
    chance, *_ = saves_of(trainer, Net())
    assert chance.first_within_epoch(8, 4) == (0, 5) and chance.may_cut_a_window(8, 4)
    [says] = resume_findings(trainer, Net(), loader(), deep=False)
    assert next(iter(option)) in says and "after 4 micro-batches of epoch 0" in says


# ----------------------------------------------------------------------------------------------------- right runs


MAY_NOT_BE_JUDGED = {"22_two_loaders", "35_windows_across_epochs", "45_exact_resume"}
"""From two loaders, of four windows in all, and one that refuses to resume within an epoch."""
HOLDS_MORE = {"43_schedule_of_the_module": "resumed goes on to weights that differ"}
"""Right until it is stopped: its own schedule is in no checkpoint."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", scripts("right"))
def test_a_right_run_resumes_from_its_checkpoints(name, tmp_path):
    right = script("right", name)
    if getattr(right, "LOOP", False):
        return
    trainer, model, data = right.make_run()
    trainer.callbacks.append(ModelCheckpoint(tmp_path))
    report = rehearse(trainer, model, data, deep=True, skip=BESIDE)
    if name in HOLDS_MORE:
        [finding] = report.findings
        assert finding.check == "resume" and HOLDS_MORE[name] in finding.says
    else:
        assert report.ok and ("resume" in report.passed or name in MAY_NOT_BE_JUDGED), str(report)
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------- streams


class Numbers(IterableDataset):
    def __iter__(self):
        return iter([Points(64)[index] for index in range(64)])


class Sized(Numbers):
    def __len__(self):
        return 64


class Stateful(DataLoader):
    """A stream that goes on behind the batches that it gave."""

    given = 0

    def __iter__(self):
        skipped = self.given
        for number, batch in enumerate(super().__iter__()):
            if number >= skipped:
                self.given = number + 1
                yield batch
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("data", "says", "trained"),
    [
        (DataLoader(Sized(), 8), "it starts over, and 3 batches are trained again", 40),
        (Stateful(Numbers(), 8), "goes on 1 batch later", 56),
        (Stateful(Sized(), 8), "", 64),
    ],
)
def test_a_stream_is_resumed(data, says, trained):
    trainer = quiet_trainer(callbacks=[saves(every_n_train_steps=3)], enable_checkpointing=True)
    found = resume_findings(trainer, Net(), data, deep=False)
    assert len(found) == bool(says) and says in "".join(found)
    samples, _, _ = killed_and_resumed(trainer, Net(), data, at=4)
    assert len(set(samples)) == trained


# ----------------------------------------------------------------------------------------------------- corrupt states


class ForgetsItsState(ResumableDataLoader):
    def state_dict(self):
        state = super().state_dict()
        del state["epoch"]
        return state


@pytest.mark.thorough
def test_a_loader_state_that_cannot_be_loaded():
    trainer = quiet_trainer(callbacks=[saves(every_n_train_steps=3)], enable_checkpointing=True)
    data = ForgetsItsState(Points(), batch_size=8, shuffle=True)
    [says] = resume_findings(trainer, Net(), data, deep=False)
    assert "cannot be loaded" in says and "epoch" in says


class Misspelt(Callback):
    """Asks for another name than it saves."""

    def __init__(self, name):
        self.name = name
        self.steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state[self.name]


class LeavesOut(Net):
    """Leaves its head out of the checkpoint, as if it were frozen."""

    def on_save_checkpoint(self, checkpoint):
        del checkpoint["state_dict"]["head.weight"]


class Average(Net):
    """Averages its head's bias in a buffer, which is in the checkpoint or is not."""

    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("scale", torch.ones(1), persistent=persistent)

    def training_step(self, batch, batch_idx):
        self.scale += 1
        return super().training_step(batch, batch_idx) * self.scale


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "callback", "says"),
    [
        (Net(), Misspelt("step"), "cannot be loaded: KeyError: 'step'"),
        (Net(), Misspelt("steps"), ""),
        (LeavesOut(), Misspelt("steps"), "Missing key(s) in state_dict"),
        (Average(persistent=False), Misspelt("steps"), "has not got back scale"),
        (Average(persistent=True), Misspelt("steps"), ""),
    ],
)
def test_a_checkpoint_that_does_not_hold_what_a_resume_needs(model, callback, says):
    trainer = quiet_trainer(callbacks=[callback, saves()], enable_checkpointing=True)
    found = resume_findings(trainer, model, loader(), deep=True)
    assert len(found) == bool(says) and says in "".join(found)
