"""Runs that a check cannot try in full: too many samples, a step that never returns, a stream without an end."""

import itertools
import time

from torch.utils.data import DataLoader, IterableDataset

from workbook.ch10_runs.parts import Line, Points
from workbook.trainers import quiet_trainer


class Billion(Points):
    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        return super().__getitem__(index % len(self.x))


class Hangs(Line):
    def training_step(self, batch, batch_idx):
        time.sleep(600)


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.cycle(list(Points(64)))


def make_run(name):
    """``name`` is ``"a billion samples"``, ``"a step that hangs"`` or ``"a stream without an end"``."""
    trainer = quiet_trainer(max_epochs=1, accelerator="cpu")
    if name == "a billion samples":
        return trainer, Line(), DataLoader(Billion(8), 8)
    if name == "a step that hangs":
        return trainer, Hangs(), DataLoader(Points(32), 8, shuffle=True)
    return trainer, Line(), DataLoader(Endless(), 8)
