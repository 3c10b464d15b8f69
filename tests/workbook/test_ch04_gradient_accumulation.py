"""The numbers behind chapter 04's figures and widget, and what its exercises tell those who answer them wrongly."""

import csv
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.patches import ArrowStyle
from torch import nn
from workbook import ch04_accumulation_lab as lab
from workbook.ch04_accumulation_lab import causes, measure
from workbook.ch04_exercises import applied_gradients, logged_loss, rank_factor
from workbook.ch04_gradient_accumulation import (
    ROWS,
    arrows,
    arrows_error,
    arrows_explorer,
    distances_of_means,
    figure_of_arrows,
    figure_of_chapter_prices,
    figure_of_draws,
    figure_of_weights,
    price_line,
    price_of,
    prices,
    shares,
)
from workbook.exercises import NotSolved
from workbook.prices.faults import FAULTS
from workbook.prices.jobs import collate_passages, prose_job, shuffled
from workbook.prices.loop import train
from workbook.prices.table import Row

from course_lib.accumulation import accumulate, windows
from course_lib.datasets import data_path

SIZES = [40, 16, 4, 4]
BY_RECIPE = [16 / size for size in SIZES for _ in range(size)]
ON_TWO_RANKS = [2 / 3] * 48 + [2.0] * 16


def test_the_share_of_a_micro_batch_is_that_of_its_samples_weights():
    assert shares(SIZES, BY_RECIPE) == pytest.approx([0.25] * 4)
    assert shares(SIZES, [1] * 64) == pytest.approx([size / 64 for size in SIZES])


@pytest.mark.thorough
def test_the_weights_of_samples_are_drawn_as_bars():
    left, right = figure_of_weights(BY_RECIPE, ON_TWO_RANKS).axes
    assert left.get_title() == "one process: 10 times from first to last"
    assert right.get_title() == "two ranks: 3 times from rank 0 to rank 1"
    assert [bar.get_width() for bar in right.patches] == [24, 24, 8, 8]
    assert [bar.get_height() for bar in left.patches] == [0.4, 1, 4, 4]
    assert [text.get_text() for text in left.texts] == ["25%"] * 4
    assert [list(line.get_ydata()) for line in (*left.lines, *right.lines)] == [[1, 1], [1, 1]]


def test_the_prices_are_the_rows_of_the_list():
    with data_path("prices.csv").open(encoding="utf-8") as file:
        listed = [row for row in csv.DictReader(file) if row["measure"].startswith("validation loss")]
    wanted = {(row["job"], row["fault"]) for row in listed if row["fault"] in ROWS}
    assert {(row.job, row.fault) for row in prices()} == wanted and set(ROWS) <= set(FAULTS)
    [row] = [row for row in prices() if (row.job, row.fault) == ("gpt", "loss_over_k")]
    right = float(re.search(r"right: (.*)\)", row.measure)[1])
    assert price_of("gpt", "loss_over_k") == pytest.approx(100 * row.difference / right, abs=0.05)


def row_of(fault, difference, diverged=0):
    low, high = difference - 0.004, difference + 0.004
    measure = "validation loss (right: 2.0000)"
    return Row("gpt", fault, "", 8, measure, difference, low, high, diverged, 0, 0, 0, "")


def test_a_price_is_a_line_and_a_point():
    dear, cheap = row_of("zero_grad_forgotten", 0.4), row_of("loss_over_k", 0.002)
    assert price_line(dear) == "gpt: zero_grad forgotten: +20.0 % (+19.8 … +20.2), costs"
    assert price_line(cheap).endswith("+0.1 % (-0.1 … +0.3), costs nothing here")
    assert price_line(row_of("zero_grad_forgotten", 0.4, diverged=8)).endswith("diverged 8 of 8")
    left, right = figure_of_chapter_prices([dear, cheap]).axes
    points = [line.get_xydata().tolist() for line in left.lines if line.get_marker() == "o"]
    assert points == [[[pytest.approx(20), 0]], [[pytest.approx(0.1), -1]]]
    assert len(left.get_yticklabels()) == 2 and not right.get_yticklabels()


def test_the_small_jobs_material_is_as_the_chapter_says():
    lengths = [len(lab.collate([passage])[1][0]) for passage in lab.passages()]
    assert (min(lengths), max(lengths), len(lengths)) == (3, 48, 32)
    inputs, targets = lab.collate(lab.passages(of_one_length=True))
    assert inputs.shape == targets.shape == (32, 48) and (targets != -100).all()
    job = prose_job()
    full = [len(job.samples[index][1]) > 48 for index in job.training]
    assert 0.85 < sum(full) / len(full) < 0.95  # nine of ten fill the context


def test_answers_alone_are_counted_and_validated_whole():
    pieces = list(enumerate(lab.passages()))
    whole = lab.answers_alone(pieces, None)
    masked = lab.answers_alone(pieces, np.random.default_rng(0))
    assert torch.equal(whole.targets, lab.collate(lab.passages())[1])
    counts = (masked.targets != -100).sum(1)
    assert counts.min() >= 1 and counts.float().std() > 5
    for row in masked.targets:
        at = (row != -100).nonzero().flatten()
        assert at[-1] - at[0] + 1 == len(at)  # the end of the passage, in one piece


