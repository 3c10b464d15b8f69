"""What a trial writes lands in its own folder and is read back from there; nothing of the reader's changes."""

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from rehearse import _own_files as own_files
from rehearse import judge, rehearse
from rehearse.runs.copies import try_on_copies
from tests.rehearse.fits.parts import Net, loader, quiet_trainer


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A reader's working directory, with a file, a folder and a database."""
    (tmp_path / "log.txt").write_text("before\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").write_text("1\n")
    with sqlite3.connect(tmp_path / "runs.db") as database:
        database.execute("create table runs (name text)")
    database.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, object]:
    """Of each file: what it holds, its mode, and when it was last written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        held = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (held, stat.st_mode, stat.st_mtime_ns)
    return found


def rows(path):
    with sqlite3.connect(path) as database:
        database.execute("insert into runs values ('trial')")
    return database.execute("select count(*) from runs").fetchone()[0]


def moved(folder):
    os.rename(folder / "data" / "x.txt", folder / "data" / "y.txt")
    return sorted(os.listdir(folder / "data")), (folder / "data" / "y.txt").read_text()


def removed(folder):
    os.remove(folder / "log.txt")
    shutil.rmtree(folder / "data")
    names = sorted(path.name for path in folder.iterdir())
    return (folder / "log.txt").exists(), (folder / "data").exists(), names


def appended(path):
    with open(path, "a") as file:
        file.write("after\n")
    return Path(path).read_text()


def saved(path):
    torch.save({"a": 1}, path)
    np.save(path.with_suffix(".npy"), np.arange(3))
    return torch.load(str(path)), np.load(path.with_suffix(".npy")).tolist(), path.exists()


def made(folder):
    (folder / "new" / "deep").mkdir(parents=True)
    (folder / "new" / "deep" / "a.txt").write_text("a")
    os.makedirs("data/cache", exist_ok=True)
    Path("data/cache/b.txt").write_text("b")
    walked = sorted(name for _, _, names in os.walk(folder) for name in names)
    return walked, sorted(os.listdir("data")), (folder / "data" / "cache" / "b.txt").read_text()


def in_the_temporary_folder(_):
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "a" / "b").mkdir(parents=True)
        (Path(name) / "a" / "b" / "c.txt").write_text("c")
        found = [path.name for path in Path(name).rglob("*")]
    return sorted(found), Path(name).exists()


def by_a_process(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


TRIES = {
    "append": (lambda folder: appended("log.txt"), "before\nafter\n"),
    "append by its whole path": (lambda folder: appended(folder / "log.txt"), "before\nafter\n"),
    "torch.save": (lambda folder: saved(folder / "weights.pt"), ({"a": 1}, [0, 1, 2], True)),
    "mkdir": (
        made,
        (["a.txt", "b.txt", "log.txt", "runs.db", "x.txt"], ["cache", "x.txt"], "b"),
    ),
    "a temporary folder": (in_the_temporary_folder, (["a", "b", "c.txt"], False)),
    "rename": (moved, (["y.txt"], "1\n")),
    "remove": (removed, (False, False, ["runs.db"])),
    "sqlite": (lambda folder: rows("runs.db"), 1),
    "sqlite by its whole path": (lambda folder: rows(str(folder / "runs.db")), 1),
    "a subprocess": (lambda folder: by_a_process("echo new > new.txt; cat new.txt data/x.txt"), "new\n1\n"),
    "a subprocess of Python": (
        lambda folder: by_a_process(
            f"{sys.executable} -c \"open('a.txt', 'w').write('a'); print(open('a.txt').read())\""
        ),
        "a\n",
    ),
}


def listed(folder):
    """As fsspec does: the entries' paths are held against the folder's."""
    (folder / "data" / "y.txt").write_text("2\n")
    (folder / "new").mkdir()
    entries = [*os.scandir(folder / "data"), *os.scandir(b"data"), *os.scandir("data"), *os.scandir()]
    kinds = {entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)}
    room = [os.statvfs(folder / "new").f_namemax > 0, shutil.disk_usage(folder / "new").total > 0]
    return {os.fspath(entry) for entry in entries}, kinds, room


def test_entries_have_the_path_of_the_folder_that_was_asked_for(mine):
    [answer] = try_on_copies([lambda _: listed(mine)], seconds=20)
    assert answer.error == ""
    paths, kinds, room = answer.value
    own = [f"{mine}/data/x.txt", f"{mine}/data/y.txt", b"data/x.txt", b"data/y.txt", "data/x.txt", "data/y.txt"]
    assert paths == {*own, "./data", "./log.txt", "./new", "./runs.db"}
    assert (kinds, room) == ({"data", "new"}, [True, True])


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRIES)
def test_what_is_written_is_read_back_and_nothing_changes(name, mine):
    write, expected = TRIES[name]
    before = contents(mine)
    [answer] = try_on_copies([lambda _: write(mine)], seconds=20)
    assert answer.error == "" and answer.value == expected
    assert contents(mine) == before


@pytest.mark.parametrize(
    "command", ["echo x >> log.txt", "echo x > {}/new.txt", "rm {}/log.txt", "mv {}/data {}/other"]
)
def test_what_a_subprocess_aims_at_the_readers_files_is_refused(command, mine):
    before = contents(mine)
    command = command.replace("{}", str(mine))
    [answer] = try_on_copies([lambda _: subprocess.run(command, shell=True).returncode], seconds=20)
    refused = answer.value != 0 and contents(mine) == before
    assert refused == bool(own_files.landlock_version())


def test_a_path_that_python_was_not_redirected_for_is_refused(mine):
    from os import mkdir

    before = contents(mine)
    [answer] = try_on_copies([lambda _: mkdir(mine / "new")], seconds=20)
    assert "was not allowed to write to" in answer.error and contents(mine) == before


class Writes(Net):
    """Appends to a file in each step, saves by torch, keeps a database, and asks a process to write."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def training_step(self, batch, batch_idx):
        appended(self.folder / "log.txt")
        rows(self.folder / "runs.db")
        subprocess.run("echo step >> steps.txt", shell=True, check=True)
        assert Path("steps.txt").read_text().startswith("step")
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        saved(self.folder / "weights.pt")
        folder = Path(self.trainer.log_dir or ".") / "pictures"
        folder.mkdir()
        (folder / "a.png").write_bytes(b"a")


