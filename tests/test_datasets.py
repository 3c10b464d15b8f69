import math
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from course_lib import datasets
from course_lib.datasets import Integers, IntegerStream, data_path, load_digits, load_words


def test_digits_have_the_shapes_and_ranges_that_are_promised():
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8) and images.dtype == torch.float32
    assert labels.shape == (1797,) and labels.dtype == torch.int64
    assert images.min() == 0 and images.max() == 1


def test_digits_are_the_published_test_set():
    # The class counts are those that the repository of the data set lists for its test file; the first ten
    # labels, and the first row of the first digit, are those of scikit-learn's own documentation.
    images, labels = load_digits()
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels[:10].tolist() == list(range(10))
    assert (images[0, 0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_pixels_are_counts_out_of_sixteen():
    images, _ = load_digits()
    assert torch.equal(images * 16, (images * 16).round())


def test_two_loads_share_no_memory():
    load_digits()[0].zero_()
    assert load_digits()[0].max() == 1


def test_a_changed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = bytearray(data_path("digits.npz").read_bytes())
    content[-1] ^= 1
    (tmp_path / "_data").mkdir()
    (tmp_path / "_data" / "digits.npz").write_bytes(content)
    monkeypatch.setattr(datasets, "PACKAGE", tmp_path)
    with pytest.raises(ValueError, match=r"digits\.npz is not the file .* is \w{64}, expected b2dab7b5"):
        load_digits()


def test_words_are_what_is_promised():
    words = load_words()
    assert len(words) == 2000 == len(set(words))
    assert all(re.fullmatch("[a-z]{1,14}", word) for word in words)
    assert {len(word) for word in words} == set(range(1, 15))


def test_words_are_in_the_order_of_the_book():
    title = "down the rabbit hole"
    sentence = "alice was beginning to get very tired of sitting by her sister on the bank and of having nothing to do"
    opening = list(dict.fromkeys(f"{title} {sentence}".split()))
    assert load_words()[: len(opening)] == opening


def test_the_words_have_no_title_page_and_no_licence_text():
    absent = set("lewis carroll millennium fulcrum edition chapter ii gutenberg etext copyright license".split())
    assert not absent & set(load_words())


def test_a_changed_list_of_words_does_not_change_the_next():
    load_words().clear()
    assert len(load_words()) == 2000


def packaged_words(folder: Path, content: bytes) -> Path:
    (folder / "_data").mkdir()
    (folder / "_data" / "words.txt").write_bytes(content)
    return folder


@pytest.mark.parametrize("changed", [lambda b: b[:-1], lambda b: b.replace(b"rabbit", b"habbit"), lambda b: b + b"\n"])
def test_changed_words_are_refused(changed: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = changed(data_path("words.txt").read_bytes())
    monkeypatch.setattr(datasets, "PACKAGE", packaged_words(tmp_path, content))
    expected = rf"words\.txt is not the file .* is \w{{64}}, expected {datasets.SHA256['words.txt']}; restore it"
    with pytest.raises(ValueError, match=expected):
        load_words()


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets, "PACKAGE", tmp_path / "course_lib")
    with pytest.raises(FileNotFoundError, match=r"no data file 'digits.npz' in .*_data or .*data: install"):
        data_path("digits.npz")


def test_the_packaged_file_comes_before_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in (tmp_path / "course_lib" / "_data", tmp_path / "data"):
        folder.mkdir(parents=True)
        (folder / "words.txt").write_text("")
    monkeypatch.setattr(datasets, "PACKAGE", tmp_path / "course_lib")
    assert data_path("words.txt") == tmp_path / "course_lib" / "_data" / "words.txt"


def test_every_checksum_stands_in_the_data_readme():
    readme = data_path("README.md").read_text(encoding="utf-8")
    assert all(name in readme and digest in readme for name, digest in datasets.SHA256.items())


def batches(dataset: object, batch_size: int, **options: object) -> list[list[int]]:
    return [batch.tolist() for batch in DataLoader(dataset, batch_size, **options)]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 10])
def test_integers_come_in_the_batches_of_a_range(n: int, num_workers: int):
    # torch's DataLoader over a plain range is the oracle.
    assert batches(Integers(n), 4, num_workers=num_workers) == batches(range(n), 4)
    assert len(DataLoader(Integers(n), 4)) == math.ceil(n / 4)


def test_integers_are_shuffled_as_a_range_is():
    orders = [
        batches(dataset, 4, shuffle=True, generator=torch.Generator().manual_seed(7))
        for dataset in (Integers(10), range(10))
    ]
    assert orders[0] == orders[1] != batches(Integers(10), 4)


def test_sample_i_is_the_int_i():
    assert list(Integers(4)) == [0, 1, 2, 3]
    for index in (3, np.int64(3), torch.tensor(3)):
        assert type(Integers(4)[index]) is int and Integers(4)[index] == 3


@pytest.mark.parametrize("index", [4, -1, -4, 10**12])
def test_an_index_outside_is_refused_and_so_is_a_negative_one(index: int):
    with pytest.raises(IndexError, match=rf"index {index} is outside of Integers\(4\)"):
        Integers(4)[index]


@pytest.mark.parametrize("index", [1.0, "1", slice(2), None])
def test_an_index_is_an_integer(index: object):
    with pytest.raises(TypeError, match="integer"):
        Integers(4)[index]


def test_a_worker_sends_the_index_error_on():
    with pytest.raises(IndexError, match=r"index 9 is outside of Integers\(4\)"):
        batches(Integers(4), 1, sampler=[0, 9], num_workers=1)


@pytest.mark.parametrize("dataset", [Integers, IntegerStream])
@pytest.mark.parametrize("n", [-1, 2.0, "3", True, None])
def test_the_number_of_integers_is_checked(dataset: type, n: object):
    with pytest.raises(ValueError, match=re.escape(f"n must be an int of at least 0, got {n!r}")):
        dataset(n)


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 2, 10])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_integer_of_a_stream_comes_once(n: int, num_workers: int, batch_size: int):
    found = batches(IntegerStream(n), batch_size, num_workers=num_workers)
    assert sorted(i for batch in found for i in batch) == list(range(n))
    workers = max(1, num_workers)
    for batch in found:  # worker i yields i, i+W, …
        assert batch == list(range(batch[0], batch[0] + workers * len(batch), workers))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_with_one_reader_is_in_order(num_workers: int):
    assert batches(IntegerStream(10), 4, num_workers=num_workers) == batches(range(10), 4)


def test_the_batches_that_are_documented():
    assert batches(IntegerStream(5), 2, num_workers=2) == [[0, 2], [1, 3], [4]]
    loader = DataLoader(IntegerStream(10), 4, num_workers=2)
    assert len(loader) == 3
    assert [len(batch) for batch in loader] == [4, 4, 1, 1]


def test_a_stream_can_be_read_twice_and_by_workers_that_stay():
    loader = DataLoader(IntegerStream(7), 2, num_workers=2, persistent_workers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first == second == [[0, 2], [1, 3], [4, 6], [5]]


def test_both_travel_to_workers_that_are_spawned():
    for dataset in (Integers(3), IntegerStream(3)):
        assert list(pickle.loads(pickle.dumps(dataset))) == [0, 1, 2]
    assert len(IntegerStream(3)) == 3
