import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from course_lib import datasets
from course_lib.datasets import data_path, load_digits, load_words


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
