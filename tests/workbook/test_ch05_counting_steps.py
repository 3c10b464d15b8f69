"""The numbers behind chapter 05's figures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workbook.ch05_counting_steps import (
    cosine_rates,
    figure_of_schedules,
    figure_of_steps,
    figure_of_tails,
    step_boxes,
    steps_explorer,
)
from workbook.display import png_bytes

from course_lib.steps import plan_steps

plans = st.builds(
    plan_steps,
    st.integers(1, 40),
    st.integers(1, 9),
    accumulate_grad_batches=st.integers(1, 5) | st.just({1: 3}),
    world_size=st.integers(1, 3),
    drop_last=st.booleans(),
    max_epochs=st.integers(1, 4),
    max_steps=st.sampled_from([-1, 0, 1, 4]),
    limit_train_batches=st.sampled_from([1.0, 3, 0.5]),
    tail=st.sampled_from(["step", "carry", "drop"]),
)


@given(plans)
def test_boxes_cover_each_epochs_samples_once_and_agree_with_the_plan(plan):
    boxes = step_boxes(plan, epochs=3)
    for epoch in range(3):
        spans = [box.samples for box in boxes if box.epoch == epoch]
        assert [a for a, _ in spans] == [0, *[b for _, b in spans[:-1]]]
        assert spans[-1][1] == math.ceil(plan.num_samples / plan.world_size)
    windows = [w for w in plan.windows if w.epoch < 3]
    stepping = [box for box in boxes if box.label]
    assert [int(box.label.split()[0]) for box in stepping] == [w.optimizer_step + 1 for w in windows]
    assert [len(box.batch_edges) - 1 for box in stepping] == [w.stop - w.start for w in windows]
    carried = [int(box.label.split("+")[1].rstrip(")")) if "+" in box.label else 0 for box in stepping]
    assert carried == [w.carried for w in windows]


def test_the_fates_of_a_tail():
    def fates(**arguments):
        return [box.fate for box in step_boxes(plan_steps(22, 4, accumulate_grad_batches=4, **arguments), epochs=1)]

    assert fates(max_epochs=1) == ["full window", "short window"]
    assert fates(max_epochs=2, tail="carry") == ["full window", "leaks into the next epoch"]
    assert fates(max_epochs=1, tail="carry") == ["full window", "never applied"]
    assert fates(max_epochs=1, tail="drop") == ["full window", "gradient thrown away"]
    assert fates(max_epochs=1, drop_last=True) == ["full window", "short window", "dropped"]
    assert fates(max_steps=1) == ["full window", "not run"]


@pytest.mark.parametrize(("horizon", "at_end"), [(60, 0.0), (50, 0.5 * (1 + math.cos(math.pi * 60 / 50)))])
def test_cosine_rates_end_where_the_formula_says(horizon, at_end):
    rates = cosine_rates(horizon, optimizer_steps=60)
    assert len(rates) == 61
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(at_end, abs=1e-9)


def test_figures_are_drawn():
    figures = [
        figure_of_tails(37, 4, 4),
        figure_of_steps(plan_steps(33, 8, max_epochs=2), title="t"),
        figure_of_steps(plan_steps(3, 8, drop_last=True, max_epochs=2), title="nothing trains"),
        figure_of_schedules({"a": [1.0, 0.0]}, {"a": [0.5, 0.9]}),
    ]
    assert all(png_bytes(figure).startswith(b"\x89PNG") for figure in figures)


@pytest.mark.parametrize("tail", ["step", "carry", "drop"])
def test_a_drawn_row_has_a_mark_for_every_step(tail):
    plan = plan_steps(37, 4, accumulate_grad_batches=4, max_epochs=3, tail=tail)
    axes = figure_of_steps(plan, title="t").axes[0]
    assert sorted(int(text.get_text().split()[0]) for text in axes.texts) == list(range(1, plan.total_steps + 1))
    crowded = figure_of_steps(plan_steps(240, 1, max_epochs=3), title="t").axes[0]
    assert not crowded.texts


def test_the_widget_follows_its_controls():
    explorer = steps_explorer()
    before = explorer._image.value
    text = explorer.set(num_samples=33, batch_size=8, accumulate_grad_batches=2, world_size=2, drop_last=True)
    plan = plan_steps(33, 8, accumulate_grad_batches=2, world_size=2, drop_last=True, max_epochs=3)
    assert text == f"{plan.explain()}\n\n{plan.table()}"
    assert explorer._image.value != before
    explorer.set(num_samples=7)
    assert "Nothing will train" in explorer.text