def test_what_is_ragged_costs():
    job = replace(prose_job(), epochs=1, micro_batch=1, k=12, collate=lab.answers_alone)
    (right,), (faulty,) = train(job, seed=1), FAULTS["loss_over_k"].patched()(job, seed=1)
    assert faulty.loss > 1.01 * right.loss


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("micro_batch", "collate", "low", "high"),
    [(4, collate_passages, -0.5, 0.5), (1, collate_passages, 1, 4), (1, lab.answers_alone, 3, 6)],
)
def test_the_price_grows_with_the_raggedness(micro_batch, collate, low, high):
    job = replace(prose_job(), micro_batch=micro_batch, k=12 // micro_batch, collate=collate)
    right, faulty = train(job, seed=0)[-1], FAULTS["loss_over_k"].patched()(job, seed=0)[-1]
    assert low < 100 * (faulty.loss / right.loss - 1) < high


def test_class_weights_are_counted():
    class_weights, x = torch.tensor([1.0, 10, 1, 1]).double(), lab.random_features(0)
    classes = (x[:, 0] > 0.5).long()
    micro_batches = list(zip(x.split(16), classes.split(16), strict=True))

    def loss_sum(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], weight=class_weights, reduction="sum")

    model = lab.make_model()
    accumulate(model, micro_batches, loss_sum, lambda batch: class_weights[batch[1]].sum())
    assert lab.distance(lab.gradient(model), lab.gradient_of_mean(lab.weighted, [x])) < 1e-12
    assert lab.distance(lab.gradient_of_mean(lab.weighted, x.split(16)), lab.gradient(model)) > 0.01


def test_a_window_has_the_noise_of_the_big_batch():
    generator, model = torch.Generator().manual_seed(0), lab.make_model()
    gradients = {1: [], 8: [], 64: []}
    for _ in range(200):
        window = [lab.random_tokens(generator, tokens=8) for _ in range(8)]
        whole = [tuple(torch.cat(column) for column in zip(*window, strict=True))]
        for name, batches in {1: window[:1], 8: window, 64: whole}.items():
            gradients[name].append(lab.accumulated_gradient(model, batches))
    of_one, of_window, of_whole = (torch.stack(found).var(0).sum().item() for found in gradients.values())
    assert of_window == pytest.approx(of_whole) and 0.1 < of_window / of_one < 0.16


def test_a_run_by_windows_ends_where_the_run_by_big_batches_does():
    def trained(batch_size, k):
        net = lab.gpt().double().eval()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        passages = [*lab.passages(), *lab.passages()[:8]]
        batches = [lab.collate(passages[at : at + batch_size]) for at in range(0, 40, batch_size)]
        for window in windows(batches, k):
            optimizer.zero_grad()
            accumulate(net, window, lab.loss_sum, lab.count)
            optimizer.step()
        return lab.weights_of(net)

    assert lab.distance(trained(2, 8), trained(16, 1)) < 1e-12


@pytest.mark.parametrize(("seed", "expected"), [(0, 0.13), (1, 0.05), (2, 0.08)])
def test_the_symptom_depends_on_the_passages(seed, expected):
    job, net = prose_job(), lab.gpt().eval()
    pieces = [job.samples[index][1] for index in shuffled(job.training, seed, 0)[:32]]
    one_by_one = lab.accumulated_gradient(net, [lab.collate([piece]) for piece in pieces])
    big = lab.accumulated_gradient(net, [lab.collate(pieces)])
    assert lab.distance(one_by_one, big) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("of_one_length", [False, True])
def test_the_symptom_has_its_distance_from_lengths_alone(of_one_length):
    net, passages = lab.gpt().eval(), lab.passages(of_one_length=of_one_length)
    one_by_one = lab.accumulated_gradient(net, [lab.collate([passage]) for passage in passages])
    big = lab.accumulated_gradient(net, [lab.collate(passages)])
    found = lab.distance(one_by_one, big)
    assert found < 1e-5 if of_one_length else 0.1 < found < 0.2


def test_distances_of_means_are_those_of_the_first_rows():
    some, others = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    assert distances_of_means(some, others, [1, 2]) == [0.75, 0.75]


def test_the_curves_over_draws_are_the_distances():
    figure = figure_of_draws({"noise": [0.6, 0.2], "bias": [0.3, 0.3]}, [1, 9])
    drawn = [line.get_xydata().tolist() for line in figure.axes[0].lines]
    assert drawn == [[[1, 0.6], [9, 0.2]], [[1, 0.3], [9, 0.3]]]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "9"]


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
    assert lab.peak_saved_bytes(lambda: model(inputs), model) == 2 * size  # the input, and the result of tanh

    def in_halves():
        for half in inputs.chunk(2):
            model(half).sum().backward()

    assert lab.peak_saved_bytes(in_halves, model) == size


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
        "raised ZeroDivisionError",
    ),
    "an unguarded step by k": (
        applied_gradients,
        loop(divide=lambda total, samples, batches, k: total / k, after="unguarded"),
        "should be [2.0, 7.0], got [2.0, 7.0, 0.0]",
    ),
    "reset before the division": (applied_gradients, reset_first, "raised ZeroDivisionError"),
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
        "should be [2.0, 7.0], got [1.0, 3.0, 5.0, 9.0]",
    ),
    "factor: over the largest": (
        rank_factor,
        lambda counts, rank: counts[rank] / max(counts),
        "compares the rank with the largest",
    ),
    "factor: over the smallest": (
        rank_factor,
        lambda counts, rank: counts[rank] / (min(counts) or 1),
        "should be 2.032",
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
        "should be 2.032",
    ),
    "factor: the share upside down": (
        rank_factor,
        lambda counts, rank: sum(counts) / counts[rank],
        "should be 2.032",
    ),
    "factor: of two ranks": (
        rank_factor,
        lambda counts, rank: 2 * counts[rank] / sum(counts),
        "W is the number of ranks",
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
def test_a_natural_wrong_answer_is_told_what_is_wrong(exercise, answer, message):
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
