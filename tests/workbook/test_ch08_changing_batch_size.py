"""The numbers behind chapter 08's figures, widget and exercises."""

import pytest
import torch
import torch.nn.functional as F
from workbook.ch08_changing_batch_size import (
    _gain,
    _within,
    digit_net,
    figure_of_epochs,
    figure_of_runs,
    figure_of_schedule,
    peak_mib,
    schedule_explorer,
)
from workbook.display import png_bytes

from course_lib.memory import measure_peak
from course_lib.schedules import SizeSchedule
from tests import effort


def test_a_row_has_a_block_for_each_batch_and_says_what_is_missing():
    axes = figure_of_epochs({"cut": [16, 8], "whole": [16, 16, 16]}).axes[0]
    blocks = [(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_height() == 0.7]
    assert blocks == [(0, 16), (16, 8), (24, 24), (0, 16), (16, 16), (32, 16)]
    assert [text.get_text() for text in axes.texts] == ["24 never trained"]


def test_runs_are_drawn_against_their_pixels_with_a_panel_for_each_measure():
    curves = {"a": [(1.0, 0.5), (2.0, 0.75)], "b": [(0.5, 0.25)]}
    figure = figure_of_runs(curves, {"seconds": {"a": 4.0, "b": 2.0}, "samples": {"a": 8622, "b": 1}})
    first, *panels = figure.axes
    assert [line.get_xydata().tolist() for line in first.lines] == [[[1, 0.5], [2, 0.75]], [[0.5, 0.25]]]
    assert [[bar.get_height() for bar in panel.patches] for panel in panels] == [[4, 2], [8622, 1]]
    assert "8,622" in [text.get_text() for text in panels[1].texts]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_a_schedule_is_drawn_at_the_steps_of_its_plan():
    plan = SizeSchedule({0: (16, 16), 1: (32, 4)}).plan(48, max_epochs=2)
    sizes, batches, _, rates = (axes.lines[0].get_xydata().tolist() for axes in figure_of_schedule(plan, "sqrt").axes)
    assert sizes == [[0, 16], [3, 32], [15, 32]]
    assert batches == [[0, 16], [3, 4], [15, 4]]
    assert rates == [[0, 1], [3, 0.5], [15, 0.5]]


PLACES = [(True, 64), (False, 32), (True, 48), (False, 64), (True, 32), (False, 48)]


@pytest.mark.parametrize(("hold", "largest"), PLACES[: effort.cases(2, 6)])
def test_every_place_of_the_controls_gives_a_plan(hold, largest):
    explorer = schedule_explorer()
    explorer.set(hold=hold, largest=largest)
    for smallest in (8, 32):
        for epochs in (3, 12):
            assert "optimizer steps" in explorer.set(smallest=smallest, epochs=epochs)


def test_holding_the_effective_batch_makes_every_update_as_large():
    words = schedule_explorer().set(hold=True)
    assert [line.split()[4] for line in words.splitlines()[1:4]] == ["1", "4", "16"]
    assert "36 optimizer steps" in words  # six epochs of ceil(1437 / 256)


def test_the_peak_bytes_are_those_of_a_real_step():
    net = digit_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step():
        F.cross_entropy(net(torch.ones(8, 1, 16, 16)), torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert peak_mib(16, 8) == pytest.approx(measure_peak(step, model=net).peak_bytes / 2**20, rel=0.01)


def test_runs_are_compared_at_the_cost_of_the_cheaper_one():
    baseline, resized = [(2, 0.5), (2, 0.75)], [(1, 0.25), (1, 0.375), (2, 0.625), (2, 0.875)]
    assert _within(resized, 8, lambda side: side**2) == 0.625
    assert _gain(baseline, resized) == -0.125
    assert _gain(resized, baseline) == 0.125
