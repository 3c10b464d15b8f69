"""The numbers behind chapter 04's figures and widget, and what its exercises tell those who answer them wrongly."""

import re

import numpy as np
import pytest
import torch
from matplotlib.patches import ArrowStyle
from torch import nn
from workbook.ch04_accumulation_lab import causes, measure
from workbook.ch04_exercises import applied_gradients, logged_loss, rank_factor
from workbook.ch04_gradient_accumulation import (
    arrows,
    arrows_error,
    arrows_explorer,
    distances_of_means,
    figure_of_arrows,
    figure_of_both,
    figure_of_draws,
    figure_of_training,
    peak_saved_bytes,
    shares,
)
from workbook.display import png_bytes
from workbook.exercises import NotSolved

SIZES = [40, 16, 4, 4]
BY_RECIPE = [1 / (4 * size) for size in SIZES for _ in range(size)]


def test_the_share_of_a_micro_batch_is_the_sum_of_its_samples_weights():
    assert shares(SIZES, BY_RECIPE) == pytest.approx([0.25] * 4)
    assert shares(SIZES, [1 / 64] * 64) == pytest.approx([size / 64 for size in SIZES])


@pytest.mark.thorough
def test_both_ways_are_drawn_over_each_other():
    figure = figure_of_both({"one": (SIZES, BY_RECIPE, [1 / 64] * 64), "two": ([24, 8], [0.1] * 32, [1 / 32] * 32)})
    left, right = figure.axes
    assert [left.get_title(), right.get_title()] == ["one", "two"]
    assert [bar.get_width() for bar in right.patches[:-1]] == [24, 8]
    assert [bar.get_height() for bar in left.patches[:-1]] == [1 / 160, 1 / 64, 1 / 16, 1 / 16]
    assert [text.get_text() for text in left.texts] == ["25%"] * 4
    assert png_bytes(figure).startswith(b"\x89PNG")
    for axes, level in ((left, 1 / 64), (right, 1 / 32)):
        assert set(axes.patches[-1].get_data().values) == {level}


def test_distances_of_means_are_those_of_the_first_rows():
    some, others = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    assert distances_of_means(some, others, [1, 2]) == [0.75, 0.75]


def test_the_curves_over_draws_are_the_distances():
    figure = figure_of_draws({"noise": [0.6, 0.2], "bias": [0.3, 0.3]}, [1, 9])
    drawn = [line.get_xydata().tolist() for line in figure.axes[0].lines]
    assert drawn == [[[1, 0.6], [9, 0.2]], [[1, 0.3], [9, 0.3]]]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "9"]


def test_a_run_is_drawn_against_its_steps_and_against_its_epochs():
    figure = figure_of_training({"a": ([3, 6], [0.5, 0.75])})
    drawn = [line.get_xydata().tolist() for axes in figure.axes for line in axes.lines]
    assert drawn == [[[3, 0.5], [6, 0.75]], [[1, 0.5], [2, 0.75]]]


def test_the_arrows_meet_for_equal_sizes_and_only_then():
    _, equal, big = arrows([7, 7, 7])
    assert np.allclose(equal, big)
    each, equal, big = arrows([24, 8, 2])
    assert np.allclose(equal, each.mean(0))
    assert np.allclose(big, (24 * each[0] + 8 * each[1] + 2 * each[2]) / 34)
    assert np.linalg.norm(equal - big) > 0.1


def test_the_arrows_have_heads_and_end_where_the_gradients_do():
    each, equal, big = arrows([24, 8, 2])
    (axes,) = figure_of_arrows([24, 8, 2]).axes
    ends = [note.xy for note in axes.texts]
    assert np.allclose(ends, [*each, equal, big])
    assert all(isinstance(note.arrow_patch.get_arrowstyle(), ArrowStyle.CurveFilledB) for note in axes.texts)
    assert axes.get_title().endswith(f"{arrows_error([24, 8, 2]):.0%}")


@pytest.mark.thorough
def test_the_widget_follows_its_controls():
    explorer = arrows_explorer()
    assert explorer.text == f"sizes (24, 8, 2): relative error of loss / k {arrows_error([24, 8, 2]):.3f}"
    assert "error of loss / k 0.000" in explorer.set(first=9, second=9, third=9)
    assert "(9, 9, 1)" in explorer.set(third=1)


def test_peak_saved_bytes_counts_each_tensor_once_and_only_while_it_is_held():
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(8, 4)
    size = inputs.nbytes
    assert peak_saved_bytes(lambda: model(inputs), model) == 2 * size  # the input, and the result of tanh

    def in_halves():
        for half in inputs.chunk(2):
            model(half).sum().backward()

    assert peak_saved_bytes(in_halves, model) == size


