"""The numbers behind chapter 01's figures and widgets."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from workbook.ch01_batching import (
    RECORDED_SECONDS,
    Noise,
    Run,
    UnshardedStream,
    WhoLoads,
    batch_explorer,
    figure_of_noise,
    figure_of_sizes,
    figure_of_throughput,
    figure_of_training,
    figure_of_winners,
    noise,
    sample_gradients,
    throughput_explorer,
    trade,
)
from workbook.ch04_gradient_accumulation import peak_saved_bytes
from workbook.display import png_bytes


def test_the_gradients_of_the_samples_are_those_of_batches_of_one():
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3), torch.arange(5) % 2
    rows = sample_gradients(net, F.cross_entropy, x, y)
    assert rows.dtype == torch.double and rows.shape == (5, 3 * 4 + 4 + 4 * 2 + 2)
    net.double()
    for row, one_x, one_y in zip(rows, x.double(), y, strict=True):
        net.zero_grad()
        F.cross_entropy(net(one_x[None]), one_y[None]).backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
        assert torch.allclose(row, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("size", range(1, 6))
def test_the_noise_is_the_mean_over_every_possible_batch(size: int):
    gradients = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    deviations, spread = gradients - gradients.mean(0), Noise(gradients).spread
    assert spread == pytest.approx(deviations.square().sum(1).mean().item())
    for replacement, batches in (
        (True, itertools.product(range(5), repeat=size)),
        (False, itertools.combinations(range(5), size)),
    ):
        squares = [deviations[list(batch)].mean(0).square().sum().item() for batch in batches]
        expected = noise(size, spread, 5, replacement=replacement)
        assert sum(squares) / len(squares) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("replacement", [True, False])
def test_the_measured_noise_is_the_expected(replacement: bool):
    measure = Noise(torch.randn(50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.double))
    for size in (1, 7, 40):
        found = measure.measure(size, replacement=replacement, draws=2000)
        assert found == pytest.approx(noise(size, measure.spread, 50, replacement=replacement), rel=0.1)
    assert measure.measure(50, replacement=False) == pytest.approx(0, abs=1e-12)


def test_noise_is_signal_at_the_size_where_they_are_equal():
    gradients = torch.tensor([[3.0, 0.0], [-1.0, 0.0]])  # mean 1, one sample's noise 4
    measured = Noise(gradients)
    assert (measured.spread, measured.size_where_noise_is_signal) == (4, 4)
    assert noise(1, 4.0, 1, replacement=False) == 4  # of one sample, no factor is to be divided by 0


def test_the_noise_figure_has_points_beside_lines():
    measured = {True: {1: 8.0, 2: 4.0}, False: {1: 8.0, 4: 0.0}}
    points = [line.get_xydata().tolist() for line in figure_of_noise(measured, 8.0, samples=4).axes[0].lines]
    assert points[1] == [[1, 1.0], [2, 0.5]] and points[3] == [[1, 1.0]]  # a noise of 0 has no logarithm
    assert points[0] == [[size, 1 / size] for size in (1, 2, 3, 4)]
    assert points[2] == [[size, (4 - size) / 3 / size] for size in (1, 2, 3)]


def test_the_accuracies_are_drawn_as_they_are():
    accuracies = {1: 0.1, 32: 0.9, 100: 0.4}
    assert figure_of_sizes(accuracies, 0.1).axes[0].lines[0].get_xydata().tolist() == [[1, 0.1], [32, 0.9], [100, 0.4]]


def test_a_run_is_drawn_by_samples_and_by_the_seconds_of_its_updates():
    run = Run(samples=[64, 128], seconds=[9.0, 9.5], losses=[2.0, 0.2])
    figure = figure_of_winners({32: run}, {32: 0.5}, target=0.3)
    drawn = [axes.lines[0].get_xydata().tolist() for axes in figure.axes]
    assert drawn == [[[64, 2.0], [128, 0.2]], [[1.0, 2.0], [2.0, 0.2]]]
    assert run.until(0.3) == (128, 9.5) and run.until(0.1) is None


def test_losses_and_accuracies_are_drawn_against_epochs():
    drawn = [axes.lines[0].get_xydata().tolist() for axes in figure_of_training([2.0, 1.0], [0.5, 0.75]).axes]
    assert drawn == [[[1, 2.0], [2, 1.0]], [[1, 0.5], [2, 0.75]]]


def test_throughput_is_samples_over_seconds_beside_the_first_size_scaled():
    lines = figure_of_throughput({"here": {1: 0.5, 4: 1.0}}).axes[0].lines
    assert [line.get_xydata().tolist() for line in lines] == [[[1, 2.0], [4, 4.0]], [[1, 2.0], [4, 8.0]]]


def test_the_recorded_seconds_rise_and_their_throughput_bends():
    seconds = list(RECORDED_SECONDS.values())
    assert seconds == sorted(seconds) and list(RECORDED_SECONDS) == sorted(RECORDED_SECONDS)
    assert 64 * seconds[0] / RECORDED_SECONDS[64] > 16 > 64 * RECORDED_SECONDS[64] / RECORDED_SECONDS[4096]


def test_the_widget_shows_what_was_measured_on_each_device():
    own = {"this CPU": {1: 1e-4, 64: 64e-5, 4096: 4096e-6}, "this GPU": {1: 2e-4, 64: 2e-4, 4096: 2e-4}}
    explorer = throughput_explorer(own)
    assert explorer.text.splitlines()[:2] == ["B = 1: 100.00 µs a sample", "B = 64: 10.00 µs a sample"]
    assert "B = 64: 3.12 µs a sample" in explorer.set(shown="this GPU")


@pytest.mark.parametrize("samples", [1, 7, 96, 1437])
def test_the_updates_of_an_epoch_are_the_batches_of_a_loader(samples: int):
    for size in {1, 2, 32, samples} & set(range(1, samples + 1)):
        lengths = [len(batch) for batch in DataLoader(range(samples), size)]
        epoch = trade(size, samples, 250)
        assert (epoch.updates, epoch.last_batch) == (len(lengths), lengths[-1])


def test_an_epoch_takes_its_updates_and_its_samples():
    assert trade(1, 100, 250).time == 1
    assert trade(30, 100, 250).time == (4 * 250 + 100) / (100 * 250 + 100)
    assert trade(100, 100, 250).noise == 0


@pytest.mark.parametrize("size", [0, 101])
def test_a_batch_is_not_larger_than_the_samples(size: int):
    with pytest.raises(ValueError, match=f"from 1 to the 100 samples, got {size}"):
        trade(size, 100, 250)


def test_the_saved_bytes_are_those_of_the_chapters_net():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.rand(40, 1, 8, 8), torch.arange(40) % 10
    for size in (1, 7, 40):
        counted = peak_saved_bytes(lambda size=size: F.cross_entropy(net(x[:size]), y[:size]), net)
        assert counted == trade(size, 40, 250).saved_bytes


def test_the_widget_follows_its_controls():
    explorer = batch_explorer(samples=100)
    assert "4 updates an epoch, the last of 4" in explorer.set(batch_size=32)
    assert explorer.set(batch_size=50).startswith("2 updates an epoch\nnoise 0.0101 of one sample's\n28,004 bytes")
    assert "51.0% of the time" in explorer.set(update_cost=1)
    assert explorer.set(batch_size=100).startswith("1 update an epoch\nnoise 0.0000")


def test_the_figures_are_pictures():
    measured = {way: {1: 1.0, 8: 0.1} for way in (True, False)}
    for figure in (figure_of_noise(measured, 1.0, 16), figure_of_throughput({"recorded": RECORDED_SECONDS})):
        assert png_bytes(figure).startswith(b"\x89PNG")


def test_each_worker_reads_the_whole_of_a_stream_that_is_not_shared_out():
    batches = DataLoader(UnshardedStream(4), 2, num_workers=2)
    assert [batch.tolist() for batch in batches] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_sample_knows_its_reader():
    assert list(map(WhoLoads(2).__getitem__, range(2))) == [(0, -1), (1, -1)]
    batches = DataLoader(WhoLoads(4), 2, num_workers=2)
    assert [(i.tolist(), workers.tolist()) for i, workers in batches] == [([0, 1], [0, 0]), ([2, 3], [1, 1])]
