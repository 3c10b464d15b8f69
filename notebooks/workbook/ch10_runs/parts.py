"""What the small runs of the exercises are made of."""

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

IGNORED = -100
"""The label of a word that has none."""


class Points(Dataset):
    """Sample ``i`` is ``(x, y, i)``: four numbers, their sum, and the index, so that a batch can be read."""

    def __init__(self, n):
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum(), index


class Line(LightningModule):
    """A linear regression of :class:`Points`; with a ``horizon``, its rate is a cosine that reaches 0 there."""

    def __init__(self, horizon=None):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.horizon = horizon

    def loss(self, batch):
        x, y, _ = batch
        return nn.functional.mse_loss(self.linear(x).squeeze(1), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if self.horizon is None:
            return optimizer
        return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, self.horizon), "interval": "step"}]


class Neighbours:
    """Batches of four samples that are neighbours, as sentences of one length are; another order in each epoch."""

    def __init__(self, num_samples):
        if num_samples % 4:
            raise ValueError(f"num_samples must be a multiple of 4, as batches have four neighbours: got {num_samples}")
        self.num_samples, self.epoch = num_samples, 0

    @property
    def sampler(self):
        """A Trainer calls ``batch_sampler.sampler.set_epoch``."""
        return self

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_samples // 4

    def __iter__(self):
        for number in np.random.default_rng([2026, self.epoch]).permutation(self.num_samples // 4).tolist():
            yield list(range(4 * number, 4 * number + 4))


class Tags(Dataset):
    """32 words in micro-batches of 8; of the first 8, one is labelled, then 2, then 3, and then all."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(32, 4, generator=generator)
        self.tags = torch.randint(3, (32,), generator=generator)
        for first, labelled in ((0, 1), (8, 2), (16, 3)):
            self.tags[first + labelled : first + 8] = IGNORED

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.tags[index]


class Tagger(LightningModule):
    """Three classes; ``scores(x)`` has a row for each word."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 3)

    @property
    def weights_at_start(self):
        """The weight and the bias, as they were when the fit began."""
        return self._start

    def on_fit_start(self):
        self._start = self.scores.weight.detach().clone(), self.scores.bias.detach().clone()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)
