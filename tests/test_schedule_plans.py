"""Schedules of sizes and their plans: what they refuse, a budget measured in bytes, and steps counted by hand."""

import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.schedules import ScheduledBatchSampler, SizeSchedule
from course_lib.steps import max_steps_for, plan_steps
from course_lib.steps.counting import Window
from tests.operations import operations
from tests.test_schedules import STEPWISE, by_hand, random_schedule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SizeSchedule({1: (8, 4)}), r"must begin at 0 and grow, got \[1\]"),
        (lambda: SizeSchedule([(0, 8, 4), (3, 16, 2), (3, 32, 1)]), r"grow, got \[0, 3, 3\]"),
        (lambda: SizeSchedule({}), r"got \[\]"),
        (lambda: SizeSchedule({0: (8, 0)}), "the batch size of size 8 must be a positive int, got 0"),
        (lambda: SizeSchedule({0: ((8, 0), 4)}), "each part of the size of a stage must be a positive int"),
        (lambda: SizeSchedule({0: ((), 4)}), r"int or a tuple of ints, got \(\)"),
        (lambda: SizeSchedule({0: (8, 4)}, unit="steps"), 'unit must be "epochs", "optimizer_steps" or "samples"'),
        (lambda: SizeSchedule({0: (8, 4)}, effective_batch_size=8, accumulate_grad_batches=2), "one decides the other"),
        (
            lambda: SizeSchedule({0: (8, 12)}, effective_batch_size=64),
            "effective_batch_size=64 is no multiple of the 12 samples.*effective_batch_size=60 or 72$",
        ),
        (
            lambda: SizeSchedule({0: (8, 8)}, effective_batch_size=24).accumulate_grad_batches(2),
            "batches of 8 on 2 ranks make at size 8.*effective_batch_size=16 or 32$",
        ),
        (
            lambda: SizeSchedule.with_budget({0: 32, 2: 64, 4: 128}, budget=2000),
            "a budget of 2,000 holds no batch of 1: size 64 costs 4,096, size 128 costs 16,384 a sample. Give a budget "
            "of at least 16,384",
        ),
        (lambda: SizeSchedule.with_budget({0: 32}, budget=2048, multiple_of=8), "no batch of 8.*at least 8,192"),
        (lambda: SizeSchedule.with_budget({0: 32}, budget=8, cost=lambda size: 0), "must be above 0 and finite"),
        (lambda: SizeSchedule.from_batch_sizes({0: 32, 1: 64}, {32: 8}), r"for the sizes \[64\], only for \[32\]"),
        (lambda: SizeSchedule.from_batch_sizes([(0, 32)], {32: 8}), r"sizes must be \{start: size\}, got"),
        (
            lambda: SizeSchedule({0: (8, 4), 9: (16, 2)}, unit="samples", effective_batch_size=8)
            .accumulate_grad_batches(),
            r"changes within an epoch here \(windows of \[2, 4\] micro-batches, by samples\).*window_sizes\(\)",
        ),
        (lambda: STEPWISE.plan(48, max_epochs=1).lr_factor("cosine"), '"linear", "sqrt" or "none"'),
        (lambda: STEPWISE.plan(48), "nothing ends this run"),
        (lambda: STEPWISE.plan(48, max_epochs=1, tail="step"), '"spread", "drop" or "pad"'),
        (lambda: plan_steps(48, STEPWISE, accumulate_grad_batches=2, max_epochs=1), "leave accumulate_grad_batches"),
    ],
)  # fmt: skip
def test_what_a_schedule_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_budget_makes_the_largest_batches_that_it_holds():
    schedule = SizeSchedule.with_budget({0: 32, 3: 64, 6: (64, 128)}, budget=65536)
    assert [stage.batch_size for stage in schedule.stages] == [64, 16, 8]
    assert {stage.budget_used for stage in schedule.stages} == {1.0}
    tokens = SizeSchedule.with_budget({0: 100, 50: 512}, budget=4096, cost=int, unit="optimizer_steps", multiple_of=8)
    assert [stage.batch_size for stage in tokens.stages] == [40, 8]
    attention = SizeSchedule.with_budget({0: 100}, budget=10**6, cost=lambda length: length**2)
    assert attention.stages[0].batch_size == 100
    rng = random.Random("budget")
    for _ in range(200):
        sizes = {i: rng.randint(8, 400) for i in range(3)}
        budget = 10 * max(sizes.values()) ** 2 + rng.randint(0, 10**6)
        for stage in SizeSchedule.with_budget(sizes, budget).stages:
            assert stage.batch_size * stage.size**2 <= budget < (stage.batch_size + 1) * stage.size**2
            assert stage.budget_used > 0.9


