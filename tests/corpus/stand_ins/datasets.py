"""The part of Hugging Face's datasets that scripts ask for: one set, of random token ids."""

import numpy as np

PAIRS = {"train": 3_668, "validation": 408, "test": 1_725}
"""Of MRPC."""


def load_dataset(*_, **__):
    return Parts({name: Rows(name, number) for name, number in PAIRS.items()})


class Parts(dict):
    def map(self, *_, **__):
        return self

    def rename_column(self, *_):
        return self


class Rows:
    """Sentences of 20 to 60 tokens, with a label of two."""

    def __init__(self, name, number):
        random = np.random.default_rng(len(name))
        self.lengths, self.labels = random.integers(20, 61, number), random.integers(0, 2, number)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        tokens = np.random.default_rng(int(index)).integers(1, 1_000, self.lengths[index])
        return {"input_ids": tokens.tolist(), "labels": int(self.labels[index])}
