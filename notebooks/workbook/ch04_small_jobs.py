"""What chapter 04's experiments train on: passages and photographs of the price list's two jobs, and their models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbook.prices.jobs import (
    CONTEXT,
    PADDED,
    Batch,
    collate_passages,
    collate_pictures,
    picture_job,
    prose_job,
    shuffled,
)

Tokens = tuple[Tensor, Tensor]
"""A micro-batch: inputs, and targets, -100 where one is masked."""


@cache
def passages(*, of_one_length: bool = False) -> list[Tensor]:
    """The first 32 passages of the novel in the GPT's own order, as characters; or 32 that fill its context."""
    job = prose_job()
    order = shuffled(job.training, seed=0, epoch=0)
    found = [job.samples[index][1] for index in order]
    return [piece for piece in found if not of_one_length or len(piece) > CONTEXT][:32]


def collate(pieces: Sequence[Tensor]) -> Tokens:
    """Passages of any length as one batch; -100 is the target of the padding."""
    batch = collate_passages(list(enumerate(pieces)), rng=None)
    return batch.inputs, batch.targets


def answers_alone(pieces: Sequence[Any], rng: np.random.Generator | None) -> Batch:
    """As the GPT's job collates, and in training a beginning of each passage, of random length, is masked."""
    batch = collate_passages(list(pieces), rng)
    if rng is not None:
        for row in batch.targets:
            length = int((row != PADDED).sum())
            row[: int(rng.integers(length))] = PADDED
    return batch


@cache
def pictures() -> Tokens:
    """The first 80 photographs in the convolutional net's own order."""
    job = picture_job()
    order = shuffled(job.training, seed=0, epoch=0)[:80]
    batch = collate_pictures([job.samples[index] for index in order], rng=None)
    return batch.inputs, batch.targets


def gpt() -> nn.Module:
    """The small GPT of the price list."""
    torch.manual_seed(0)
    return prose_job().model()


def conv_net_without_dropout() -> nn.Module:
    """The convolutional net of the price list: what is left is its BatchNorm."""
    torch.manual_seed(0)
    net = picture_job().model()
    for layer in net.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return net


def three_of_four() -> list[Tokens]:
    """12 passages, as 3 micro-batches of 4."""
    full = passages(of_one_length=True)
    return [collate(full[start : start + 4]) for start in (0, 4, 8)]


def twelve() -> list[Tokens]:
    """The same passages as one batch."""
    return [collate(passages(of_one_length=True)[:12])]


def five_of_sixteen() -> list[Tokens]:
    """80 photographs, as 5 micro-batches of 16 that are drawn."""
    photographs, kinds = pictures()
    return [(photographs[part], kinds[part]) for part in torch.randperm(80).split(16)]
