"""The numbers behind chapter 08's figures, widget and exercises, and the wrong answers that its checks name."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader
from workbook import ch08_exercises
from workbook.ch08_changing_batch_size import (
    LARGEST_BATCH,
    AttentionNet,
    Squares,
    SquaresOfPairs,
    budget_explorer,
    budgeted,
    bytes_saved,
    digit_net,
    figure_of_budget,
    figure_of_epochs,
    figure_of_runs,
    fit,
    peak_bytes,
    samples,
    square,
    tell,
    told,
)
from workbook.ch08_exercises import batch_sizes, gain, windows
from workbook.exercises import NotSolved

from course_lib.memory import measure_peak


def test_a_row_has_a_block_for_each_batch_with_its_side_and_says_what_is_missing():
    rows = {"cut": {0: [(16, 16), (8, 22)]}, "whole": {1: [(16, 32), (16, 32), (16, 32)]}}
    axes = figure_of_epochs(rows, "a title").axes[0]
    blocks = [(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_height() == 0.7]
    assert blocks == [(0, 16), (16, 8), (24, 24), (0, 16), (16, 16), (32, 16)]
    assert [text.get_text() for text in axes.texts] == ["16 px", "22 px", "24 never trained", *["32 px"] * 3]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["batch of 16", "batch of 8"]


def test_runs_are_drawn_against_their_pixels_and_the_resized_one_at_both_sizes():
    long, resized = [(1.0, 0.5), (2.0, 0.75), (3.0, 0.875)], [(0.5, 0.25), (1.5, 0.5)]
    left, right = figure_of_runs(long, resized, own=[0.75, 0.5], stopped=2).axes
    lines = [line.get_xydata().tolist() for line in left.lines]
    assert lines == [[[1, 0.5], [2, 0.75], [3, 0.875]], [[0.5, 0.25], [1.5, 0.5]], [[2, 0.75]]]
    assert [line.get_xydata().tolist() for line in right.lines] == [[[1, 0.75], [2, 0.5]], [[1, 0.25], [2, 0.5]]]


class Records(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight, self.epochs = nn.Parameter(torch.zeros(1)), {}

    def training_step(self, images, batch_idx):
        self.epochs.setdefault(self.current_epoch, []).append((len(images), images.shape[-1]))
        return (self.weight * images).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_a_model_records_is_told_by_epoch(capsys):
    epochs = fit(Records(), DataLoader(Squares(side=4), 32), max_epochs=2, limit_train_batches=2)
    assert epochs == {0: [(32, 4), (16, 4)], 1: [(32, 4), (16, 4)]}
    assert samples(epochs) == [48, 48]
    tell({0: [(32, 4), (8, 6)]})
    assert capsys.readouterr().out == "epoch 0: batches [32, 8], sides [4, 6], 40 of 48 samples\n"


def test_attention_keeps_a_matrix_of_all_pairs_of_pixels_unless_it_is_fused():
    fused, whole = AttentionNet(fused=True), AttentionNet(fused=False)
    images = torch.rand(2, 1, 24, 24)
    assert torch.allclose(fused(images), whole(images), atol=1e-6)
    matrices = 2 * 24**4 * 4  # of two images, in float32
    assert bytes_saved(whole, 2, 24) - bytes_saved(fused, 2, 24) > 0.9 * matrices


def test_the_squares_are_filled_with_their_index():
    assert torch.equal(SquaresOfPairs()[7, 3], torch.full((3, 3), 7.0))
    assert torch.equal(square(7, 3), SquaresOfPairs()[7, 3])


@pytest.mark.thorough
def test_a_budget_is_drawn_at_the_steps_of_its_plan():
    run = budgeted(budget_mib=5, smallest=8, largest=32, epochs=6, hold=True)
    size, samples, peak = ([line.get_xydata().tolist() for line in axes.lines] for axes in figure_of_budget(run).axes)
    assert size == [[[0, 8], [12, 16], [24, 32], [36, 32]]]
    assert [[y for _, y in line] for line in samples] == [[256, 64, 16, 16], [256] * 4]
    assert [y for _, y in peak[0]][:3] == [each / 2**20 for each in run.peaks()]
    assert {y for _, y in peak[1]} == {5.0}


def every_setting():
    for largest in (32, 48, 64):
        for smallest in (8, 16, 24, 32):
            for budget_mib in (1, 2, 3, 5, 7, 9, 12, 16):
                yield budget_mib, smallest, largest


SETTINGS = list(every_setting())


@pytest.mark.thorough
@pytest.mark.parametrize(("budget_mib", "smallest", "largest"), SETTINGS)
def test_the_peak_stays_within_the_budget_or_the_widget_says_that_it_cannot(budget_mib, smallest, largest):
    try:
        run = budgeted(budget_mib, smallest, largest, epochs=6, hold=False)
    except ValueError as refusal:
        sides = [int(side) for side in re.findall(r"(\d+) pixels", str(refusal))]
        assert peak_bytes(sides[0], 1) > budget_mib * 2**20
        return
    for stage, peak in zip(run.schedule.stages, run.peaks(), strict=True):
        assert peak <= budget_mib * 2**20
        twice = peak_bytes(stage.size, 2 * stage.batch_size)
        assert twice > budget_mib * 2**20 or stage.batch_size == LARGEST_BATCH  # no larger power of two fits


@pytest.mark.thorough
@pytest.mark.parametrize("largest", [32, 48, 64])
def test_holding_the_samples_of_an_update_changes_nothing_else(largest):
    free, held = (budgeted(5, 8, largest, epochs=6, hold=hold) for hold in (False, True))
    assert free.schedule.stages == held.schedule.stages
    assert free.peaks() == held.peaks()
    assert free.plan.micro_batches == held.plan.micro_batches
    updates = [held.schedule.samples_per_step(stage) for stage in held.schedule.stages]
    assert set(updates) == {free.schedule.stages[0].batch_size}
    assert held.plan.total_steps < free.plan.total_steps


@pytest.mark.thorough
def test_the_widget_refuses_in_words_and_in_the_picture():
    explorer = budget_explorer()
    assert explorer.text == told(budgeted(5, 8, 32, 6, False))
    assert "238 optimizer steps, 238 batches" in explorer.text
    before = explorer._image.value
    assert explorer.set(budget_mib=1, largest=64).startswith("1 MiB cannot hold a step of one image of 64 pixels")
    assert explorer._image.value != before
    assert "36 optimizer steps, 238 batches" in explorer.set(budget_mib=5, largest=32, hold=True)


def test_the_peak_bytes_are_those_of_a_real_step():
    net = digit_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step():
        F.cross_entropy(net(torch.ones(8, 1, 16, 16)), torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert peak_bytes(16, 8) == pytest.approx(measure_peak(step, model=net).peak_bytes, rel=0.01)


def test_runs_are_compared_at_the_cost_of_the_cheaper_one():
    baseline, resized = [(2, 0.5), (2, 0.75)], [(1, 0.25), (1, 0.375), (2, 0.625), (2, 0.875)]
    assert ch08_exercises._within(resized, 8) == 0.625
    assert ch08_exercises._gain(baseline, resized) == -0.125
    assert ch08_exercises._gain(resized, baseline) == 0.125


def within(run, budget):
    spent, accuracy = 0, 0.0
    for side, after in run:
        spent += side**2
        if spent <= budget:
            accuracy = after
    return accuracy


def until(run, budget, used_up):
    spent, accuracy = 0, 0.0
    for side, after in run:
        if used_up(spent, budget):
            break
        spent, accuracy = spent + side**2, after
    return accuracy


def pixels(run):
    return sum(side**2 for side, _ in run)


def gain_with(budget_of=min, accuracy=within):
    def answer(baseline, resized):
        budget = budget_of(pixels(baseline), pixels(resized))
        return round(accuracy(resized, budget) - accuracy(baseline, budget), 4)

    return answer


def gain_difference(baseline, resized):
    budget = min(pixels(baseline), pixels(resized))
    return within(resized, budget) - within(baseline, budget)


def sizes(of_side):
    return lambda sides, budget, multiple_of: [of_side(side, budget, multiple_of) for side in sides]


def window(of_batch):
    return lambda batch_sizes, effective_batch_size, world_size: [
        of_batch(batch, effective_batch_size, world_size) for batch in batch_sizes
    ]


def chained(sides, budget, multiple_of):
    first = budget // sides[0] ** 2 // multiple_of * multiple_of
    return [first * sides[0] ** 2 // side**2 // multiple_of * multiple_of for side in sides]


def nearest(run, budget):
    spent, ends = 0, []
    for side, after in run:
        spent += side**2
        ends.append((abs(spent - budget), after))
    return min(ends, key=lambda end: end[0])[1]


def passes_over(run, budget):
    accuracy = 0.0
    for side, after in run:
        if side**2 <= budget:
            budget, accuracy = budget - side**2, after
    return accuracy


def first_at_least(run, budget):
    return within(run, max(budget, run[0][0] ** 2))


WRONG = {
    "sizes: max(1, …) first": (batch_sizes, sizes(lambda s, b, m: max(1, b // s**2) // m * m), "`max(1, …)` hides"),
    "sizes: max(1, …) last": (batch_sizes, sizes(lambda s, b, m: max(1, b // s**2 // m * m)), "a batch of 1 where"),
    "sizes: max(multiple, …)": (batch_sizes, sizes(lambda s, b, m: max(m, b // s**2 // m * m)), "answer 0 there"),
    "sizes: floored floats": (batch_sizes, sizes(lambda s, b, m: float(b // s**2 // m * m)), "has floats"),
    "sizes: true division": (batch_sizes, sizes(lambda s, b, m: b / s**2 // m * m), "has floats"),
    "sizes: no floor": (batch_sizes, sizes(lambda s, b, m: b / s**2), "has floats"),
    "sizes: by the side": (batch_sizes, sizes(lambda s, b, m: b // s // m * m), "divides by the side"),
    "sizes: multiples": (batch_sizes, sizes(lambda s, b, m: b // (s**2 * m)), "counts multiples, not samples"),
    "sizes: no multiple": (batch_sizes, sizes(lambda s, b, m: int(b / s**2)), "is no multiple of"),
    "sizes: up": (batch_sizes, sizes(lambda s, b, m: -(-b // (s**2 * m)) * m), "rounds up, and so"),
    "sizes: images up": (batch_sizes, sizes(lambda s, b, m: -(-b // s**2) // m * m), "rounds up, and so"),
    "sizes: up to the multiple": (
        batch_sizes,
        sizes(lambda s, b, m: -(-(b // s**2) // m) * m),
        "rounds up to the multiple",
    ),
    "sizes: power of two": (
        batch_sizes,
        sizes(lambda s, b, m: 2 ** int(math.log2(max(1, b // s**2)))),
        "powers of two",
    ),
    "sizes: chained": (batch_sizes, chained, "goes from one stage's batch"),
    "sizes: nearest": (batch_sizes, sizes(lambda s, b, m: round(b / s**2 / m) * m), "rounds to the nearest"),
    "windows: floats": (windows, window(lambda b, e, w: e / (b * w)), "has floats"),
    "windows: floored floats": (windows, window(lambda b, e, w: float(e // (b * w))), "has floats"),
    "windows: no ranks": (windows, window(lambda b, e, w: e // b), "forgets the ranks"),
    "windows: ranks multiplied": (windows, window(lambda b, e, w: e // b * w), "multiplies by the ranks"),
    "windows: upside down": (windows, window(lambda b, e, w: b * w // e), "divide the effective batch by"),
    "windows: samples": (windows, window(lambda b, e, w: e // w), "counts samples"),
    "gain: the ends": (gain, gain_with(max), "lets the longer run go on"),
    "gain: baseline's pixels": (gain, gain_with(lambda baseline, resized: baseline), "the baseline's pixels"),
    "gain: resized run's pixels": (gain, gain_with(lambda baseline, resized: resized), "lets the longer run go on"),
    "gain: < for <=": (
        gain,
        gain_with(accuracy=lambda run, budget: within(run, budget - 1)),
        "compare with `<=`",
    ),
    "gain: overshoot": (
        gain,
        gain_with(accuracy=lambda run, budget: until(run, budget, lambda spent, budget: spent >= budget)),
        "it ends beyond the budget",
    ),
    "gain: overshoot by one epoch": (
        gain,
        gain_with(accuracy=lambda run, budget: until(run, budget, lambda spent, budget: spent > budget)),
        "lets the longer run go on",
    ),
    "gain: nearest": (gain, gain_with(accuracy=nearest), "whose end is nearest the budget"),
    "gain: passes over": (gain, gain_with(accuracy=passes_over), "passes over an epoch that is too dear"),
    "gain: first at least": (gain, gain_with(accuracy=first_at_least), "completes none within the budget"),
    "gain: not rounded": (
        gain,
        lambda baseline, resized: gain_difference(baseline, resized),
        "is not rounded to 4 digits",
    ),
    "gain: sign": (gain, lambda baseline, resized: -gain_with()(baseline, resized), "has the wrong sign"),
}


@pytest.mark.parametrize(("exercise", "answer", "message"), WRONG.values(), ids=WRONG)
def test_a_natural_wrong_answer_gets_its_own_message(exercise, answer, message):
    with pytest.raises(NotSolved, match=re.escape(message)):
        exercise.check(answer)


def best_within(run, budget):
    spent, best = 0, 0.0
    for side, after in run:
        spent += side**2
        if spent <= budget:
            best = max(best, after)
    return best


def sorts_first(baseline, resized):
    resized.sort()
    return gain_with()(baseline, resized)


NO_MESSAGE = {
    "sizes: at least one multiple less": (batch_sizes, sizes(lambda s, b, m: (b - 1) // s**2 // m * m)),
    "sizes: multiples of the side": (batch_sizes, sizes(lambda s, b, m: b // (s * m) // s * m if s < 40 else 0)),
    "sizes: the first for all": (
        batch_sizes,
        lambda sides, budget, multiple_of: [budget // sides[0] ** 2 // multiple_of * multiple_of] * len(sides),
    ),
    "sizes: sorted": (
        batch_sizes,
        lambda sides, budget, multiple_of: sorted(
            (budget // s**2 // multiple_of * multiple_of for s in sides), reverse=True
        ),
    ),
    "sizes: cubes": (batch_sizes, sizes(lambda s, b, m: b // s**3 // m * m)),
    "sizes: each side once": (
        batch_sizes,
        lambda sides, budget, multiple_of: [budget // s**2 // multiple_of * multiple_of for s in dict.fromkeys(sides)],
    ),
    "sizes: multiple last of all": (batch_sizes, sizes(lambda s, b, m: b // (s**2 + m) * m)),
    "windows: sorted": (windows, lambda **case: sorted(ch08_exercises._windows(**case))),
    "windows: at most 16": (windows, window(lambda b, e, w: min(16, e // (b * w)))),
    "windows: at least two": (windows, window(lambda b, e, w: max(2, e // (b * w)))),
    "windows: ranks added": (windows, window(lambda b, e, w: e // (b + w))),
    "windows: no rank but the first two": (windows, window(lambda b, e, w: e // (b * min(w, 4)))),
    "gain: best": (gain, gain_with(accuracy=best_within)),
    "gain: sorts what it gets": (gain, sorts_first),
    "gain: three digits": (gain, lambda baseline, resized: round(gain_difference(baseline, resized), 3)),
    "gain: never negative": (gain, lambda baseline, resized: max(0.0, gain_with()(baseline, resized))),
    "gain: as many epochs as fit in both": (
        gain,
        lambda baseline, resized: round(resized[: len(baseline)][-1][1] - baseline[: len(resized)][-1][1], 4),
    ),
    "gain: the baseline's end": (
        gain,
        lambda baseline, resized: round(within(resized, pixels(baseline)) - baseline[-1][1], 4),
    ),
    "gain: the resized run's end": (
        gain,
        lambda baseline, resized: round(resized[-1][1] - within(baseline, pixels(resized)), 4),
    ),
    "gain: half the budget": (gain, gain_with(lambda baseline, resized: min(baseline, resized) // 2)),
}


@pytest.mark.parametrize(("exercise", "answer"), NO_MESSAGE.values(), ids=NO_MESSAGE)
def test_other_wrong_answers_are_refused(exercise, answer):
    with pytest.raises(NotSolved):
        exercise.check(answer)


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (batch_sizes, sizes(lambda s, b, m: b // (s * s * m) * m)),
        (batch_sizes, sizes(lambda s, b, m: np.int64(b) // s**2 // m * m)),
        (windows, lambda batch_sizes, **rest: (k for k in ch08_exercises._windows(batch_sizes, **rest))),
        (gain, lambda baseline, resized: np.float64(gain_with()(baseline, resized))),
        (gain, lambda baseline, resized: torch.tensor([gain_with()(baseline, resized)])),
        (batch_sizes, lambda sides, **rest: torch.tensor(ch08_exercises._batch_sizes(sides, **rest))),
        (batch_sizes, lambda sides, **rest: tuple(ch08_exercises._batch_sizes(sides, **rest))),
        (windows, window(lambda b, e, w: e // w // b)),
        (windows, window(lambda b, e, w: int(e / (b * w)))),
        (gain, gain_with()),
        (gain, lambda baseline, resized: -gain_with()(resized, baseline)),
    ],
)  # fmt: skip
def test_other_right_answers_pass(exercise, answer):
    exercise.check(answer)
