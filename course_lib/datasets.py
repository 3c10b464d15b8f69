"""Small real data, offline and instant; and datasets of integers, on which a batch can be read.

A chapter that downloads its data fails on a train, in CI and in five years; a chapter on random numbers shows
no accuracy that means anything. So the data lie beside the code.
The rule: *what a number rests on is checked before it is used.* Each file has a checksum, and
`data/README.md` says where it comes from and under which licence.

    images, labels = load_digits()
    images.shape, images.dtype          # (1797, 1, 8, 8), float32 in [0, 1]
    labels.shape, labels.dtype          # (1797,), int64 in 0…9
    train = TensorDataset(images[:1500], labels[:1500])
    load_words()[:4]                    # ["down", "the", "rabbit", "hole"], of 2,000 words with 1 to 14 letters
    list(DataLoader(Integers(5), 2))    # [tensor([0, 1]), tensor([2, 3]), tensor([4])]
    list(DataLoader(IntegerStream(5), 2, num_workers=2))  # [tensor([0, 2]), tensor([1, 3]), tensor([4])]
"""

import hashlib
import io
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from course_lib._words import int_of_at_least

__all__ = ["IntegerStream", "Integers", "load_digits", "load_words"]

PACKAGE = Path(__file__).parent
SHA256 = {
    "digits.npz": "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e",
    "words.txt": "06b24bdb039fbed4efb1a58715eab390a32d46e57537f263d18dc37af4923547",
}


def load_digits() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits of 13 writers, in the order of their source.

    Returns `images`, float32 of shape (1797, 1, 8, 8) in [0, 1], and `labels`, int64 of shape (1797,).
    Raises FileNotFoundError where the file is missing, ValueError where its checksum is another.
    """
    with np.load(io.BytesIO(_read_checked("digits.npz"))) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    return torch.from_numpy(images[:, None] / np.float32(16)), torch.from_numpy(labels.astype(np.int64))


def load_words() -> list[str]:
    """The first 2,000 distinct words of Lewis Carroll's *Alice's Adventures in Wonderland* (1865), in the book's order.

    Each has 1 to 14 letters, a to z in lower case. Every call reads them again, so the list is the caller's to change.
    Raises FileNotFoundError where the file is missing, ValueError where its checksum is another.
    """
    return _read_checked("words.txt").decode("ascii").splitlines()


class Integers(Dataset[int]):
    """The integers 0…n-1 as a map-style dataset: sample i is the int i.

    Raises ValueError where `n` is not an int of at least 0; IndexError for an index outside 0…n-1, and so for a
    negative one, which in a list would count from the end: a sampler that yields it is wrong. What is no integer
    (a float, a slice) raises TypeError.
    """

    def __init__(self, n: int) -> None:
        self.n = int_of_at_least(0, "n", n)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: SupportsIndex) -> int:
        number = operator.index(index)
        if not 0 <= number < self.n:
            raise IndexError(f"index {number} is outside of Integers({self.n}), which has the samples 0 to n-1")
        return number


class IntegerStream(IterableDataset[int]):
    """The integers 0…n-1 as an iterable dataset, each once, whatever the number of the DataLoader's workers.

    Worker i of W yields i, i+W, i+2W, …; where there are no workers, all come in order. The stream is not shared out
    over ranks. `len` is that of the whole stream. Each worker makes batches of its own shard, so there may be more
    of them than `len(loader)` says: 10 integers in batches of 4 are 3 batches; by two workers 4, of 4, 4, 1 and 1.

    Raises ValueError where `n` is not an int of at least 0.
    """

    def __init__(self, n: int) -> None:
        self.n = int_of_at_least(0, "n", n)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(worker, self.n, workers))


def data_path(name: str) -> Path:
    """The file `name` of the data: packaged beside the code in a wheel, in `data/` in a clone."""
    for folder in (PACKAGE / "_data", PACKAGE.parent / "data"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(
        f"no data file {name!r} in {PACKAGE / '_data'} or {PACKAGE.parent / 'data'}: "
        "install course_lib from its wheel, or run from a full clone"
    )


def _read_checked(name: str) -> bytes:
    path = data_path(name)
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"{path} is not the file that the workbook was run with: its SHA-256 is {found}, "
            f"expected {SHA256[name]}; restore it with `git checkout -- data/{name}` or reinstall course_lib"
        )
    return content
