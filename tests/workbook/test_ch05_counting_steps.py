"""The numbers behind chapter 05's figures, and what its exercises say to wrong answers."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workbook.ch05_counting_steps import (
    cosine_rates,
    count_by_hand,
    figure_of_losses,
    figure_of_rates,
    figure_of_steps,
    figure_of_tails,
    max_steps_on_four_ranks,
    max_steps_on_two_ranks,
    run_boxes,
    schedule_horizon,
    step_boxes,
    steps_explorer,
    steps_per_epoch,
)
from workbook.display import png_bytes
from workbook.exercises import NotSolved

from course_lib.steps import plan_steps

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "05_counting_steps.ipynb"

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
    short_window=st.sampled_from(["step", "carry", "zero"]),
)


@settings(deadline=None)
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
    assert fates(max_epochs=2, short_window="carry") == ["full window", "leaks into the next epoch"]
    assert fates(max_epochs=1, short_window="carry") == ["full window", "in no step"]
    assert fates(max_epochs=1, short_window="zero") == ["full window", "in no step"]
    assert fates(max_epochs=1, drop_last=True) == ["full window", "short window", "dropped"]
    assert fates(max_steps=1) == ["full window", "not run"]


def recorded_run(num_samples, batch_size, k, epochs, short_window):
    """What the notebook's models record, from a loop written out: a weight for each sample, a gradient of 1."""
    weights, gradient = [0.0] * num_samples, [0.0] * num_samples
    batches, snapshots = [], []
    starts = range(0, num_samples, batch_size)
    for _ in range(epochs):
        if short_window == "zero":
            gradient = [0.0] * num_samples
        for number, start in enumerate(starts, start=1):
            batch = list(range(start, min(start + batch_size, num_samples)))
            batches.append(batch)
            snapshots.append(list(weights))
            for sample in batch:
                gradient[sample] += 1.0
            if number % k == 0 or (short_window == "step" and number == len(starts)):
                weights = [weight - change for weight, change in zip(weights, gradient, strict=True)]
                gradient = [0.0] * num_samples
    return batches, [*snapshots, weights]


@pytest.mark.parametrize("short_window", ["step", "carry", "zero"])
@pytest.mark.parametrize(("num_samples", "batch_size", "k"), [(37, 4, 4), (40, 4, 3), (32, 4, 4), (9, 2, 2), (5, 5, 1)])
def test_a_recorded_run_is_drawn_as_its_plan(num_samples, batch_size, k, short_window):
    batches, weights = recorded_run(num_samples, batch_size, k, epochs=3, short_window=short_window)
    plan = plan_steps(num_samples, batch_size, accumulate_grad_batches=k, max_epochs=3, short_window=short_window)
    assert run_boxes(batches, weights, epochs=3, accumulate_grad_batches=k) == step_boxes(plan, epochs=3)


@pytest.mark.parametrize(("horizon", "at_end"), [(60, 0.0), (50, 0.5 * (1 + math.cos(math.pi * 60 / 50)))])
def test_cosine_rates_end_where_the_formula_says(horizon, at_end):
    rates = cosine_rates(horizon, optimizer_steps=60)
    assert len(rates) == 61
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(at_end, abs=1e-9)


@pytest.mark.thorough
def test_figures_are_drawn():
    boxes = step_boxes(plan_steps(37, 4, accumulate_grad_batches=4, max_epochs=3, short_window="carry"), epochs=3)
    figures = [
        figure_of_tails({"leaks": boxes, "leaks again": boxes}),
        figure_of_steps(plan_steps(33, 8, max_epochs=2)),
        figure_of_steps(plan_steps(3, 8, drop_last=True, max_epochs=2)),  # nothing trains
        figure_of_rates({"a": [1.0, 0.0], "b": [1.0, 0.5]}),
        figure_of_losses({"a": [1.0, 0.0]}, {"a": [0.5, 0.4]}),
    ]
    assert all(png_bytes(figure).startswith(b"\x89PNG") for figure in figures)


def test_the_title_of_a_recorded_run_counts_its_steps():
    boxes = step_boxes(plan_steps(37, 4, accumulate_grad_batches=4, max_epochs=3, short_window="carry"), epochs=3)
    axes = figure_of_tails({"leaks": boxes, "again": boxes}).axes[0]
    assert axes.get_title() == "leaks:\n6 optimizer steps"
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3 (+2)", "4", "5 (+2)", "6"]


@pytest.mark.thorough
def test_a_drawn_row_has_a_mark_for_every_step():
    plan = plan_steps(37, 4, accumulate_grad_batches=4, max_epochs=3)
    axes = figure_of_steps(plan).axes[0]
    assert sorted(int(text.get_text()) for text in axes.texts) == list(range(1, plan.total_steps + 1))
    assert axes.get_title() == "3 optimizer steps per epoch, 9 in the run"
    crowded = figure_of_steps(plan_steps(240, 1, max_epochs=3)).axes[0]
    assert not crowded.texts


