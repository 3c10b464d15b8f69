"""The numbers behind chapter 03's figures, widget and exercises."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from workbook import ch03_gpu_memory as gpu_memory
from workbook.ch03_exercises import _peak_bytes
from workbook.ch03_memory import (
    figure_of_line,
    figure_of_lines,
    figure_of_step,
    figure_of_trades,
    graph_nodes,
    memory_explorer,
    predicted,
    told,
)
from workbook.display import png_bytes

from course_lib.memory import measure_peak
from course_lib.memory.allocator import MIB
from course_lib.memory.ledger import CATEGORIES, Moment, Peak


def moment(phase, **held):
    return Moment(phase, dict.fromkeys(CATEGORIES, 0) | {name: count * MIB for name, count in held.items()})


TIMELINE = [
    moment("before", parameters=1),
    moment("forward", parameters=1, activations=4),
    moment("backward", parameters=1, activations=4, temporary=2),
    moment("backward", parameters=1, gradients=1),
    moment("step", parameters=1, gradients=1),
    moment("forward", parameters=1),
]


def test_the_worst_moment_of_each_phase():
    assert {phase: held // MIB for phase, held in Peak(TIMELINE).peak_by_phase().items()} == {
        "forward": 5,
        "backward": 7,
        "step": 2,
    }


def test_the_areas_of_a_step_add_up_to_what_is_held():
    axes = figure_of_step(TIMELINE).axes[0]
    top = [max(y for _, y in area.get_paths()[0].vertices) for area in axes.collections]
    assert top[-1] == 7
    assert [text.get_text() for text in axes.texts] == ["forward", "backward", "step", "after"]
    peak = axes.lines[-1]
    assert (list(peak.get_xdata()), list(peak.get_ydata())) == ([1], [7])


def test_lines_are_the_peaks_of_their_phases():
    peaks = {1: dict(forward=2 * MIB, backward=3 * MIB, step=4 * MIB), 8: dict(forward=9 * MIB, backward=8 * MIB, step=4 * MIB)}  # fmt: skip  # noqa: E501
    axes = figure_of_lines(peaks, limit_bytes=6 * MIB).axes[0]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines[:3]}
    assert drawn == {"forward": [[1, 2], [8, 9]], "backward": [[1, 3], [8, 8]], "step": [[1, 4], [8, 4]]}


@pytest.mark.thorough
def test_bars_of_trades_end_at_the_peak():
    def way(**held):
        return replace(predicted(batch=2, side=32, width=8), timeline=[moment("", **held)])

    ways = {"plain": way(parameters=2, activations=3), "other": way(parameters=2)}
    figure = figure_of_trades({8: ways, 16: ways})
    ends = [max(bar.get_x() + bar.get_width() for bar in row) for row in zip(*figure.axes[0].containers, strict=True)]
    assert ends == [5, 2]
    assert [text.get_text() for text in figure.axes[0].texts] == ["× 1.00", "× 0.40"]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_a_line_through_two_sizes_ends_at_the_limit():
    measured = {1: 20, 2: 21, 10: 50, 20: 90}
    axes = figure_of_line(measured, [(1, 2), (10, 20)], limit_bytes=130).axes[0]
    wrong, right = axes.lines[0], axes.lines[2]
    assert (list(wrong.get_xdata()), list(right.get_xdata())) == ([0, 111], [0, 30])
    assert [y * 1e6 for y in right.get_ydata()] == [10, 130]
    assert [text.get_text() for text in axes.texts] == ["111", "30"]


@pytest.mark.thorough
def test_the_widget_predicts_what_its_controls_say():
    explorer = memory_explorer()
    assert explorer.text == told(predicted())  # the stored picture beside it shows the same settings
    small = explorer.set(batch=8, side=64, width=8)
    assert "8 GB card, of which 90% are 7.2 GB: fits" in small
    large = explorer.set(batch=512, side=512, width=64)
    assert "8 GB card, of which 90% are 7.2 GB: does not fit" in large
    assert "80 GB card, of which 90% are 72.0 GB: does not fit" in large


def test_the_widget_says_the_number_that_decides():
    # 6.94 GB of tensors would fit into 90% of 8 GB; the 8.38 GB that are reserved for them do not.
    timeline = [Moment("before", {"activations": 0}), Moment("backward", {"activations": 6_940_000_000})]
    words = told(replace(predicted(batch=2, side=32, width=8), timeline=timeline, reserved_bytes=8_380_000_000))
    assert "reserved for them:   8.38 GB\n8 GB card, of which 90% are 7.2 GB: does not fit" in words


def test_graph_nodes_are_counted_once():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert len(graph_nodes([y, y + 1])) == 3  # AccumulateGrad, Mul, Add
    assert graph_nodes([torch.ones(1)]) == set()


@pytest.mark.parametrize(("batch_size", "optimizer", "copies"), [(8, "SGD", 0), (4096, "AdamW", 2), (64, "AdamW", 2)])
def test_the_formula_of_the_first_exercise_is_near_what_is_measured(batch_size, optimizer, copies):
    width, depth = 128, 24
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))
    updater = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    inputs = torch.ones(batch_size, width)

    def step():
        F.mse_loss(model(inputs), inputs).backward()
        updater.step()
        updater.zero_grad()

    step()
    measured = measure_peak(step, model=model, optimizer=updater).peak_bytes
    parameters = sum(parameter.numel() for parameter in model.parameters())
    by_hand = _peak_bytes(parameters, width * depth, batch_size, copies)
    assert 0.8 < by_hand / measured < 1


def test_a_recording_is_shown_with_its_device_versions_and_date(tmp_path):
    assert "python -m workbook.ch03_gpu_memory" in gpu_memory.shown(tmp_path / "none.json")
    path = tmp_path / "memory.json"
    recorded = {
        "device": "a GPU",
        "versions": {"torch": "2"},
        "date": "2026-01-01",
        "step": "one",
        "bytes": {"held": 2048},
    }
    path.write_text(json.dumps(recorded))
    assert gpu_memory.shown(path) == "a GPU, torch 2, 2026-01-01: one\n   2,048 B  held"


@pytest.mark.gpu
def test_a_gpu_is_recorded():
    recorded = gpu_memory.record()["bytes"]
    peak, predicted, polled, after, reserved, used, before = recorded.values()
    assert before <= used
    assert reserved <= used
    assert after < polled <= peak <= reserved
    workspaces = 2 * 32 * 2**20  # of cuDNN and cuBLAS, which a prediction leaves out and says so
    assert 0.9 * predicted <= peak <= 1.1 * predicted + workspaces


def test_without_a_gpu_there_is_nothing_to_record(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="a CUDA device is needed"):
        gpu_memory.record()
