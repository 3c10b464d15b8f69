"""Runs that cannot be tried as a whole are judged as far as it goes; nothing hangs, nothing is written."""

import io
import multiprocessing
import os
import threading
import time
from itertools import count

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset, Sampler

from rehearse import CHECKS, rehearse
from rehearse.runs import copies
from rehearse.runs.copies import try_on_copies
from tests.rehearse.fits.parts import Net, Points, loader, quiet_trainer
from tests.rehearse.fits.resuming import saves


class NeedsALogger(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"loss": loss.item()}, step=batch_idx)
        self.logger.experiment.add_scalar("loss", loss)
        return loss


class NeedsTheTrainer(Net):
    def training_step(self, batch, batch_idx):
        share = self.trainer.global_step / self.trainer.estimated_stepping_batches
        assert self.trainer.log_dir is None or self.trainer.log_dir
        return super().training_step(batch, batch_idx) * (1 - share / 2) * len(self.trainer.callbacks) ** 0


class Downloads(LightningDataModule):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def prepare_data(self):
        (self.folder / "data").write_text("downloaded")

    def train_dataloader(self):
        return loader()


class NotThereYet(Downloads):
    def setup(self, stage):
        (self.folder / "data").read_text()


class Huge(Points):
    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        return super().__getitem__(index % 64)


class Endless(IterableDataset):
    def __iter__(self):
        return (Points(1)[0] for _ in count())


