"""Batches are padded to their longest sequence, and one has 4096 steps: its batch does not fit where others do."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from course_lib.memory import measure_peak
from tests.rehearse.fits.parts import Net, quiet_trainer

CHECK = "memory"
EXPECT = {"memory": 32 * 2**20}  # bytes of the device
WRONG, RIGHT = False, True  # whether the longest batch fits


class Sequences(Dataset):
    """64 sequences of 8 numbers, one of them much longer."""

    def __init__(self, longest):
        self.longest = longest

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((self.longest if index == 50 else 8, 1), index / 64)


class Run(Net):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(1, 256), nn.Tanh()), nn.Linear(256, 1)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()


def padded(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def build(longest):
    return quiet_trainer(), Run(), DataLoader(Sequences(longest), 8, shuffle=True, collate_fn=padded)


def make_run():
    return build(4096)


def make_twin():
    return build(64)


def seen(trainer, model, data):
    batch = padded([data.dataset[index] for index in range(48, 56)])
    return measure_peak(lambda: model.training_step(batch, 0).backward()).peak_bytes < EXPECT["memory"]