def test_batch_sizes_come_from_a_table_of_what_fits():
    table = {32: SimpleNamespace(batch_size=64), (64, 48): 16, 512: np.int64(4)}
    schedule = SizeSchedule.from_batch_sizes({0: 32, 1: [64, 48], 2: np.int64(512), 3: torch.tensor(32)}, table)
    assert [stage.batch_size for stage in schedule.stages] == [64, 16, 4, 64]
    for value in (8.7, "8", True, 0):
        with pytest.raises(ValueError, match="the batch size of size 8 must be a positive int"):
            SizeSchedule.from_batch_sizes({0: 8}, {8: value})


def test_the_peak_of_what_a_forward_keeps_stays_within_the_budget_and_uses_it():
    layers = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3, padding=1)
    model = torch.nn.Sequential(*layers)

    def kept(batch_size, side):
        storages = {}

        def pack(tensor):
            storages[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        images = torch.zeros(batch_size, 1, side, side)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(images)
        return sum(nbytes for pointer, nbytes in storages.items() if pointer not in weights)

    budget = 2_000_000
    cost = {side: kept(1, side) for side in (16, 28, 40, 56)}
    schedule = SizeSchedule.with_budget({0: 16, 1: 28, 2: 40, 3: 56}, budget, cost=cost.__getitem__)
    for stage in schedule.stages:
        assert 0.9 * budget <= kept(stage.batch_size, stage.size) <= budget


def test_the_effective_batch_is_held_and_the_learning_rate_follows():
    held = SizeSchedule({0: (32, 64), 3: (64, 16)}, effective_batch_size=128)
    assert held.accumulate_grad_batches() == {0: 2, 3: 8}
    assert held.accumulate_grad_batches(world_size=2) == {0: 1, 3: 4}
    assert SizeSchedule({0: (32, 16), 3: (64, 16)}, effective_batch_size=64).accumulate_grad_batches() == 4
    assert STEPWISE.accumulate_grad_batches() == 1
    plan = held.plan(640, max_epochs=5)
    assert plan.lr_factor("linear")(24) == plan.lr_factor("sqrt")(24) == 1
    plan = SizeSchedule({0: (32, 64), 3: (64, 16)}).plan(640, max_epochs=5)
    rules = {"linear": 0.25, "sqrt": 0.5, "none": 1.0}
    assert {rule: plan.lr_factor(rule)(30) for rule in rules} == rules
    by_step = plan.lr_factor()
    assert [by_step(step) for step in (0, 29, 30, 100)] == [1, 1, 0.25, 0.25]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, pickle.loads(pickle.dumps(by_step)))
    for _ in range(30):
        assert optimizer.param_groups[0]["lr"] == 0.4
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    scheduler.load_state_dict(scheduler.state_dict())


def test_a_schedule_as_a_table():
    schedule = SizeSchedule.with_budget({0: 32, 3: 60}, budget=65536)
    assert schedule.table().splitlines()[2].split() == ["3", "60", "18", "98.9%", "1", "0.281", "0.53"]
    assert schedule == SizeSchedule([(0, 32, 64), (3, 60, 18)]) != STEPWISE
    assert len({schedule, SizeSchedule({0: (32, 64), 3: (60, 18)})}) == 1
    assert eval(repr(STEPWISE)) == pickle.loads(pickle.dumps(STEPWISE)) == STEPWISE


# ------------------------------------------------------------------------------------------------- the plan