class OnAGpu(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step([part.to("cuda:63") for part in batch], batch_idx)


class NoLength(Sampler):
    def __iter__(self):
        return iter(range(64))


DEALT = {"dealing", "order", "changes"}
STEPPED = {"setup", "bad_step", "growth", "resume"}
RUNS = {
    "a logger": (NeedsALogger, loader, set(), set(), {"setup", "length", "dealing", "bad_step", "growth"}),
    "a Trainer": (NeedsTheTrainer, loader, set(), set(), {"setup", "length", "dealing", "growth", "resume"}),
    "a data module that downloads": (Net, Downloads, set(), set(), {"setup", "length", "dealing"}),
    "data that is not there yet": (Net, NotThereYet, set(CHECKS), set(), set()),
    "10**9 samples": (Net, lambda: DataLoader(Huge(), 8), DEALT, set(), {"length", "setup"}),
    "10**9 shuffled samples": (Net, lambda: DataLoader(Huge(), 8, shuffle=True), DEALT, set(), {"length"}),
    "an endless stream": (Net, lambda: DataLoader(Endless(), 8), set(), {"order", "changes"}, {"setup"}),
    "a model for a GPU": (OnAGpu, loader, STEPPED, set(), {"length", "horizon", "dealing", "order"}),
    "no length": (Net, lambda: DataLoader(Points(), 8, sampler=NoLength()), set(), {"length", "horizon"}, {"order"}),
    "no scheduler": (Net, loader, set(), set(), {"horizon", "length", "setup"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*RUNS])
def test_a_run_is_judged_as_far_as_it_goes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, make_data, failed, unjudged, passed = RUNS[name]
    data = make_data(tmp_path) if isinstance(make_data, type) else make_data()
    flags = {"max_steps": 50, "max_epochs": -1} if name == "an endless stream" else {}
    logger = CSVLogger(tmp_path / "logs") if name == "a logger" else False
    callbacks = [saves(save_last=True)]
    trainer = quiet_trainer(logger=logger, enable_checkpointing=True, callbacks=callbacks, **flags)
    report = rehearse(trainer, model(), data, deep=True, seconds=10)
    assert report.ok is (None if failed else True), str(report)
    assert failed == set(report.failed), str(report)
    judged = set(report.passed) | set(report.not_judged)
    assert judged == set(CHECKS) and all(report.not_judged.values())
    assert unjudged <= set(report.not_judged) and passed <= set(report.passed), str(report)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_run_without_data_is_refused_as_the_fit_is():
    [finding] = rehearse(quiet_trainer(), Net()).findings
    assert finding.check == "setup" and "`train_dataloader` must be implemented" in finding.says


class HangsInSamples(Points):
    def __getitem__(self, index):
        time.sleep(60)


class HangsInOrders(Sampler):
    def __iter__(self):
        time.sleep(60)
        yield 0

    def __len__(self):
        return 64


HANGS = [
    (lambda: DataLoader(HangsInSamples(), 8), {"setup", "bad_step", "growth", "resume"}, {"dealing"}),
    (lambda: DataLoader(HangsInSamples(), 8, num_workers=1), {"workers", "setup"}, {"length", "order"}),
    (lambda: DataLoader(Points(), 8, sampler=HangsInOrders()), {"dealing", "order", "setup"}, {"length"}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("data", "unjudged", "passed"), HANGS)
def test_a_hang_ends_with_its_seconds(data, unjudged, passed):
    began = time.monotonic()
    trainer = quiet_trainer(callbacks=[saves()], enable_checkpointing=True)
    report = rehearse(trainer, Net(), data(), deep=True, seconds=4)
    assert report.ok is None and passed <= set(report.passed), str(report)
    hung = {name for name, why in report.not_judged.items() if why == "it did nothing for 4 s"}
    if report.not_judged.get("growth") == "it did not finish in 4 s":
        hung.add("growth")  # which first looks at all objects: on a busy machine that may take its CPU time
    assert hung >= unjudged, str(report)
    assert time.monotonic() - began < 200  # a hang is of 60 s for each sample


# ------------------------------------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stream", "after", "switch", "shown"),
    [
        (Terminal(), 0.0, "1", True),
        (Terminal(), 60.0, "1", False),
        (Terminal(), 0.0, "0", False),
        (io.StringIO(), 0.0, "1", False),
    ],
)
def test_progress_is_shown_to_who_waits(stream, after, switch, shown, monkeypatch):
    monkeypatch.setenv("REHEARSE_PROGRESS", switch)
    monkeypatch.setattr(copies, "AFTER_SECONDS", after)
    monkeypatch.setattr("sys.stderr", stream)
    rehearse(quiet_trainer(), Net(), loader())
    lines = stream.getvalue().splitlines()
    assert bool(lines) == shown
    assert not shown or (len(lines) == 4 and "(length, horizon, setup)" in lines[0] and "resume" in lines[-1])


@pytest.mark.thorough
def test_a_step_that_takes_long_is_named_while_it_is_waited_for(monkeypatch):
    class Slow(Net):
        def training_step(self, batch, batch_idx):
            time.sleep(60)

    stream = Terminal()
    monkeypatch.setenv("REHEARSE_PROGRESS", "1")
    monkeypatch.setattr(copies, "AFTER_SECONDS", 1.0)
    monkeypatch.setattr("sys.stderr", stream)
    rehearse(quiet_trainer(), Slow(), loader(), seconds=3)
    assert "the start and the first windows" in stream.getvalue().splitlines()[0]


# ------------------------------------------------------------------------------------------------ what ends a trial


def sleeps(folder):
    time.sleep(60)


def deadlocks(folder):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_input(folder):
    reading, _ = os.pipe()
    os.read(reading, 1)


def asks_again_and_again(folder):
    while True:
        time.sleep(0.01)


def works(folder, seconds=60.0):
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass
    return "done"


def waits_for_a_worker(folder):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(works, (folder, 3.0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("trial", "why"),
    [
        (sleeps, "it did nothing for 2 s"),
        (deadlocks, "it did nothing for 2 s"),
        (waits_for_input, "it did nothing for 2 s"),
        (asks_again_and_again, "it did "),  # on a busy machine it waits for a core each time
        (works, "it did not finish in 2 s"),
    ],
)
def test_what_does_nothing_and_what_works_too_long_ends(trial, why):
    [answer] = try_on_copies([trial], seconds=2)
    assert answer.error.startswith(why) and answer.timed_out


@pytest.mark.thorough
def test_who_waits_for_its_worker_is_not_idle():
    [answer] = try_on_copies([waits_for_a_worker], seconds=6)
    assert answer.value == "done" and answer.error == ""


@pytest.mark.thorough
def test_what_is_judged_does_not_depend_on_how_busy_the_machine_is():
    with multiprocessing.get_context("fork").Pool(8) as pool:
        busy = [pool.apply_async(works, (None, 60.0)) for _ in range(8)]
        [answer] = try_on_copies([lambda folder: works(folder, 0.4)], seconds=1)  # some two seconds by the clock
        pool.terminate()
    assert answer.value == "done" and not any(result.ready() for result in busy)
