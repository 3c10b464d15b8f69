"""Chapter 08's images, in three forms. A worker that is spawned imports this file, and so it imports no Trainer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Squares(Dataset[Tensor]):
    """48 square images: sample 7 is filled with the number 7."""

    def __init__(self, side: int = 16) -> None:
        self.side = side

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.side, self.side), float(index))


class SquaresOfPairs(Dataset[Tensor]):
    """The same images, each asked for by its index and its side together."""

    def __getitem__(self, pair: tuple[int, int]) -> Tensor:
        index, side = pair
        return torch.full((side, side), float(index))


def square(sample: int, side: int) -> Tensor:
    """Sample 7 at 32 pixels a side: an image of 32 × 32, filled with 7."""
    return torch.full((side, side), float(sample))
