"""The numbers behind chapter 04's figures and widget."""

import numpy as np
import pytest
import torch
from torch import nn
from workbook.ch04_gradient_accumulation import (
    arrows,
    arrows_explorer,
    figure_of_training,
    figure_of_weights,
    peak_saved_bytes,
    sample_weights,
)
from workbook.display import png_bytes


def test_both_ways_give_the_samples_of_a_window_a_weight_of_one_in_all():
    sizes = [40, 16, 4, 4]
    for weights in sample_weights(sizes, k=4).values():
        assert sum(weight * size for weight, size in zip(weights, sizes, strict=True)) == pytest.approx(1)
    assert sample_weights([8], k=4)["loss / k"] == [1 / 32]  # a short window's samples weigh too little


def test_the_bars_of_the_figure_are_the_weights():
    figure = figure_of_weights([40, 16, 4, 4], k=4)
    bars = figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == sample_weights([40, 16, 4, 4], 4)["loss / k"]
    assert [bar.get_width() for bar in bars] == [40, 16, 4, 4]
    assert png_bytes(figure).startswith(b"\x89PNG")


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


def test_the_widget_follows_its_controls():
    explorer = arrows_explorer()
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
