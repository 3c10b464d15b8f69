"""The numbers behind chapter 07's figures and widget."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workbook.ch07_skipping_steps import (
    POLICIES,
    Trained,
    figure_of_policies,
    outcomes,
    poisoned_digits,
    policy_explorer,
    train,
)
from workbook.display import png_bytes

from course_lib.launch import RankTimeout, run_ranks
from course_lib.skipping import StepGuard


def real_ranks(rank, policy, bad_rank, bad_step):
    """Whether each of eight steps changed finite weights, on two real ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(model, optimizer)
    seen = []
    for step in range(1, 9):
        bad = (rank, step) == (bad_rank, bad_step)
        loss = model(torch.full((4, 2), math.nan if bad else 1.0)).mean()
        optimizer.zero_grad()
        if policy == "the rank alone skips" and bad:
            seen.append("skipped")
            continue
        updated = True
        if policy == "StepGuard":
            guard.backward(loss)
            updated = guard.step()
        else:
            loss.backward()
            if policy == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finite = all(parameter.isfinite().all() for parameter in model.parameters())
        seen.append("skipped" if not updated else "update" if finite else "weights are NaN")
    return seen


@pytest.mark.parametrize("policy", ["nothing", "clip", "StepGuard"])
def test_the_widgets_outcomes_are_those_of_real_ranks(policy):
    for bad_rank, bad_step in ((0, 1), (1, 5), (0, 8)):
        results = run_ranks(real_ranks, args=(policy, bad_rank, bad_step), backend="gloo")
        assert [result.value for result in results] == outcomes(policy, 2, 8, bad_rank, bad_step)


def test_a_rank_that_skips_alone_leaves_the_other_waiting_at_the_end():
    with pytest.raises(RankTimeout, match="rank 0 was running"):
        run_ranks(real_ranks, args=("the rank alone skips", 1, 5), timeout=2, backend="gloo")
    waiting, ahead = outcomes("the rank alone skips", 2, 8, 1, 5)
    assert waiting == ["update"] * 7 + ["waits for ever"]
    assert ahead == ["update"] * 4 + ["skipped"] + ["one step ahead"] * 3


def test_none_in_a_trainer_is_a_skip_on_one_rank_and_an_error_on_several():
    assert outcomes("None in a Trainer", 1, 3, 0, 2) == [["update", "skipped", "update"]]
    assert outcomes("None in a Trainer", 2, 3, 0, 2) == [["update", "error", "error"]] * 2


def test_the_widget_follows_its_controls():
    explorer = policy_explorer()
    for policy in POLICIES:
        text = explorer.set(policy=policy, ranks=3, bad_rank=2, bad_step=2)
        assert text.splitlines() == [
            f"rank {rank}: {', '.join(row)}" for rank, row in enumerate(outcomes(policy, 3, 8, 2, 2))
        ]
    assert "there is no rank 2 of 2: move one of the two" in explorer.set(ranks=2)


def test_the_digits_are_poisoned_where_they_are_said_to_be():
    data = poisoned_digits(not_a_number=3, exploding=2, mislabelled=5)
    assert torch.isnan(data.images).flatten(1).any(1).nonzero().flatten().tolist() == [0, 1, 2]
    assert (data.images.nan_to_num().flatten(1).amax(1) > 1).nonzero().flatten().tolist() == [3, 4]
    assert data.known_bad.nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    clean = poisoned_digits(0, 0, 0)
    assert (data.labels != clean.labels).nonzero().flatten().tolist() == [5, 6, 7, 8, 9]
    assert torch.isfinite(data.test_images).all()


def test_each_policy_counts_its_updates_and_what_it_lost():
    data = poisoned_digits()
    runs = {policy: train(data, policy, epochs=2) for policy in ("nothing", "filter", "sampler", "skip")}
    batches = math.ceil(1437 / 32)
    assert runs["nothing"].updates == 2 * batches and runs["nothing"].good_samples_lost == 0
    assert runs["filter"].updates == 2 * math.ceil((1437 - 16) / 32) and runs["filter"].good_samples_lost == 0
    for policy in ("sampler", "skip"):
        skipped = 2 * batches - runs[policy].updates
        assert 0 < runs[policy].good_samples_lost < 32 * skipped
    assert runs["nothing"].accuracy < 0.2 < 0.8 < min(runs[p].accuracy for p in ("filter", "sampler", "skip"))


def test_the_figure_has_a_bar_for_each_policy():
    runs = {"a": Trained(0.9, 10, 3), "b": Trained(0.1, 12, 0)}
    figure = figure_of_policies(runs)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [0.1, 0.9]
    assert {text.get_text() for text in figure.axes[0].texts} == {
        "10 updates, 3 good samples lost",
        "12 updates, 0 good samples lost",
    }
    assert png_bytes(figure).startswith(b"\x89PNG")