@pytest.mark.thorough
def test_the_widget_follows_its_controls():
    explorer = steps_explorer()
    before = explorer._image.value
    text = explorer.set(num_samples=33, batch_size=8, accumulate_grad_batches=2, world_size=2, drop_last=True)
    plan = plan_steps(33, 8, accumulate_grad_batches=2, world_size=2, drop_last=True, max_epochs=3)
    assert text == plan.explain()
    assert explorer._image.value != before
    explorer.set(num_samples=7)
    assert "Nothing will train" in explorer.text


def test_the_widget_and_its_picture_start_alike_and_cannot_show_the_first_exercise():
    explorer = steps_explorer()
    settings = {name: control.value for name, control in explorer.controls.items()}
    assert settings == dict(num_samples=72, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=False)
    sources = cell_sources()
    assert "plan_steps(72, 8, accumulate_grad_batches=4, max_epochs=3)" in sources["widget"]
    (asked,) = re.findall(r"^(\d+) samples, batches of 8", sources["exercise-1"], re.MULTILINE)
    assert int(asked) > explorer.controls["num_samples"].max


def cell_sources():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def test_the_loop_by_hand_steps_and_averages_as_promised():
    notebook = {"torch": torch}
    exec(cell_sources()["loop"], notebook)
    for num_batches, k in itertools.product(range(1, 12), range(1, 6)):
        weight = torch.zeros((), requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        gradients = []
        optimizer.register_step_pre_hook(lambda *hook, w=weight, seen=gradients: seen.append(round(w.grad.item(), 6)))
        notebook["train"](lambda batch, w=weight: w, range(num_batches), optimizer, schedule, k=k, epochs=2)
        assert gradients == [1.0] * (2 * math.ceil(num_batches / k))
        assert schedule.last_epoch == len(gradients)


# ------------------------------------------------------------------------ wrong answers, as readers gave them


def told(exercise, answer):
    with pytest.raises(NotSolved) as caught:
        exercise.check(answer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (5 * (260 // 32), "leaves out the short window"),
        (5 * math.ceil((260 // 8) / 4), "leaves out the short window"),  # as if drop_last
        (5 * 260 // 32 + 1, "rounds down once"),
        (math.ceil(5 * 33 / 4), "reach across epochs"),
        (5 * 260 / 32, "a part of a step"),
        (260 / 32, "a part of a step"),
        (5 * 260 / 4, "not in samples"),
        (260 / 4, "samples of one epoch"),
        (5 * 33, "counts micro-batches"),
        (33, "micro-batches of one epoch"),
        (9, "is one epoch; the run has five"),
    ],
)
def test_wrong_counts_by_hand(answer, message):
    assert message in told(count_by_hand, answer)


def by(formula):
    """A reader's function of (N, b, k, G, drop_last)."""
    return lambda num_samples, batch_size, accumulate_grad_batches, world_size, drop_last: formula(
        num_samples, batch_size, accumulate_grad_batches, world_size, drop_last
    )


def share_of(N, G):
    return math.ceil(N / G)


def batches_of(samples, b, drop_last):
    return samples // b if drop_last else math.ceil(samples / b)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda N, b, k, G, d: N // (b * k * G), "is what floor division gives"),
        (lambda N, b, k, G, d: N / (b * k * G), "holds a part of a step"),
        (lambda N, b, k, G, d: N / b / k / G, "holds a part of a step"),
        (lambda N, b, k, G, d: math.ceil(N / (b * k * G)), "ignores drop_last"),
        (lambda N, b, k, G, d: math.ceil(math.ceil(share_of(N, G) / b) / k), "ignores drop_last"),
        (
            lambda N, b, k, G, d: N // (b * k * G) if d else math.ceil(N / (b * k * G)),
            "drops the short window together with the short batch",
        ),
        (
            lambda N, b, k, G, d: (
                batches_of(share_of(N, G), b, d) // k if d else math.ceil(batches_of(share_of(N, G), b, d) / k)
            ),
            "drops the short window together with the short batch",
        ),
        (lambda N, b, k, G, d: batches_of(share_of(N, G), b, d) // k, "is what floor division gives"),
        (lambda N, b, k, G, d: math.ceil(share_of(N, G) // b / k), "although drop_last is False"),
        (
            lambda N, b, k, G, d: math.ceil(batches_of(share_of(N, G), b, not d) / k),
            "although drop_last is False",
        ),
        (
            lambda N, b, k, G, d: math.ceil(batches_of(N // G if d else share_of(N, G), b, d) / k),
            "lacks the padding where drop_last is set",
        ),
        (lambda N, b, k, G, d: math.ceil(batches_of(N // G, b, d) / k), "so it is rounded up"),
        (lambda N, b, k, G, d: batches_of(share_of(N, G), b, d), "counts micro-batches"),
        (lambda N, b, k, G, d: math.ceil(batches_of(N, b, d) / k), "forgets the ranks"),
        (lambda N, b, k, G, d: math.ceil(batches_of(N, b, d) / k) // G, "divides steps by the ranks"),
        (lambda N, b, k, G, d: math.ceil(math.ceil(batches_of(N, b, d) / k) / G), "shares out batches or steps"),
        (lambda N, b, k, G, d: math.ceil(math.ceil(batches_of(N, b, d) / G) / k), "shares out batches or steps"),
        (lambda N, b, k, G, d: G * math.ceil(batches_of(share_of(N, G), b, d) / k), "adds the ranks' steps up"),
    ],
)
def test_wrong_formulas(formula, message):
    assert message in told(steps_per_epoch, by(formula))


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda batches, k, epochs: batches * epochs, "counts micro-batches"),
        (lambda batches, k, epochs: math.ceil(batches / k) * epochs * k, "turns updates back into micro-batches"),
        (lambda batches, k, epochs: math.ceil(batches / k) * epochs // k, "a second time, rounded down"),
        (lambda batches, k, epochs: math.ceil(math.ceil(batches / k) * epochs / k), "divides by the window twice"),
        (lambda batches, k, epochs: batches // k * epochs, "forgets the short window"),
        (lambda batches, k, epochs: math.ceil(batches * epochs / k), "reach across epochs"),
        (lambda batches, k, epochs: batches / k * epochs, "holds a part of a step"),
        (lambda batches, k, epochs: math.ceil(batches / k), "is one epoch"),
    ],
)
def test_wrong_horizons(formula, message):
    def horizon(num_batches, accumulate_grad_batches, epochs):
        return formula(num_batches, accumulate_grad_batches, epochs)

    assert message in told(schedule_horizon, horizon)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (10 * (640 // 64 // 3), "a floor left out the short window"),
        (10 * math.ceil(2559 // (64 * 4) / 3), "a rank got 9"),
        (10 * math.ceil(39 / 3), "is right for one rank"),
        (10 * math.ceil(39 / 3) / 4, "holds a part of a step"),
        (130 // 4, "divides the steps by four"),
        (10 * 10 // 3, "rounds down once, for the whole run"),
        (math.ceil(10 * 10 / 3), "lets windows reach across epochs"),
        (4 * 40, "adds the ranks' steps up"),
        (10 * 10, "counts micro-batches"),
    ],
)
def test_wrong_max_steps_on_four_ranks(answer, message):
    assert message in told(max_steps_on_four_ranks, answer)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (10 * math.ceil(1400 / 64 / 7), "a window of their own"),
        (10 * math.ceil(43 / 2 / 7), "batches or steps were shared"),
        (10 * math.ceil(math.ceil(43 / 7) / 2), "batches or steps were shared"),
        (10 * math.ceil(43 / 7), "is right for one rank"),
        (10 * math.ceil(43 / 7) / 2, "halves the steps"),
        (10 * 1400 / 64 / 7, "holds a part of a step"),
        (math.ceil(10 * 1400 / 64 / 7), "rounds once, for the whole run"),
        (10 * 21, "counts micro-batches"),
        (2 * 30, "adds the ranks' steps up"),
        (3, "is one epoch"),
    ],
)
def test_wrong_max_steps_on_two_ranks(answer, message):
    assert message in told(max_steps_on_two_ranks, answer)


def test_no_wrong_reasoning_passes_both_jobs():
    jobs = [(2559, 64, 3, 4, max_steps_on_four_ranks.solution), (2800, 64, 7, 2, max_steps_on_two_ranks.solution)]
    wrong = {
        "floor": lambda N, b, k, G: 10 * (N // G // b // k),
        "without the padding": lambda N, b, k, G: 10 * math.ceil(N // (b * G) / k),
        "one line": lambda N, b, k, G: 10 * math.ceil(N / (b * k * G)),
        "batches shared": lambda N, b, k, G: 10 * math.ceil(N // b / G / k),
        "steps shared": lambda N, b, k, G: 10 * math.ceil(math.ceil(N // b / k) / G),
        "ranks forgotten": lambda N, b, k, G: 10 * math.ceil(N // b / k),
        "windows across epochs": lambda N, b, k, G: math.ceil(10 * (N // G // b) / k),
    }
    for formula in wrong.values():
        assert any(formula(N, b, k, G) != right for N, b, k, G, right in jobs)
    assert [right for *_, right in jobs] == [40, 30]
