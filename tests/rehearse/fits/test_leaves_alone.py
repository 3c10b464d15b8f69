"""A run after a rehearsal is, bit for bit, the run without it: random runs, with workers, and on two ranks."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader

from course_lib.callbacks import ExactResume, StepAudit
from course_lib.launch import run_ranks
from course_lib.resume import ResumableDataLoader
from rehearse import Rehearsal, rehearse
from tests import effort
from tests.rehearse.fits.parts import Net, Points, fitted, quiet_trainer


class Augmented(Points):
    """Each sample with noise of the global generators, in the worker that fetches it."""

    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        return x + 0.01 * torch.rand(4) + 0.01 * random.random(), y, index


class Model(Net):
    """Dropout, BatchNorm, and an optimizer and a schedule by their names."""

    def __init__(self, optimizer, schedule):
        super().__init__()
        self.body = torch.nn.Sequential(*self.body, torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2))
        self.named = optimizer, schedule

    def configure_optimizers(self):
        kind, schedule = self.named
        optimizer = getattr(torch.optim, kind)(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        made = {
            "none": lambda: None,
            "cosine": lambda: CosineAnnealingLR(optimizer, steps),
            "one cycle": lambda: OneCycleLR(optimizer, 0.02, total_steps=steps),
            "steps": lambda: StepLR(optimizer, 2),
        }[schedule]()
        if made is None:
            return optimizer
        return [optimizer], [{"scheduler": made, "interval": "epoch" if schedule == "steps" else "step"}]


class Data(LightningDataModule):
    """Counts how often it was asked."""

    def __init__(self, loader):
        super().__init__()
        self.loader, self.asked = loader, 0

    def prepare_data(self):
        raise AssertionError("it may download")

    def train_dataloader(self):
        self.asked += 1
        return self.loader

    def state_dict(self):
        return {"asked": self.asked}


def random_run(seed, folder, *, ranks=1):
    """A run of random parts; the seed decides, and the global generators are at its numbers."""
    draw = np.random.default_rng([2026, seed])

    def one_of(*choices):
        return choices[draw.integers(len(choices))]

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    workers = int(one_of(0, 0, 1, 2))
    options = {"num_workers": workers, "persistent_workers": bool(workers and one_of(True, False))}
    dataset = one_of(Points, Augmented)(int(draw.integers(20, 60)))
    if one_of(True, False, False):
        loader = ResumableDataLoader(dataset, batch_size=4, shuffle=True, seed=seed, **options)
    else:
        generator = torch.Generator().manual_seed(seed) if one_of(True, False) else None
        loader = DataLoader(dataset, 4, shuffle=True, generator=generator, drop_last=one_of(True, False), **options)
    callbacks = [ModelCheckpoint(folder / "checkpoints", save_last=one_of(True, None))]
    if one_of(True, False):
        callbacks.append(one_of(ExactResume, StepAudit)())
    if ranks == 1 and one_of(True, False, False):
        averages = StochasticWeightAveraging(0.01, 1) if len(callbacks) == 1 else None  # the others refuse it
        stops = EarlyStopping("no such value", strict=False)
        callbacks.append(one_of(averages or stops, stops))
    trainer = quiet_trainer(
        max_epochs=int(one_of(1, 2, 3)),
        accumulate_grad_batches=int(one_of(1, 2, 3)),
        gradient_clip_val=one_of(None, 0.5),
        limit_train_batches=one_of(1.0, 1.0, 4),
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=callbacks,
        **({"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}),
    )
    model = Model(one_of("SGD", "AdamW"), one_of("none", "cosine", "one cycle", "steps"))
    return trainer, model, Data(loader) if one_of(True, False) else loader


def generators():
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # noqa: NPY002


def of_data(data):
    loader = data.loader if isinstance(data, Data) else data
    generator = loader.generator.get_state().tolist() if loader.generator is not None else None
    sampler = loader.batch_sampler
    state = sampler.state_dict() if hasattr(sampler, "state_dict") else None
    return generator, state, sorted(vars(loader)), data.asked if isinstance(data, Data) else None


def tensors(state):
    return {name: value.tolist() for name, value in state.items() if isinstance(value, torch.Tensor)}


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def whole_run(judge, seed, folder, deep=False):
    """What is there before the fit, what the fit is given, and what it leaves."""
    (folder / "mine.txt").write_text("mine")
    trainer, model, data = random_run(seed, folder)
    if judge:
        rehearse(trainer, model, data, deep=deep)
    before = [generators(), tensors(model.state_dict()), of_data(data), files(folder), len(trainer.callbacks)]
    if isinstance(data, Data):
        data.prepare_data = lambda: None
    record = fitted(trainer, model, data)
    optimizers = [
        [tensors(state) for state in optimizer.state_dict()["state"].values()] for optimizer in trainer.optimizers
    ]
    after = [generators(), tensors(model.state_dict()), optimizers, of_data(data), files(folder)]
    return json.dumps([before, record.samples, record.rates, after])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(effort.cases(2, 20)))
def test_a_random_run(seed, tmp_path):
    folders = [tmp_path / name for name in ("with", "without")]
    for folder in folders:
        folder.mkdir()
    deep = seed % 4 == 0
    assert whole_run(True, seed, folders[0], deep) == whole_run(False, seed, folders[1])


def of_two_ranks(rank, judge, seed, folder):
    trainer, model, data = random_run(seed, Path(folder), ranks=2)
    callback = Rehearsal(strict=False)
    if judge:
        trainer.callbacks.insert(0, callback)
    if isinstance(data, Data):
        data.prepare_data = lambda: None
    record = fitted(trainer, model, data)
    if judge:
        assert callback.report is not None and "dealing" in callback.report.passed
    optimizers = [
        [tensors(state) for state in optimizer.state_dict()["state"].values()] for optimizer in trainer.optimizers
    ]
    return json.dumps([tensors(model.state_dict()), optimizers, record.samples, record.rates, generators()])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [100, 101][: effort.cases(1, 2)])
def test_a_random_run_on_two_ranks(seed, tmp_path):
    with_it, without = (
        run_ranks(of_two_ranks, 2, args=(judge, seed, str(tmp_path / str(judge))), timeout=180)
        for judge in (True, False)
    )
    assert [result.value for result in with_it] == [result.value for result in without]
    assert files(tmp_path / "True") == files(tmp_path / "False")
