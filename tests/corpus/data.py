"""What scripts read besides data sets of images: generated files, in the form and the number of the true ones."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np


def tiny_shakespeare(folder: Path) -> None:
    """1,115,394 characters of 65, nine tenths of them for training."""
    into = folder / "data" / "shakespeare_char"
    characters = np.random.default_rng(0).integers(0, 65, 1_115_394, dtype=np.uint16)
    characters[:1_003_854].tofile(into / "train.bin")
    characters[1_003_854:].tofile(into / "val.bin")
    letters = [chr(32 + number) for number in range(65)]
    meta = {"vocab_size": 65, "itos": dict(enumerate(letters)), "stoi": {one: n for n, one in enumerate(letters)}}
    (into / "meta.pkl").write_bytes(pickle.dumps(meta))


def cora(folder: Path) -> None:
    """2,708 papers with one of seven subjects and 5,429 citations; 200 words in place of 1,433."""
    into = folder / "cora"
    random = np.random.default_rng(0)
    into.mkdir(parents=True, exist_ok=True)
    words = random.integers(0, 2, (2_708, 200))
    words[:, 0] = 1
    rows = [f"{paper} {' '.join(map(str, row))} subject{paper % 7}" for paper, row in enumerate(words)]
    (into / "cora.content").write_text("\n".join(rows), encoding="utf-8")
    pairs = np.unique(random.integers(0, 2_708, (5_429, 2)), axis=0)
    (into / "cora.cites").write_text("\n".join(f"{one} {other}" for one, other in pairs), encoding="utf-8")


def wikitext(folder: Path) -> None:
    """2,088,628 words of 33,278, the ends of lines among them."""
    into = folder / "data"
    into.mkdir(parents=True, exist_ok=True)
    words = np.random.default_rng(0).integers(0, 33_277, 2_019_007).astype(str)
    lines = [" ".join(words[start : start + 29]) for start in range(0, len(words), 29)]
    (into / "wikitext-2.txt").write_text("\n".join(lines), encoding="utf-8")


def berkeley(folder: Path) -> None:
    """200 images for training and 100 for tests, of 481 × 321."""
    from PIL import Image

    random = np.random.default_rng(0)
    for name, number in (("train", 200), ("test", 100)):
        into = folder / "dataset" / "BSDS300" / "images" / name
        into.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(random.integers(0, 256, (321, 481, 3), dtype=np.uint8))
        for one in range(number):
            image.save(into / f"{one}.jpg")