class Caches(LightningDataModule):
    """Makes its data once, and reads it from a file from then on."""

    def __init__(self, folder):
        super().__init__()
        self.file = folder / "cache" / "points.pt"

    def setup(self, stage):
        if not self.file.exists():
            self.file.parent.mkdir()
            torch.save(torch.randn(64, 4), self.file)
        self.points = torch.load(self.file)

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.points, self.points.sum(1, keepdim=True), torch.arange(64)), 8)


@pytest.mark.thorough
@pytest.mark.parametrize("logs", [False, True])
def test_a_run_that_writes_is_judged(logs, mine):
    before = contents(mine)
    logger = CSVLogger(mine / "logs") if logs else False
    report = rehearse(quiet_trainer(logger=logger, default_root_dir=mine), Writes(mine), Caches(mine))
    assert report.ok is True and "setup" in report.passed, str(report)
    assert contents(mine) == before


class SavesItsSettings(Callback):
    """As Lightning's command line does."""

    def setup(self, trainer, pl_module, stage):
        assert trainer.log_dir is not None
        path = Path(trainer.log_dir) / "config.yaml"
        assert not path.exists()
        path.write_text("seed: 1")


@pytest.mark.thorough
@pytest.mark.parametrize("logger", [True, False])
def test_a_callback_that_saves_into_the_log_folder_is_judged(logger, mine):
    before = contents(mine)
    report = rehearse(quiet_trainer(logger=logger, callbacks=[SavesItsSettings()]), Net(), loader())
    assert report.ok is True, str(report)
    assert contents(mine) == before


@pytest.mark.thorough
def test_a_kernel_without_landlock_is_told(monkeypatch):
    monkeypatch.setattr(judge, "landlock_version", lambda: 0)
    report = rehearse(quiet_trainer(), Net(), loader())
    assert any("Landlock" in note for note in report.notes) and report.ok is True