def test_all_ways_draw_the_same_dropout_masks():
    (found,) = measure(0, [causes()["dropout 0.5"]])
    assert max(found.values()) - min(found.values()) < 1e-9
    assert found["usual recipe"] > 0.5


def loop(*, divide, after="guarded"):
    """A loop with running numbers; `divide` takes a window's sum, its samples, its micro-batches and k."""

    def answer(micro_batches, k):
        applied, total, samples, batches = [], 0.0, 0, 0
        for batch in micro_batches:
            total, samples, batches = total + sum(batch), samples + len(batch), batches + 1
            if batches == k:
                applied.append(divide(total, samples, batches, k))
                total, samples, batches = 0.0, 0, 0
        if after == "unguarded" or (after == "guarded" and batches):
            applied.append(divide(total, samples, batches, k))
        return applied

    return answer


def by_samples(total, samples, batches, k):
    return total / samples


def reset_first(micro_batches, k):
    applied, total, samples = [], 0.0, 0
    for i, batch in enumerate(micro_batches, start=1):
        total += sum(batch)
        samples += len(batch)
        if i % k == 0 or i == len(micro_batches):
            samples = 0
            applied.append(total / samples)
    return applied


def token_mean(losses, tokens):
    return sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)


WRONG = {
    "an unguarded step after the loop": (
        applied_gradients,
        loop(divide=by_samples, after="unguarded"),
        "the step after the loop is made although the last window was full",
    ),
    "an unguarded step by k": (
        applied_gradients,
        loop(divide=lambda total, samples, batches, k: total / k, after="unguarded"),
        "has one update too many",
    ),
    "reset before the division": (applied_gradients, reset_first, "the count was reset before the division"),
    "by samples, no step for the tail": (
        applied_gradients,
        loop(divide=by_samples, after="none"),
        "lacks the short window",
    ),
    "by k": (
        applied_gradients,
        loop(divide=lambda total, samples, batches, k: total / k),
        "a sum over samples, divided by micro-batches",
    ),
    "a step for each": (
        applied_gradients,
        lambda micro_batches, k: [sum(batch) / len(batch) for batch in micro_batches],
        "steps after every micro-batch",
    ),
    "factor: over the largest": (
        rank_factor,
        lambda counts, rank: counts[rank] / max(counts),
        "compares the rank with the largest",
    ),
    "factor: over the smallest": (
        rank_factor,
        lambda counts, rank: counts[rank] / (min(counts) or 1),
        "compares the rank with the smallest",
    ),
    "factor: 1": (rank_factor, lambda counts, rank: 1, "what DDP does by itself"),
    "factor: the share": (
        rank_factor,
        lambda counts, rank: counts[rank] / sum(counts),
        "DDP divides its gradient once more",
    ),
    "factor: of a sum": (rank_factor, lambda counts, rank: len(counts) / sum(counts), "the factor of a summed loss"),
    "factor: own over ranks": (
        rank_factor,
        lambda counts, rank: counts[rank] / len(counts),
        "nothing divides by the samples",
    ),
    "factor: the share upside down": (
        rank_factor,
        lambda counts, rank: sum(counts) / counts[rank],
        "DDP's division is still there",
    ),
    "loss: by micro-batches": (
        logged_loss,
        lambda losses, tokens, k: sum(losses) / len(losses),
        "averages averages",
    ),
    "loss: by updates and k": (
        logged_loss,
        lambda losses, tokens, k: sum(losses) / (max(1, len(losses) // k) * k),
        "takes k losses for each update",
    ),
    "loss: the tokens' mean by k": (
        logged_loss,
        lambda losses, tokens, k: token_mean(losses, tokens) / k,
        "it is a mean already",
    ),
    "loss: tokens by updates": (
        logged_loss,
        lambda losses, tokens, k: token_mean(losses, tokens) * sum(tokens) / max(1, len(losses) // k),
        "a sum over tokens, divided by updates",
    ),
}


@pytest.mark.parametrize(("exercise", "answer", "message"), WRONG.values(), ids=WRONG)
def test_a_natural_wrong_answer_gets_its_own_message(exercise, answer, message):
    with pytest.raises(NotSolved, match=re.escape(message)):
        exercise.check(answer)


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (applied_gradients, loop(divide=by_samples)),
        (rank_factor, lambda counts, rank: counts[rank] / (sum(counts) / len(counts))),
        (logged_loss, lambda losses, tokens, k: (torch.tensor(losses) @ torch.tensor(tokens).float()) / sum(tokens)),
    ],
)
def test_other_right_answers_pass(exercise, answer):
    exercise.check(answer)