def limited(steps, limit_train_batches):
    if isinstance(limit_train_batches, float):
        limit_train_batches = int(len(steps) * limit_train_batches)
    return steps[:limit_train_batches]


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_a_plan_is_what_is_counted_by_hand(rng):
    n, world_size = rng.randint(1, 60), rng.randint(1, 3)
    schedule, tail = random_schedule(rng, n, world_size), rng.choice(["spread", "drop", "pad"])
    limit, max_steps = rng.choice([1.0, 1.0, 3, 0.5]), rng.choice([-1, -1, 7])
    run = dict(world_size=world_size, max_epochs=4, max_steps=max_steps, limit_train_batches=limit, tail=tail)
    windows, batches = [], 0
    for epoch, steps in enumerate(by_hand(n, schedule, world_size, tail, epochs=4)):
        if len(windows) == max_steps:
            break
        if any(total < world_size for _, total, _ in steps):
            with pytest.raises(ValueError, match=f"in epoch {epoch} without an empty batch"):
                schedule.plan(n, **run)
            return
        of_epoch = limited(steps, limit)
        if not of_epoch:
            break
        for update in dict.fromkeys(update for *_, update in of_epoch):
            places = [i for i, step in enumerate(of_epoch) if step[2] == update]
            if len(windows) != max_steps:
                windows.append((epoch, places[0], places[-1] + 1, of_epoch[places[0]][0]))
                batches += len(places)
    plan = schedule.plan(n, **run)
    assert [(w.epoch, w.start, w.stop) for w in plan.windows] == [window[:3] for window in windows]
    assert (plan.total_steps, plan.micro_batches, plan.micro_batches_unused) == (len(windows), batches, 0)
    assert all(windows[step][3] == stage.size for step, stage in plan.sizes) and plan.explain()


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_a_schedule_by_epochs_is_planned_as_batch_sizes_by_epoch(rng):
    n, world_size = rng.randint(4, 80), rng.randint(1, 4)
    stages = {0: (8, rng.randint(2, 9)), rng.randint(1, 3): (16, rng.randint(2, 9))}
    stops = dict(max_epochs=rng.randint(0, 5), max_steps=rng.choice([-1, 9]), limit_train_batches=rng.choice([1.0, 4]))
    k = rng.randint(1, 3)
    got = plan_steps(n, SizeSchedule(stages, accumulate_grad_batches=k), world_size=world_size, **stops)
    sizes = {epoch: batch_size for epoch, (_, batch_size) in stages.items()}
    # Rows of the ranks are what DistributedSampler pads: as many steps, though nothing is repeated.
    want = plan_steps(n, sizes, accumulate_grad_batches=k, world_size=world_size, **stops)
    for told in ("total_steps", "epochs_completed", "micro_batches", "micro_batches_unused"):
        assert getattr(got, told) == getattr(want, told)
    assert [w[:4] for w in got.windows] == [w[:4] for w in want.windows]
    assert all(got.batches_in_epoch(epoch) == want.batches_in_epoch(epoch) for epoch in range(6))


def test_leftovers_that_the_next_stage_would_take_begin_with_it():
    # 5 samples, batches of 3, the rest dropped: two updates in, batches of 1 take all of an epoch and all that is left.
    schedule = SizeSchedule({0: (8, 3), 2: (16, 1)}, unit="optimizer_steps")
    assert schedule.plan(5, max_epochs=3, tail="drop").total_steps == 9
    sampler = ScheduledBatchSampler(5, schedule, tail="drop")
    counts = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        counts.append([len(batch) for batch in sampler])
    assert counts == [[3], [3, 1, 1], [1] * 5]


def test_a_run_that_no_sampler_deals_is_refused_before_it_begins():
    later = SizeSchedule({0: (8, 2), 3: (8, 1)})
    for make in (
        lambda: later.plan(5, world_size=2, max_epochs=4),
        lambda: plan_steps(5, later, world_size=2, max_epochs=4),
        lambda: ScheduledBatchSampler(5, later, num_replicas=2, rank=0),
    ):
        with pytest.raises(ValueError, match="to 2 ranks in epoch 3 without an empty batch: use"):
            make()
    assert later.plan(5, world_size=2, max_epochs=3).epochs_completed == 3
    uneven = SizeSchedule({0: (8, 3), 3: (8, 4)}, effective_batch_size=12)
    with pytest.raises(ValueError, match="no multiple of the 8 samples that batches of 4 on 2 ranks make"):
        ScheduledBatchSampler(24, uneven, num_replicas=2, rank=0)


