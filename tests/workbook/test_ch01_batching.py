"""The numbers behind chapter 01's figures and widget, and what its exercises tell of wrong answers."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from workbook import ch01_exercises
from workbook.ch01_batching import (
    RECORDED_SECONDS,
    WhoLoads,
    best_size,
    by_hand,
    figure_of_sizes,
    figure_of_throughput,
    figure_of_trade,
    figure_of_winners,
    mean_accuracy,
    padded,
    seconds_of_update,
    throughput_explorer,
    trade,
    trade_explorer,
)
from workbook.display import png_bytes
from workbook.exercises import NotSolved


def test_the_accuracies_are_drawn_as_they_are():
    accuracies = {"0.5": {1: 0.1, 32: 0.9, 100: 0.4}, "0.03": {1: 0.9, 32: 0.5, 100: 0.1}}
    lines = figure_of_sizes(accuracies, 0.1, "title").axes[0].lines
    assert lines[0].get_xydata().tolist() == [[1, 0.1], [32, 0.9], [100, 0.4]]
    assert lines[1].get_xydata().tolist() == [[1, 0.9], [32, 0.5], [100, 0.1]]


def test_runs_are_drawn_by_samples_and_by_the_time_of_their_updates():
    figure = figure_of_winners({1: [10, 30], 32: [64, 128]}, {1: 0.1, 32: 0.5})
    drawn = [[line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes]
    assert drawn[0] == [[[1, 10], [1, 30]], [[32, 64], [32, 128]], [[1, 20], [32, 96]]]
    assert drawn[1] == [[[1, 1000], [1, 3000]], [[32, 1000], [32, 2000]], [[1, 2000], [32, 1500]]]


def test_the_recorded_seconds_rise_and_their_throughput_bends():
    seconds = list(RECORDED_SECONDS.values())
    assert seconds == sorted(seconds) and list(RECORDED_SECONDS) == sorted(RECORDED_SECONDS)
    assert 64 * seconds[0] / RECORDED_SECONDS[64] > 16 > 64 * RECORDED_SECONDS[64] / RECORDED_SECONDS[4096]


def test_an_update_is_timed_and_made():
    net = nn.Linear(3, 2)
    before = net.weight.detach().clone()
    assert seconds_of_update(net, torch.ones(4, 3), torch.zeros(4, dtype=torch.long)) >= 0
    assert not torch.equal(net.weight, before)


def test_throughput_is_samples_over_seconds_beside_the_first_size_scaled():
    lines = figure_of_throughput({"here": {1: 0.5, 4: 1.0}}).axes[0].lines
    assert [line.get_xydata().tolist() for line in lines] == [[[1, 2.0], [4, 4.0]], [[1, 2.0], [4, 8.0]]]


@pytest.mark.thorough
def test_the_widget_shows_what_was_measured_on_each_device():
    own = {"this CPU": {1: 1e-4, 64: 64e-5, 4096: 4096e-6}, "this GPU": {1: 2e-4, 64: 2e-4, 4096: 2e-4}}
    explorer = throughput_explorer(own)
    assert explorer.text.startswith("B = 1: 100 µs for an update, 10,000 samples per second\nB = 64: 640 µs")
    assert "B = 64: 200 µs for an update, 320,000 samples per second" in explorer.set(shown="this GPU")


def test_a_trade_is_the_samples_needed_times_the_time_for_each():
    assert trade(30, 30, 250).samples == 2  # what the noise size means
    assert trade(250, 30, 250).time_per_sample == 2  # what the fixed cost means
    assert trade(10, 30, 250).time == pytest.approx((1 + 10 / 30) * (1 + 250 / 10))


@pytest.mark.parametrize(("noise_size", "fixed_cost"), [(30, 250), (535, 1000), (1, 1), (600, 1)])
def test_no_size_is_over_before_the_best(noise_size: int, fixed_cost: int):
    least = trade(best_size(noise_size, fixed_cost), noise_size, fixed_cost).time
    assert all(least <= trade(size, noise_size, fixed_cost).time for size in range(1, 5000))


def test_the_trade_is_drawn_over_all_sizes():
    lines = figure_of_trade(30, 250, largest=1437).axes[0].lines
    for line in lines[:3]:
        assert line.get_xdata()[0] == 1 and line.get_xdata()[-1] == pytest.approx(1437)
    for x, samples, each, in_all in zip(lines[0].get_xdata(), *(line.get_ydata() for line in lines[:3]), strict=True):
        assert (samples, each, in_all) == pytest.approx(tuple(trade(x, 30, 250)))
    assert lines[3].get_xdata()[0] == pytest.approx(math.sqrt(30 * 250))


def test_the_widget_follows_its_controls():
    explorer = trade_explorer(largest=100)
    assert explorer.text.startswith("best size: 71, the square root of 20 × 250\nbatches of 1 take 12.8 times as long")
    assert explorer.set(noise_size=4, fixed_cost=9).startswith("best size: 6, the square root of 4 × 9")
    assert explorer.text.endswith("batches of 100 take 4.5 times as long")
    assert figure_of_trade(600, 1000, 100).axes[0].get_title().endswith("all at once finishes first")


@pytest.mark.thorough
def test_the_figures_are_pictures():
    for figure in (figure_of_trade(30, 250, 1437), figure_of_sizes({"0.5": {1: 0.1}}, 0.1, "title")):
        assert png_bytes(figure).startswith(b"\x89PNG")


def test_a_sample_knows_its_reader():
    assert list(map(WhoLoads(2).__getitem__, range(2))) == [(0, -1), (1, -1)]
    batches = DataLoader(WhoLoads(4), 2, num_workers=2)
    assert [(i.tolist(), workers.tolist()) for i, workers in batches] == [([0, 1], [0, 0]), ([2, 3], [1, 1])]


# ------------------------------------------------------------------------------------------------------ the exercises


def told(exercise, answer) -> str:
    with pytest.raises(NotSolved) as caught:
        exercise.check(answer)
    return str(caught.value)


def letters_of(words, shift=96):
    return [torch.tensor([ord(letter) - shift for letter in word]) for word in words]


def fixed_width(words, width=20):
    letters = torch.zeros(len(words), width, dtype=torch.long)
    for row, numbers in enumerate(letters_of(words)):
        letters[row, : len(numbers)] = numbers
    return letters, letters > 0


class KeepsItsWidth:
    def __init__(self):
        self.width = 0

    def __call__(self, words):
        self.width = max(self.width, *map(len, words))
        return fixed_width(words, self.width)


def with_mask(words, make_mask):
    letters = pad_sequence(letters_of(words), batch_first=True)
    return letters, make_mask(letters)


def float_letters(words):
    letters = pad_sequence(letters_of(words), batch_first=True).float()
    return letters, letters > 0


def without_batch_first(words):
    letters = pad_sequence(letters_of(words))
    return letters, letters > 0


def padded_with(words, value):
    letters = pad_sequence(letters_of(words), batch_first=True, padding_value=value)
    return letters, letters != value


def shifted(words, shift):
    letters = pad_sequence(letters_of(words, shift), batch_first=True)
    return letters, letters > 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (float_letters, ch01_exercises.WHOLE),
        (lambda words: with_mask(words, lambda letters: (letters > 0).long()), ch01_exercises.NOT_BOOL),
        (lambda words: with_mask(words, lambda letters: (letters > 0).float()), ch01_exercises.NOT_BOOL),
        (without_batch_first, ch01_exercises.TRANSPOSED),
        (lambda words: padded_with(words, -1), ch01_exercises.PAD_VALUE),
        (lambda words: with_mask(words, lambda _: torch.tensor([len(w) for w in words])), ch01_exercises.LENGTHS),
        (lambda words: with_mask(words, lambda _: [len(w) for w in words]), ch01_exercises.TENSORS),
        (lambda words: shifted(words, 0), ch01_exercises.UNSHIFTED),
        (lambda words: shifted(words, 97), ch01_exercises.FROM_ZERO),
        (lambda words: (padded_with(words, 0)[0].int(), padded_with(words, 0)[1]), ch01_exercises.LONG),
        (KeepsItsWidth(), ch01_exercises.TOO_WIDE),
        (fixed_width, ch01_exercises.TOO_WIDE),
        (lambda words: fixed_width(words, 64), ch01_exercises.TOO_WIDE),
        (lambda words: with_mask(words, lambda letters: letters == 0), ch01_exercises.FLIPPED),
        (lambda words: None, "for ['c'] it returned nothing. Does it end with `return`?"),
        (lambda words: torch.stack(letters_of(words)), ch01_exercises.PAIR),
    ],
)
def test_what_is_told_of_a_wrong_padding(answer, message):
    assert told(padded, answer).endswith(message)


def test_each_wrong_padding_gets_its_own_message_alone():
    messages = list(padded.wrong_answers())
    for message, wrong in padded.wrong_answers().items():
        fault = told(padded, wrong)
        assert [each for each in messages if each in fault] == [message]


@pytest.mark.thorough
def test_right_paddings_pass_however_they_are_made(capsys):
    padded.check(lambda words: padded_with(words, 0))
    padded.check(lambda words: list(padded_with(words, 0)))
    embed = nn.Embedding(27, 4)
    letters, mask = padded_with(["alice", "i"], 0)
    assert embed(letters)[mask].shape == (6, 4)  # what the letters and the mask are for
    assert capsys.readouterr().out.count("solved") == 2


@pytest.mark.parametrize(
    "answer",
    [
        lambda correct, sizes: torch.tensor(correct).sum() / torch.tensor(sizes).sum(),
        lambda correct, sizes: np.sum(correct) / np.sum(sizes),
        lambda correct, sizes: torch.tensor(correct, dtype=torch.double).sum() / sum(sizes),
        lambda correct, sizes: torch.tensor([sum(correct) / sum(sizes)]),
        lambda correct, sizes: Fraction(sum(correct), sum(sizes)),
    ],
)
def test_an_accuracy_may_be_a_tensor(answer, capsys):
    mean_accuracy.check(answer)
    assert "solved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda correct, sizes: torch.tensor(correct).div(torch.tensor(sizes)).mean(), "averages the batches"),
        (lambda correct, sizes: sum(correct) // sum(sizes), "rounds down to a whole number"),
        (lambda correct, sizes: sum(correct) / (128 * len(sizes)), "should be 0.5, got 0.015625"),
        (
            lambda correct, sizes: sum(correct) / (sizes[0] * (len(sizes) - 1) + sizes[-1]),
            "all batches but the last are as large as the first",
        ),
        (lambda correct, sizes: sum(correct), "is the number of right answers"),
    ],
)
def test_what_is_told_of_a_wrong_accuracy(answer, message):
    assert message in told(mean_accuracy, answer)


def by_hand_with_yield(samples, batch_size, order, drop_last):
    for start in range(0, len(order), batch_size):
        yield [samples[i] for i in order[start : start + batch_size]]


def by_hand_of_even_sizes(samples, batch_size, order, drop_last):
    ordered = np.array([samples[i] for i in order], dtype=object)
    batches = [part.tolist() for part in np.array_split(ordered, math.ceil(len(order) / batch_size))]
    return batches[:-1] if drop_last and len(order) % batch_size else batches


def by_hand_in_chunks(samples, batch_size, order, drop_last):
    parts = torch.tensor(order).chunk(math.ceil(len(order) / batch_size)) if order else []
    batches = [[samples[i] for i in part] for part in parts]
    return batches[:-1] if drop_last and len(order) % batch_size else batches


def by_hand_that_pops(samples, batch_size, order, drop_last):
    batches = []
    while order:
        batches.append([samples[order.pop(0)] for _ in range(min(batch_size, len(order)))])
    return batches[:-1] if drop_last and batches and len(batches[-1]) < batch_size else batches


def by_hand_in_place(samples, batch_size, order, drop_last):
    samples[:] = [samples[i] for i in order]
    full = len(samples) - (len(samples) % batch_size if drop_last else 0)
    return [samples[start : start + batch_size] for start in range(0, full, batch_size)]


def by_hand_of_tuples(samples, batch_size, order, drop_last):
    for batch in by_hand_with_yield(samples, batch_size, order, drop_last):
        if len(batch) == batch_size or not drop_last:
            yield tuple(batch)


def test_batches_may_be_yielded_and_be_tuples(capsys):
    by_hand.check(by_hand_of_tuples)
    assert "solved" in capsys.readouterr().out


def by_hand_always_dropping(samples, batch_size, order, drop_last):
    number = len(order) // batch_size
    return [[samples[i] for i in order[b * batch_size : (b + 1) * batch_size]] for b in range(number)]


def by_hand_one_batch_more(samples, batch_size, order, drop_last):
    number = len(order) // batch_size + 1
    return [[samples[i] for i in order[b * batch_size : (b + 1) * batch_size]] for b in range(number)]


def by_hand_dropping_the_last(samples, batch_size, order, drop_last):
    batches = list(by_hand_with_yield(samples, batch_size, order, drop_last))
    return batches[:-1] if drop_last else batches


def by_hand_measuring_the_last(samples, batch_size, order, drop_last):
    batches = list(by_hand_with_yield(samples, batch_size, order, drop_last))
    if drop_last and len(batches[-1]) < batch_size:
        batches.pop()
    return batches


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (by_hand_measuring_the_last, "raised IndexError"),
        (by_hand_of_even_sizes, "evens out the sizes: each batch is full, up to the last"),
        (by_hand_in_chunks, "should be"),
        (by_hand_that_pops, "changes `order`, which is its caller's"),
        (by_hand_in_place, "changes `samples`, which is its caller's"),
        (by_hand_always_dropping, "loses the short last batch"),
        (by_hand_one_batch_more, "ends with an empty batch"),
        (by_hand_dropping_the_last, "lacks a batch that was full"),
        (lambda samples, order, **_: [samples[i] for i in order], "each batch is a list of its own"),
        (lambda samples, batch_size, order, drop_last: [order[:2], order[2:]], "are positions"),
    ],
)
def test_what_is_told_of_batches_that_are_wrong(answer, message):
    assert re.search(re.escape(message), told(by_hand, answer))
