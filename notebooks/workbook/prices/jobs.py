"""Two small real jobs: a GPT that reads a novel, and a convolutional net that sorts photographs of waste.

A job holds what :mod:`workbook.prices.loop` needs to train: the samples, the model, the optimizer, and the sizes. The
data lie in `data/`, with their origin in `data/README.md`.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from course_lib.datasets import data_path

SHA256 = {
    "prose.txt": "d0940643a47971635c9957e97f4d6e38fbe9074c4fac61e2a0758f32f53ff8f3",
    "trash.npz": "e0a4cc17c23843b3de1c40132321efe83970819558917b16d511609b6d5130f4",
}
CONTEXT = 48
"""Characters from which the GPT predicts the next one."""
PIECE = 512
"""A passage of the novel that is longer is cut into pieces of so many characters."""
PADDED = -100
"""The target of a padded position: :func:`torch.nn.functional.cross_entropy` leaves it out."""
T = TypeVar("T")


class Batch(NamedTuple):
    """A micro-batch."""

    indices: list[int]
    inputs: Tensor
    targets: Tensor

    @property
    def target_count(self) -> int:
        """Targets: characters of a text, or pictures."""
        return int((self.targets != PADDED).sum())


@dataclass(frozen=True)
class Job:
    """What is trained, and with which sizes."""

    name: str
    samples: Dataset[Any]
    """Sample i is a tuple that begins with i."""
    collate: Callable[[list[Any], np.random.Generator | None], Batch]
    """Samples as a batch. With a generator: moved and mirrored at random."""
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    epochs: int
    micro_batch: int
    """Samples in a micro-batch."""
    k: int
    """Micro-batches in a window."""

    @property
    def training(self) -> list[int]:
        return split(self, seed=0)[0]

    @property
    def validation(self) -> list[int]:
        return split(self, seed=0)[1]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """The cross-entropy in nats, summed over the targets."""
        return cross_entropy_sum(model(batch.inputs), batch.targets)


def split(job: Job, seed: int) -> tuple[list[int], list[int]]:
    """The samples of the training and of the validation, drawn: one in six is held out."""
    n = len(job.samples)  # type: ignore[arg-type]
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(drawn[n // 6 :]), sorted(drawn[: n // 6])


def shuffled(indices: list[int], seed: int, epoch: int) -> list[int]:
    """The order of an epoch. Seeds below 1,000 epochs share no order."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    return [indices[at] for at in torch.randperm(len(indices), generator=generator).tolist()]


def windows(batches: Iterable[T], k: int) -> Iterator[list[T]]:
    """Lists of `k` batches; the last list of an epoch may be shorter."""
    iterator = iter(batches)
    while window := list(islice(iterator, k)):
        yield window


