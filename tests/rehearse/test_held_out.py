"""Which samples two datasets share: chains of subsets against what they read, and what counts as the same data."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from course_lib.datasets import Integers
from rehearse._held_out import same_data, under_subsets


class Transformed(Dataset):
    """As many write it, to give a part of ``random_split`` a transform of its own."""

    def __init__(self, part, transform=None):
        self.part, self.transform = part, transform

    def __len__(self):
        return len(self.part)

    def __getitem__(self, index):
        return self.part[index]


class Pairs(Transformed):
    def __len__(self):
        return len(self.part) // 2


class Folder(Dataset):
    """Holds what it is given, and is as long as it is said to be."""

    def __init__(self, length, **held):
        vars(self).update(held, length=length)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


@given(st.data())
def test_a_part_has_the_samples_that_it_reads(data):
    base = Integers(data.draw(st.integers(1, 12)))
    part = base
    for _ in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            part = Transformed(part)
        elif len(part):
            part = Subset(part, data.draw(st.lists(st.integers(0, len(part) - 1), max_size=8)))
    found, indices = under_subsets(part)
    assert found is base
    assert [part[index] for index in range(len(part))] == (list(range(len(base))) if indices is None else indices)


@pytest.mark.parametrize(
    "make", [Pairs, lambda base: ConcatDataset([base, base]), lambda base: Folder(4, a=base, b=base)]
)
def test_what_makes_other_samples_is_not_looked_through(make):
    made = make(Integers(4))
    assert under_subsets(made) == (made, None)


def test_a_chain_without_an_end_is_left_after_some_steps():
    one = Folder(3)
    one.part = Folder(3, part=one)
    assert under_subsets(one)[1] is None


ROWS = torch.arange(12.0).reshape(6, 2)
PATHS = [(f"{name}.png", name % 2) for name in range(6)]
SAME = {
    "tensors": lambda: TensorDataset(ROWS.clone(), torch.arange(6)),
    "an array": lambda: Folder(6, rows=ROWS.numpy().copy()),
    "paths and labels": lambda: Folder(6, samples=list(PATHS), transform=object()),
    "paths": lambda: Folder(6, files=[Path(name) for name, _ in PATHS]),
}
OTHER = {
    "other rows": (TensorDataset(ROWS), TensorDataset(ROWS + 1)),
    "other lengths": (TensorDataset(ROWS), TensorDataset(ROWS[:4])),
    "other dtypes": (TensorDataset(ROWS), TensorDataset(ROWS.double())),
    "other classes": (Folder(6, rows=ROWS), TensorDataset(ROWS)),
    "other paths": (Folder(2, files=["a", "b"]), Folder(2, files=["a", "c"])),
    "labels alone": (Folder(6, labels=torch.arange(6)), Folder(6, labels=torch.arange(6))),
    "numbers alone": (Folder(3, numbers=[0, 1, 2]), Folder(3, numbers=[0, 1, 2])),
    "one of two": (Folder(6, a=ROWS, b=ROWS), Folder(6, a=ROWS, b=ROWS + 1)),
    "not seen": (Folder(6), Folder(6)),
    "no length": (Dataset(), Dataset()),
    "tensors beside the paths": (Folder(1, files=[("a", ROWS)]), Folder(1, files=[("a", ROWS.clone())])),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_data_is_known_in_two_objects(name):
    assert same_data(SAME[name](), SAME[name]())


@pytest.mark.parametrize("name", OTHER)
def test_other_data_or_what_is_not_seen_is_not_the_same(name):
    one, other = OTHER[name]
    assert not same_data(one, other) and not same_data(other, one) and same_data(one, one)


def test_of_a_large_array_both_ends_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("rehearse._held_out.MOST_BYTES", 1_000)
    rows = np.arange(8_000.0).reshape(4_000, 2)
    for place, same in ((0, False), (2_000, True), (3_999, False)):
        other = rows.copy()
        other[place] += 1
        assert same_data(Folder(4_000, rows=rows), Folder(4_000, rows=other)) == same
