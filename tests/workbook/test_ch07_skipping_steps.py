"""The numbers behind chapter 07's figures and widget, and what its exercises tell those who answer them wrongly."""

import json
import math
import re
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from workbook import ch07_exercises, ch07_skipping_steps
from workbook.ch07_skipping_steps import (
    ALONE,
    CLIP,
    NOTHING,
    OUTCOMES,
    POISONS,
    POLICIES,
    PRICED,
    REMEDIES,
    STEPS,
    TOGETHER,
    SmallNet,
    Trained,
    batch_of,
    batches_trained,
    count_all_reduces,
    figure_of_calls,
    figure_of_chapter_prices,
    figure_of_remedies,
    fit,
    learning_rates,
    outcomes_of,
    plain_step,
    poisoned_digits,
    policy_explorer,
    prices,
    simulate,
    state_of,
    title_of,
    told,
    told_prices,
    train,
    train_with_remedies,
    update_together,
    watch_two_ranks,
)
from workbook.display import png_bytes
from workbook.exercises import NotSolved
from workbook.prices.jobs import conv_net
from workbook.trainers import quiet_trainer

from course_lib.launch import RankError, RankTimeout, run_ranks
from course_lib.skipping import StepGuard
from tests.notebook_rules import ROOT


def real_ranks(rank, policy, bad_rank, bad_step, folder):
    """What became of each step on a real rank, and a file with the steps whose backward pass came back."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(model, optimizer)
    seen = []
    for step in range(STEPS):
        bad = (rank, step) == (bad_rank, bad_step)
        loss = model(torch.full((4, 2), math.nan if bad else 1.0)).mean()
        optimizer.zero_grad()
        if policy == ALONE and bad:
            continue
        updated = True
        if policy == TOGETHER:
            guard.backward(loss)
            updated = guard.step()
        else:
            loss.backward()
            if policy == CLIP:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with (folder / f"rank{rank}").open("a") as file:
            file.write(f"{step} ")
        finite = all(parameter.isfinite().all() for parameter in model.parameters())
        seen.append("skips" if not updated else "update" if finite else "NaN")
    torch.distributed.barrier()
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize("policy", [NOTHING, CLIP, TOGETHER])
def test_the_widget_computes_what_real_ranks_do(policy, tmp_path):
    for bad_rank, bad_step in ((0, 0), (1, 4), (0, STEPS - 1)):
        results = run_ranks(real_ranks, args=(policy, bad_rank, bad_step, tmp_path), backend="gloo")
        computed = simulate(policy, 2, bad_rank, bad_step)
        assert [[event.outcome for event in row] for row in computed] == [result.value for result in results]
        assert all(event.step == event.call for row in computed for event in row)


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "bad_rank", "bad_step"), [(2, 1, 4), (3, 0, 0), (2, 0, STEPS - 1)])
def test_a_rank_that_skips_alone_is_answered_as_on_real_ranks(ranks, bad_rank, bad_step, tmp_path):
    with pytest.raises(RankTimeout):
        run_ranks(real_ranks, ranks, args=(ALONE, bad_rank, bad_step, tmp_path), timeout=2, backend="gloo")
    rows = simulate(ALONE, ranks, bad_rank, bad_step)
    came_back = []
    for rank, row in enumerate(rows):
        came_back.append([int(step) for step in (tmp_path / f"rank{rank}").read_text().split()])
        assert [event.step for event in row if event.outcome in ("update", "mixed")] == came_back[rank]
        assert row[-1].outcome == ("waits" if rank != bad_rank else "mixed" if bad_step < STEPS - 1 else "skips")


def test_one_rank_that_skips_alone_skips():
    assert [event.outcome for event in simulate(ALONE, 1, 0, 3)[0]].count("update") == STEPS - 1


def note_and_wait(rank, folder, waiting):
    (Path(folder) / f"rank{rank}.txt").write_text(f"0 {rank + 1} ")
    if rank == waiting:
        torch.distributed.barrier()
    elif waiting is not None:
        time.sleep(60)


@pytest.mark.thorough
def test_two_ranks_are_watched(capsys):
    watch_two_ranks(note_and_wait, None)
    assert capsys.readouterr().out.splitlines() == [
        "both ranks came to the end",
        "rank 0: backward came back in steps [0, 1]",
        "rank 1: backward came back in steps [0, 2]",
    ]
    watch_two_ranks(note_and_wait, 1, seconds=1)
    assert capsys.readouterr().out.splitlines() == [
        "ranks 0, 1 of 2 did not return",
        "--- rank 0 was running",
        "    time.sleep(60)",
        "--- rank 1 was running",
        "    torch.distributed.barrier()",
        "rank 0: backward came back in steps [0, 1]",
        "rank 1: backward came back in steps [0, 2]",
    ]


def test_the_figure_writes_each_step_into_its_column():
    rows = simulate(ALONE, 3, 1, 4)
    figure = figure_of_calls(rows, "title")
    (axes,) = figure.axes
    texts = {(round(text.get_position()[0], 1), text.get_position()[1]): text.get_text() for text in axes.texts}
    assert texts[4, 0] == "step 4\nmixed" and texts[4, 1] == "step 5\nmixed"
    assert texts[3.5, 1] == "skips 4" and texts[7, 2] == "step 7\nwaits"
    assert len(texts) == 3 * STEPS == len(axes.patches)
    assert png_bytes(figure).startswith(b"\x89PNG")


@pytest.mark.thorough
def test_the_widget_follows_its_controls():
    explorer = policy_explorer()
    assert explorer.text == told(simulate(ALONE, 3, 1, 4))
    for policy in POLICIES:
        assert explorer.set(policy=policy, ranks=4, bad_rank=2, bad_step=2) == told(simulate(policy, 4, 2, 2))
    assert explorer.text.splitlines()[2].startswith("rank 2, by steps: 0 update, 1 update, 2 skips, 3 update")
    assert "there is no rank 2 of 2: move one of the two sliders" in explorer.set(ranks=2)
    assert {e.outcome for p in POLICIES for row in simulate(p, 2, 1, 4) for e in row} == set(OUTCOMES)


def test_the_title_counts():
    title = title_of(ALONE, simulate(ALONE, 3, 1, 4))
    assert title.endswith("4 of 8 updates are right on rank 0, and 2 ranks wait at the end")
    assert title_of(ALONE, simulate(ALONE, 2, 1, 4)).endswith("and 1 rank waits at the end")
    assert title_of(TOGETHER, simulate(TOGETHER, 3, 1, 4)).endswith("7 of 8 updates are right on rank 0")


def test_the_digits_are_poisoned_where_they_are_said_to_be():
    data = poisoned_digits(not_a_number=3, too_large=2)
    assert torch.isnan(data.images).flatten(1).any(1).nonzero().flatten().tolist() == [0, 1, 2]
    assert (data.images.nan_to_num().flatten(1).amax(1) > 1).nonzero().flatten().tolist() == [3, 4]
    assert torch.isfinite(data.test_images).all()


@pytest.mark.thorough
def test_a_skip_cures_nan_and_a_clip_cures_what_is_too_large():
    trained = train_with_remedies("cpu", seeds=[0])
    accuracy = {(poison, remedy): trained[poison][remedy][0].accuracy for poison in POISONS for remedy in REMEDIES}
    cures = {"NaN pixels": {"skip", "clip and skip"}, "too large": {"clip", "clip and skip"}, "both": {"clip and skip"}}
    for (poison, remedy), found in accuracy.items():
        assert found > 0.85 if remedy in cures[poison] else found < 0.25, (poison, remedy)
    assert train(poisoned_digits(**POISONS["NaN pixels"]), skip=True).updates < 4 * math.ceil(1437 / 32)


def test_the_words_and_the_markers_are_those_of_the_runs():
    good, bad, middle = Trained(0.95, 10), Trained(0.1, 12), Trained(0.5, 12)
    assert outcomes_of({"a": [good, good], "b": [bad, bad]}) == "a learns, b guesses"
    assert outcomes_of({"a": [good, bad], "b": [bad, middle]}) == "a depends on the seed, b depends on the seed"
    trained = {"NaN pixels": {"a": [good, bad], "b": [bad, bad]}, "both": {"a": [bad, bad], "b": [good, good]}}
    figure = figure_of_remedies(trained)
    points = [[line.get_xydata()[0].tolist() for line in axes.lines] for axes in figure.axes]
    assert points[0] == [[0.95, 0], [0.1, 0], [0.1, 1], [0.1, 1]] and points[1][-1] == [0.95, 1]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_one_photograph_alone_is_black():
    black = [
        (rank, step) for rank in range(4) for step in range(4) if (batch_of(rank, step)[0] == -1).all((1, 2, 3)).any()
    ]
    assert black == [(1, 2)]
    assert (batch_of(1, 2)[0] == -1).all((1, 2, 3)).nonzero().flatten().tolist() == [3]
    first, second = batch_of(0, 0)[0], batch_of(1, 0)[0]
    assert len(first) == len(second) == 8 and not torch.equal(first, second)


def test_the_chapters_prices_are_told_in_words():
    rows = prices()
    assert {row.fault for row in rows} == set(PRICED)
    sentence = told_prices(rows)
    assert sentence.startswith("A NaN stepped on: ") and sentence.count(".") >= 3
    assert "ruins 32 of 32 runs" in figure_of_chapter_prices(rows).get_suptitle()


# ------------------------------------------------------------------------------------------------- the lines by hand


def cell_source(cell_id):
    cells = json.loads((ROOT / "notebooks" / "07_skipping_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    [source] = ["".join(cell["source"]) for cell in cells if cell["id"] == cell_id]
    return source


def in_the_chapter(*cell_ids):
    """The names that cells of the chapter define."""
    names = dict(torch=torch, nn=nn, F=F, math=math, DistributedDataParallel=DistributedDataParallel, conv_net=conv_net)
    names |= dict(chapter=ch07_skipping_steps, batch_of=batch_of)
    for cell_id in cell_ids:
        exec(cell_source(cell_id), names)
    return names


def by_hand(rank, steps, bad, frozen=False):
    """Train with the chapter's eight lines; what was skipped, and the state at the end."""
    names = in_the_chapter("helpers", "by-hand")
    model = names["make_model"]()
    model[1][0].requires_grad_(not frozen)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    skipped = []
    for step in steps:
        torch.manual_seed(step)
        photos, kinds = batch_of(rank, 10 + step)
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.zero_grad()
        if (rank, step) == bad:
            kinds = torch.full_like(kinds, -100)  # the loss is NaN, and its gradients are 0
        loss = F.cross_entropy(model(photos), kinds)
        if not names["step_or_skip"](model, optimizer, loss):
            model.load_state_dict(kept, strict=False)
            skipped.append(step)
    return skipped, state_of(model, optimizer)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("ranks", "bad", "frozen", "apart"),
    [(3, (1, 1), True, 0.0), (3, (2, 0), False, 1e-5), (2, (0, 2), False, 0.0), (2, (1, 1), True, 0.0)],
)
def test_eight_lines_skip_on_all_ranks_as_if_the_batch_had_never_been(ranks, bad, frozen, apart):
    without = [step for step in range(4) if step != bad[1]]
    met = run_ranks(by_hand, ranks, args=(range(4), bad, frozen), backend="gloo")
    never_saw = run_ranks(by_hand, ranks, args=(without, None, frozen), backend="gloo")
    for one, other in zip(met, never_saw, strict=True):
        assert one.value[0] == [bad[1]] and other.value[0] == []
        # Where three ranks skip the first step, DDP sorts its buckets after another one.
        assert (one.value[1] - other.value[1]).abs().max() <= apart