def warm_up_then_cosine(step: int, total_steps: int) -> float:
    """The share of the peak rate: up for three tenths of the steps, then down along a half cosine to 0."""
    warm_up = max(1, total_steps * 3 // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    left = max(0.0, 1 - (step - warm_up) / (total_steps - warm_up))
    return 0.5 - 0.5 * float(np.cos(np.pi * left))


def cross_entropy_sum(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=PADDED, reduction="sum")


class Passages(Dataset[tuple[int, Tensor]]):
    """The novel in pieces of at most :data:`PIECE` characters, none of which spans two paragraphs."""

    def __init__(self) -> None:
        paragraphs = read_checked("prose.txt").decode("ascii").splitlines()
        self.characters = sorted(set("".join(paragraphs)))
        numbers = {character: number for number, character in enumerate(self.characters)}
        self.pieces = []
        for paragraph in paragraphs:
            for start in range(0, len(paragraph) - 1, PIECE):  # a piece of one character has nothing to predict
                piece = paragraph[start : start + PIECE]
                self.pieces.append(torch.tensor([numbers[character] for character in piece]))
        self.pieces = [piece for piece in self.pieces if len(piece) > 1]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.pieces[index]


def collate_passages(samples: list[tuple[int, Tensor]], rng: np.random.Generator | None) -> Batch:
    """From each piece a stretch of up to :data:`CONTEXT` characters, padded to the longest of the batch."""
    stretches = []
    for _, piece in samples:
        start = 0 if rng is None else int(rng.integers(max(1, len(piece) - CONTEXT)))
        stretches.append(piece[start : start + CONTEXT + 1])
    pad = nn.utils.rnn.pad_sequence
    inputs = pad([stretch[:-1] for stretch in stretches], batch_first=True)
    targets = pad([stretch[1:] for stretch in stretches], batch_first=True, padding_value=PADDED)
    return Batch([index for index, _ in samples], inputs, targets)


class Pictures(Dataset[tuple[int, Tensor, int]]):
    """Photographs of waste of six kinds, sorted by kind: JPEG bytes that are decoded when a sample is first read."""

    def __init__(self) -> None:
        with np.load(io.BytesIO(read_checked("trash.npz"))) as arrays:
            self.jpegs, self.ends, self.labels = arrays["jpegs"], arrays["ends"], arrays["labels"]
        self.decoded: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        if index not in self.decoded:
            start = int(self.ends[index - 1]) if index else 0
            jpeg = self.jpegs[start : self.ends[index]].tobytes()
            self.decoded[index] = torch.from_numpy(np.array(Image.open(io.BytesIO(jpeg)))).permute(2, 0, 1)
        return index, self.decoded[index], int(self.labels[index])


def collate_pictures(samples: list[tuple[int, Tensor, int]], rng: np.random.Generator | None) -> Batch:
    """Pixels from -1 to 1; each picture mirrored or not, and the batch moved by up to 4 pixels."""
    pictures = torch.stack([picture for _, picture, _ in samples]) / 127.5 - 1
    if rng is not None:
        mirrored = torch.from_numpy(rng.random(len(samples)) < 0.5)
        pictures[mirrored] = pictures[mirrored].flip(-1)
        height, width = pictures.shape[-2:]
        down, right = rng.integers(9, size=2)
        pictures = F.pad(pictures, (4, 4, 4, 4), mode="replicate")[..., down : down + height, right : right + width]
    return Batch([index for index, _, _ in samples], pictures, torch.tensor([label for _, _, label in samples]))


class Block(nn.Module):
    """Attention to what stands before, then two layers for each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.layers(x)


class GPT(nn.Module):
    """Characters (batch, length) to scores of the next one (batch, length, characters)."""

    def __init__(self, characters: int, width: int = 64, heads: int = 2, blocks: int = 1) -> None:
        super().__init__()
        self.character, self.position = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))
        for embedding in (self.character, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.blocks(self.character(x) + self.position.weight[: x.shape[1]]))


def conv_net() -> nn.Module:
    """Three convolutions with BatchNorm, their mean over all positions, and scores of the six kinds."""
    layers: list[nn.Module] = []
    for before, after, side, stride in ((3, 16, 5, 4), (16, 32, 3, 2), (32, 64, 3, 2)):
        convolution = nn.Conv2d(before, after, side, stride, padding=side // 2, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 6))


@cache
def prose_job() -> Job:
    passages = Passages()
    return Job(
        name="gpt",
        samples=passages,
        collate=collate_passages,
        model=lambda: GPT(len(passages.characters)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=8e-3, fused=True),
        epochs=3,
        micro_batch=4,
        k=3,
    )


@cache
def picture_job() -> Job:
    return Job(
        name="cnn",
        samples=Pictures(),
        collate=collate_pictures,
        model=conv_net,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
        epochs=4,
        micro_batch=16,
        k=5,
    )


JOBS: dict[str, Callable[[], Job]] = {"gpt": prose_job, "cnn": picture_job}


def read_checked(name: str) -> bytes:
    content = data_path(name).read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise ValueError(f"data/{name} is not the file that the prices were measured with; restore it with git")
    return content