def windows_by_addition(n, schedule, world_size, tail, limit, epochs):
    """The windows of a run, and in each the samples of the rank that has most, added up step by step."""
    windows = []
    for epoch, steps in enumerate(by_hand(n, schedule, world_size, tail, epochs=epochs)):
        of_epoch = limited(steps, limit)
        for update in dict.fromkeys(update for *_, update in of_epoch):
            places = [i for i, step in enumerate(of_epoch) if step[2] == update]
            samples = sum(-(-of_epoch[i][1] // world_size) for i in places)
            windows.append(Window(len(windows), epoch, places[0], places[-1] + 1, 0, samples))
        if not of_epoch:
            break
    return windows


@pytest.mark.thorough
@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_windows_from_prefix_sums_are_those_that_are_added_up(rng):
    n, world_size = rng.randint(1, 90), rng.randint(1, 3)
    schedule, tail = random_schedule(rng, n, world_size, smallest=2), rng.choice(["spread", "drop", "pad"])
    limit = rng.choice([1.0, 1.0, 3, 0.5])
    try:
        plan = schedule.plan(n, world_size=world_size, max_epochs=4, limit_train_batches=limit, tail=tail)
    except ValueError as error:
        if "without an empty batch" not in str(error):
            raise
        return
    expected = windows_by_addition(n, schedule, world_size, tail, limit, epochs=4)
    assert list(plan.windows) == expected
    assert [plan.windows[i] for i in range(len(expected))] == expected
    assert list(plan.windows[::-2]) == expected[::-2]


def many_stages(count):
    return SizeSchedule([(step, 1 + step % 7, 1 + step % 3) for step in range(count)], unit="optimizer_steps")


@pytest.mark.thorough
def test_a_plan_of_many_stages_is_that_which_is_added_up():
    plan = many_stages(800).plan(10_000, max_epochs=1)
    assert len(plan.windows) == 5_001
    assert sum(window.per_rank_samples for window in plan.windows) == 10_000
    assert list(plan.windows) == windows_by_addition(10_000, many_stages(800), 1, "spread", 1.0, epochs=1)


def test_a_window_costs_no_more_in_many_stages_than_in_a_few():
    def of_the_last_windows(stages):
        windows = many_stages(stages).plan(10_000, max_epochs=1).windows
        windows[-1]  # the sums are made for the first window that is asked for
        return operations(lambda: [windows[-i] for i in range(1, 101)])

    assert of_the_last_windows(800) <= 1.1 * of_the_last_windows(10)


def test_floats_in_a_budget_hold_what_they_hold():
    assert SizeSchedule.with_budget({0: 1}, 1.0, cost=lambda size: 0.1).stages[0].batch_size == 10
    assert SizeSchedule.with_budget({0: 1}, 0.95, cost=lambda size: 0.1).stages[0].batch_size == 9


@pytest.mark.parametrize("budget", [float("nan"), float("inf"), "4096", None, 0, -1, True])
def test_a_budget_is_a_number(budget):
    with pytest.raises(ValueError, match="budget must be a finite number above 0"):
        SizeSchedule.with_budget({0: 8}, budget)


@pytest.mark.parametrize("stages", [{0: 16}, [(0, 16)], None, 16])
def test_stages_are_pairs_by_their_start(stages):
    with pytest.raises(ValueError, match=r"stages must be \{start: \(size, batch_size\)\}"):
        SizeSchedule(stages)
    with pytest.raises(ValueError, match=r"sizes must be \{start: size\}"):
        SizeSchedule.with_budget([16, 32], 4096)


def test_a_plan_in_words_says_which_sizes_come():
    plan = plan_steps(48, STEPWISE, max_epochs=2)
    assert plan.batches_per_epoch == {0: 7, 1: 12} and plan.total_steps == 19 == max_steps_for(2, 48, STEPWISE)
    assert plan.explain().splitlines() == [
        "From epoch 0 on: 48 samples in batches of 16 at size 16 (1), then of 8 at size 32 (2), then of 4 at size 64 "
        "(4) make 7 batches per epoch.",
        "Windows of 1 micro-batch make 7 optimizer steps per epoch.",
        "From epoch 1 on: 48 samples in batches of 4 at size 64 (12) make 12 batches per epoch.",
        "Windows of 1 micro-batch make 12 optimizer steps per epoch.",
        "max_epochs=2 ends the run after 2 full epochs: 19 optimizer steps in all.",
    ]
    short = SizeSchedule({0: (8, 4), 5: (16, 2)}).plan(8, max_epochs=2, world_size=2)
    assert short.explain().splitlines() == [
        "8 samples in batches of 4 at size 8 (1) make 1 batch per epoch on each of 2 ranks.",
        "Windows of 1 micro-batch make 1 optimizer step per epoch.",
        "The run never has size 16, which begins after 5 epochs.",
        "max_epochs=2 ends the run after 2 full epochs: 2 optimizer steps in all.",
    ]
    padded = STEPWISE.plan(50, max_epochs=1, tail="pad")
    assert (padded.samples_repeated, padded.samples_dropped) == (2, 0)
    assert STEPWISE.plan(50, max_epochs=1, tail="drop").samples_dropped == 2