def test_an_infinite_norm_is_skipped_and_a_single_process_needs_no_group():
    step_or_skip = in_the_chapter("by-hand")["step_or_skip"]
    layer = nn.Linear(1000, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    assert not step_or_skip(layer, optimizer, layer(torch.full((1, 1000), 1e19)).sum())
    assert torch.equal(layer.weight, before)
    optimizer.zero_grad()
    assert step_or_skip(layer, optimizer, layer(torch.ones(1, 1000)).sum())
    assert not torch.equal(layer.weight, before)


def in_shards(rank, bad):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    step_or_skip = in_the_chapter("by-hand")["step_or_skip"]
    layer = nn.Linear(4, 2, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    factor = torch.tensor([1.0, math.nan if rank == 0 and bad else 1.0])
    loss = (layer(torch.ones(8, 4)) * factor).sum()
    return bool(step_or_skip(layer, torch.optim.SGD(layer.parameters(), lr=0.1), loss))


@pytest.mark.thorough
def test_eight_lines_agree_where_one_shard_alone_is_bad():
    for bad in (True, False):
        assert [result.value for result in run_ranks(in_shards, args=(bad,), backend="gloo")] == [not bad] * 2


class FirstIsUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused, self.used = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


def step_with_an_unused_layer(rank):
    step_or_skip = in_the_chapter("by-hand")["step_or_skip"]
    model = DistributedDataParallel(FirstIsUnused(), find_unused_parameters=True)
    step_or_skip(model, torch.optim.SGD(model.parameters(), lr=0.1), model(torch.ones(4, 2)).mean())


@pytest.mark.thorough
def test_eight_lines_want_a_first_weight_that_is_used():
    with pytest.raises(RankError, match="mark a variable ready only once"):
        run_ranks(step_with_an_unused_layer, backend="gloo")


def test_a_layer_that_divides_by_no_contrast_is_cured_by_a_clamp():
    contrast, conv = in_the_chapter("helpers")["make_model"]()
    photos, kinds = batch_of(1, 2)
    assert contrast(photos).isnan().any((1, 2, 3)).nonzero().flatten().tolist() == [3]
    spread = photos.std(dim=(1, 2, 3), keepdim=True).clamp(min=1e-3)
    F.cross_entropy(conv((photos - photos.mean(dim=(1, 2, 3), keepdim=True)) / spread), kinds).backward()
    assert all(p.grad.isfinite().all() for p in conv.parameters())


def test_statistics_that_are_not_put_back_stay_nan():
    names = in_the_chapter("helpers", "by-hand")
    model = names["make_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updated = []
    for step in (2, 3, 4, 5):
        photos, kinds = batch_of(1, step)
        optimizer.zero_grad()
        updated.append(bool(names["step_or_skip"](model, optimizer, F.cross_entropy(model(photos), kinds))))
    assert updated == [False, True, True, True]
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.eval()(batch_of(0, 0)[0]).isnan().all()


def bad_statistics(rank, bad_rank):
    """After three steps by hand, of which the second is bad, and whose statistics nobody puts back."""
    names = in_the_chapter("helpers", "by-hand")
    model = DistributedDataParallel(names["make_model"]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        photos, kinds = batch_of(rank, 10 + step)
        if (rank, step) == (bad_rank, 1):
            photos[3] = -1
        optimizer.zero_grad()
        names["step_or_skip"](model, optimizer, F.cross_entropy(model(photos), kinds))
    return sum((~buffer.isfinite()).sum().item() for buffer in model.buffers())


@pytest.mark.thorough
def test_under_ddp_the_statistics_of_rank_0_are_everybodys():
    for bad_rank, bad in ((0, 224), (1, 0)):
        results = run_ranks(bad_statistics, args=(bad_rank,), backend="gloo")
        assert [result.value for result in results] == [bad, bad]


class SetsToZero(SmallNet):
    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch_idx)
        return loss if torch.isfinite(loss) else None

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


def test_after_none_adam_moves_where_gradients_are_zeros():
    assert fit(SetsToZero(), batches=5)[0] == 5


def one_step(rank, steps, make_step):
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in steps:
        make_step(model, optimizer, model(torch.ones(4, 2)).mean())


def vote_and_step(model, optimizer, loss):
    torch.distributed.all_reduce(torch.zeros(1))
    return plain_step(model, optimizer, loss)


@pytest.mark.thorough
def test_an_all_reduce_more_is_counted():
    assert count_all_reduces(one_step, vote_and_step) == [4, 8]


# --------------------------------------------------------------------------------------------------------- exercises


def rates(entry_of_skip=None, *, horizon_of=lambda finite, horizon: horizon, restart=False):
    """An answer to exercise 2 with a fault or two."""

    def answer(finite, horizon):
        found, done = [], 0
        for ok in finite:
            if ok:
                found.append(1 - done / horizon_of(finite, horizon))
                done += 1
            else:
                found += [] if entry_of_skip is None else entry_of_skip
                done = 0 if restart else done
        return found

    return answer


WRONG = {
    "own loss": (update_together, lambda own_loss, reduced_gradient: math.isfinite(own_loss), "own loss. Here another"),
    "own loss or gradient": (
        update_together,
        lambda own_loss, reduced_gradient: math.isfinite(own_loss) or all(map(math.isfinite, reduced_gradient)),
        "comes from this rank's own loss",
    ),
    "both": (
        update_together,
        lambda own_loss, reduced_gradient: math.isfinite(own_loss) and all(map(math.isfinite, reduced_gradient)),
        "a reason that the other ranks cannot see",
    ),
    "a small norm": (
        update_together,
        lambda own_loss, reduced_gradient: math.sqrt(sum(g**2 for g in reduced_gradient)) < 1,
        "judges how large the gradient is",
    ),
    "a norm below 1000": (
        update_together,
        lambda own_loss, reduced_gradient: math.sqrt(sum(g**2 for g in reduced_gradient)) < 1000,
        "judges how large the gradient is",
    ),
    "NaN alone": (
        update_together,
        lambda own_loss, reduced_gradient: not any(math.isnan(g) for g in reduced_gradient),
        "looking for NaN alone",
    ),
    "own infinity": (
        update_together,
        lambda own_loss, reduced_gradient: not math.isinf(own_loss) and all(map(math.isfinite, reduced_gradient)),
        "a reason that the other ranks cannot see",
    ),
    "by equality": (
        update_together,
        lambda own_loss, reduced_gradient: all(g not in (float("nan"), math.inf, -math.inf) for g in reduced_gradient),
        "updates with a NaN",
    ),
    "sum is not infinite": (
        update_together,
        lambda own_loss, reduced_gradient: sum(reduced_gradient) != math.inf,
        "updates with a NaN",
    ),
    "batches: all but the bad": (batches_trained, 32, "it ends the epoch"),
    "batches: the bad one is trained": (batches_trained, 14, "the hook runs before training_step"),
}


@pytest.mark.parametrize(("exercise", "answer", "message"), WRONG.values(), ids=WRONG)
def test_a_natural_wrong_answer_gets_its_own_message(exercise, answer, message):
    with pytest.raises(NotSolved, match=re.escape(message)):
        exercise.check(answer)


NO_MESSAGE = {
    "update: max": (update_together, lambda own_loss, reduced_gradient: math.isfinite(max(reduced_gradient))),
    "update: max of absolute values": (
        update_together,
        lambda own_loss, reduced_gradient: math.isfinite(max(abs(g) for g in reduced_gradient)),
    ),
    "update: min": (update_together, lambda own_loss, reduced_gradient: math.isfinite(min(reduced_gradient))),
    "update: first": (update_together, lambda own_loss, reduced_gradient: math.isfinite(reduced_gradient[0])),
    "update: any": (
        update_together,
        lambda own_loss, reduced_gradient: any(math.isfinite(g) for g in reduced_gradient),
    ),
    "update: own NaN": (
        update_together,
        lambda own_loss, reduced_gradient: not math.isnan(own_loss) and all(map(math.isfinite, reduced_gradient)),
    ),
    "update: first and last": (
        update_together,
        lambda own_loss, reduced_gradient: math.isfinite(reduced_gradient[0]) and math.isfinite(reduced_gradient[-1]),
    ),
    "update: half precision": (
        update_together,
        lambda own_loss, reduced_gradient: all(abs(g) < 65_504 for g in reduced_gradient),
    ),
    "update: by identity": (
        update_together,
        lambda own_loss, reduced_gradient: not any(b in reduced_gradient for b in (math.nan, math.inf, -math.inf)),
    ),
    "update: majority": (
        update_together,
        lambda own_loss, reduced_gradient: 2 * sum(map(math.isfinite, reduced_gradient)) > len(reduced_gradient),
    ),
    "rates: 0 at the last update": (learning_rates, rates(horizon_of=lambda finite, horizon: horizon - 1)),
    "rates: None": (learning_rates, rates([None])),
    "rates: 0.0": (learning_rates, rates([0.0])),
    "rates: stretched": (learning_rates, rates(horizon_of=lambda finite, horizon: horizon + finite.count(False))),
    "rates: shortened": (learning_rates, rates(horizon_of=lambda finite, horizon: horizon - finite.count(False))),
    "rates: restarted": (learning_rates, rates(restart=True)),
    "batches: one less in each epoch": (batches_trained, 33),
    "batches: the first epoch alone": (batches_trained, 5 + 11 + 11),
    "batches: the last epoch is full": (batches_trained, 5 + 6 + 12),
    "batches: the last epoch loses one": (batches_trained, 5 + 6 + 11),
    "update: the mean": (
        update_together,
        lambda own_loss, reduced_gradient: abs(sum(reduced_gradient) / len(reduced_gradient)) < 1e9,
    ),
    "update: the middle": (
        update_together,
        lambda own_loss, reduced_gradient: math.isfinite(reduced_gradient[len(reduced_gradient) // 2]),
    ),
    "update: all but one": (
        update_together,
        lambda own_loss, reduced_gradient: all(map(math.isfinite, reduced_gradient[:-1])),
    ),
    "update: even places": (
        update_together,
        lambda own_loss, reduced_gradient: all(map(math.isfinite, reduced_gradient[::2])),
    ),
    "update: at most three": (
        update_together,
        lambda own_loss, reduced_gradient: all(map(math.isfinite, reduced_gradient[:3])),
    ),
    "update: no zero": (
        update_together,
        lambda own_loss, reduced_gradient: all(g and math.isfinite(g) for g in reduced_gradient),
    ),
    "update: sorts": (
        update_together,
        lambda own_loss, reduced_gradient: reduced_gradient.sort() or all(map(math.isfinite, reduced_gradient)),
    ),
    "update: empties what it gets": (
        update_together,
        lambda own_loss, reduced_gradient: all(math.isfinite(reduced_gradient.pop()) for _ in list(reduced_gradient)),
    ),
    "rates: rounded": (learning_rates, lambda finite, horizon: [round(1 - u / horizon, 2) for u in range(sum(finite))]),
    "rates: halved": (learning_rates, lambda finite, horizon: [0.5**u for u in range(sum(finite))]),
    "rates: by the length": (
        learning_rates,
        lambda finite, horizon: [1 - u / len(finite) for u in range(sum(finite))],
    ),
    "rates: at least a tenth": (
        learning_rates,
        lambda finite, horizon: [max(0.1, 1 - u / horizon) for u in range(sum(finite))],
    ),
    "rates: up to a skip": (
        learning_rates,
        lambda finite, horizon: [1 - u / horizon for u in range([*finite, False].index(False))],
    ),
    "rates: skips at the end alone": (
        learning_rates,
        lambda finite, horizon: [
            1 - u / horizon for u in range(len(finite) - finite[::-1].index(True) if any(finite) else 0)
        ],
    ),
    "rates: floor": (learning_rates, lambda finite, horizon: [1 - u // horizon for u in range(sum(finite))]),
    "rates: reversed": (
        learning_rates,
        lambda finite, horizon: [1 - u / horizon for u in reversed(range(sum(finite)))],
    ),
    "rates: changes what it gets": (
        learning_rates,
        lambda finite, horizon: [1 - u / horizon for u in range(sum(finite.pop() for _ in range(len(finite))))],
    ),
}


@pytest.mark.parametrize(("exercise", "answer"), NO_MESSAGE.values(), ids=NO_MESSAGE)
def test_other_wrong_answers_are_refused(exercise, answer):
    with pytest.raises(NotSolved):
        exercise.check(answer)


@pytest.mark.parametrize(
    "answer",
    [
        lambda own_loss, reduced_gradient: math.isfinite(sum(g**2 for g in reduced_gradient)),
        lambda own_loss, reduced_gradient: np.bool_(np.isfinite(reduced_gradient).all()),
        lambda own_loss, reduced_gradient: all(g - g == 0 for g in reduced_gradient),
        lambda own_loss, reduced_gradient: math.isfinite(sum(reduced_gradient)),
        lambda own_loss, reduced_gradient: torch.isfinite(torch.tensor(reduced_gradient)).all(),
        lambda own_loss, reduced_gradient: bool(torch.isfinite(torch.tensor(reduced_gradient).norm())),
    ],
)
def test_other_right_answers_pass(answer):
    update_together.check(answer)


@pytest.mark.parametrize(
    "answer",
    [
        lambda finite, horizon: 1 - np.arange(sum(finite)) / horizon,
        lambda finite, horizon: (1 - update / horizon for update in range(sum(finite))),
        lambda finite, horizon: [Fraction(horizon - update, horizon) for update in range(sum(finite))],
        lambda finite, horizon: torch.linspace(1, 0, horizon + 1)[: sum(finite)],
    ],
)
def test_the_rates_may_come_in_another_style(answer):
    learning_rates.check(answer)


class EndsEpochs(LightningModule):
    """Exercise 3's module."""

    def __init__(self):
        super().__init__()
        self.weight, self.trained = nn.Parameter(torch.zeros(())), 0

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx in ch07_exercises.BAD_BATCHES[self.current_epoch] else None

    def training_step(self, batch, batch_idx):
        self.trained += 1
        return self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_third_exercises_answer_is_what_a_trainer_does():
    module = EndsEpochs()
    quiet_trainer(devices=1, accelerator="cpu", max_epochs=3).fit(module, DataLoader(range(ch07_exercises.BATCHES)))
    assert module.trained == batches_trained.solution
