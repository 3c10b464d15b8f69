"""The plan against two oracles: a plain simulation of the loop, and a real Trainer."""

import math
import random
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from course_lib.launch import run_ranks
from course_lib.samplers import ShardedBatchSampler, ShuffledBatchSampler, TwoStreamBatchSampler
from course_lib.schedules import ScheduledBatchSampler, SizedDataset, SizeSchedule
from course_lib.steps import max_steps_for, plan_steps
from course_lib.steps.counting import Window
from tests import effort
from tests.uneven_batches import UnevenBatches

from .trainer_oracle import CountingModule, count_real_fit, quiet_trainer, random_case


def at(schedule, epoch):
    if isinstance(schedule, int):
        return schedule
    first = max((first for first in schedule if first <= epoch), default=None)
    return 1 if first is None else schedule[first]


@dataclass
class Simulated:
    """The loop itself, batch by batch, with torch's own samplers and loader."""

    windows: list = field(default_factory=list)
    batches_in_epoch: dict = field(default_factory=dict)
    epochs_completed: int = 0
    micro_batches: int = 0
    unused: int = 0


def simulate(num_samples, batch_size, k, world_size, drop_last, max_epochs, max_steps, limit, short_window):
    def batches_of(epoch):
        dataset = range(num_samples)
        sampler = DistributedSampler(dataset, world_size, rank=0, shuffle=False)
        return list(DataLoader(dataset, at(batch_size, epoch), sampler=sampler, drop_last=drop_last))

    return simulate_loop(batches_of, k, max_epochs, max_steps, limit, short_window)


def simulate_loop(batches_of, k, max_epochs, max_steps, limit, short_window):
    """The loop over ``batches_of(epoch)``: one rank's, anything with a length."""
    run = Simulated()
    waiting = []  # (epoch, batch, samples) whose gradient has not been stepped
    epoch = 0
    while max_epochs in (None, -1) or epoch < max_epochs:
        if len(run.windows) == max_steps:
            break
        batches = batches_of(epoch)
        batches = batches[: limit if isinstance(limit, int) else int(len(batches) * limit)]
        if not batches:
            break
        stopped = False
        for i, batch in enumerate(batches):
            run.micro_batches += 1
            run.batches_in_epoch[epoch] = i + 1
            waiting.append((epoch, i, len(batch)))
            if (i + 1) % at(k, epoch) == 0 or (short_window == "step" and i + 1 == len(batches)):
                here = [i for e, i, _ in waiting if e == epoch]
                samples = sum(n for *_, n in waiting)
                run.windows.append(
                    Window(len(run.windows), epoch, here[0], here[-1] + 1, len(waiting) - len(here), samples)
                )
                waiting = []
                if len(run.windows) == max_steps:
                    stopped = True
                    break
        run.epochs_completed += i + 1 == len(batches)
        if short_window == "zero":
            run.unused += len(waiting)
            waiting = []
        if stopped:
            break
        epoch += 1
    run.unused += len(waiting)
    return run


cases = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 60),
        "batch_size": st.integers(1, 12)
        | st.dictionaries(st.integers(1, 5), st.integers(1, 12), max_size=2).map(lambda d: {0: 3, **d}),
        "k": st.integers(1, 9)
        | st.dictionaries(st.integers(1, 5), st.integers(1, 9), max_size=2).map(lambda d: {0: 2, **d}),
        "world_size": st.integers(1, 5),
        "drop_last": st.booleans(),
        "max_epochs": st.integers(0, 6),
        "max_steps": st.sampled_from([-1, 0, 1, 2, 3, 5, 8, 13]),
        "limit": st.sampled_from([1.0, 0.7, 0.3, 0.0, 0, 1, 2, 7]),
        "short_window": st.sampled_from(["step", "carry", "zero"]),
    }
)


def planned(case):
    case = dict(case)
    return plan_steps(
        case.pop("num_samples"),
        case.pop("batch_size"),
        accumulate_grad_batches=case.pop("k"),
        limit_train_batches=case.pop("limit"),
        **case,
    )


@given(cases)
def test_plan_equals_the_loop_batch_by_batch(case):
    plan, run = planned(case), simulate(**case)
    assert list(plan.windows) == run.windows
    assert plan.total_steps == len(run.windows)
    assert plan.epochs_completed == run.epochs_completed
    assert plan.micro_batches == run.micro_batches
    assert [plan.batches_in_epoch(e) for e in range(8)] == [run.batches_in_epoch.get(e, 0) for e in range(8)]
    assert plan.micro_batches_unused == run.unused
    assert plan.explain()


@given(cases)
def test_dropped_and_repeated_samples_equal_what_the_ranks_draw(case):
    case = case | {
        "max_epochs": 1,
        "max_steps": -1,
        "batch_size": at(case["batch_size"], 0),
        "k": at(case["k"], 0),
    }
    plan = planned(case)
    dataset = range(case["num_samples"])
    drawn = []
    for rank in range(case["world_size"]):
        sampler = DistributedSampler(dataset, case["world_size"], rank, shuffle=False)
        batches = [
            b.tolist() for b in DataLoader(dataset, case["batch_size"], sampler=sampler, drop_last=case["drop_last"])
        ]
        batches = batches[: plan.batches_per_epoch]
        if case["short_window"] == "zero":
            batches = batches[: len(batches) // case["k"] * case["k"]]
        drawn += [index for batch in batches for index in batch]
    assert plan.samples_dropped == len(set(dataset) - set(drawn))
    assert plan.samples_repeated == len(drawn) - len(set(drawn))


@given(cases, st.integers(-15, 15), st.slices(12))
def test_windows_are_a_sequence(case, index, part):
    windows = planned(case).windows
    assert list(windows[part]) == list(windows)[part]
    assert list(reversed(windows)) == list(windows)[::-1]
    if -len(windows) <= index < len(windows):
        assert windows[index] == list(windows)[index]
    else:
        with pytest.raises(IndexError):
            windows[index]
    for window in windows:
        assert window.micro_batches == window.carried + window.stop - window.start > 0


@pytest.mark.parametrize("seed", range(10))
def test_plan_equals_a_real_trainer(seed):
    # 500 in all, with --thorough: int and {epoch: k} accumulation, both stops, both kinds of limit.
    rng = random.Random(seed)
    for _ in range(effort.cases(6, 50)):
        case = random_case(rng)
        plan, counted = plan_steps(**case), count_real_fit(**case)
        assert (plan.total_steps, plan.epochs_completed, plan.micro_batches) == counted.totals, case
        assert [w.per_rank_samples for w in plan.windows] == counted.samples_per_step, case


def test_plan_equals_a_real_trainer_on_two_real_ranks():
    rng = random.Random("two ranks")
    cases = [random_case(rng, world_size=2) for _ in range(effort.cases(12, 40))]

    def fit_all(rank):
        return [count_real_fit(**case, devices=2, strategy="ddp") for case in cases]

    ranks = [result.value for result in run_ranks(fit_all, 2, timeout=240)]
    for case, *counted_on in zip(cases, *ranks, strict=True):
        plan = plan_steps(**case, world_size=2)
        for counted in counted_on:
            assert (plan.total_steps, plan.epochs_completed, plan.micro_batches) == counted.totals, case
            assert [w.per_rank_samples for w in plan.windows] == counted.samples_per_step, case


def test_the_run_that_stopped_at_epoch_8():
    case = dict(num_samples=2500, batch_size=64, accumulate_grad_batches=8, max_steps=10 * (2500 // 512))
    for drop_last, batches in ((True, 39), (False, 40)):
        plan = plan_steps(**case, drop_last=drop_last)
        assert (plan.batches_per_epoch, plan.steps_per_epoch, plan.epochs_completed) == (batches, 5, 8)
        assert max_steps_for(10, 2500, 64, accumulate_grad_batches=8, drop_last=drop_last) == 50


def test_values_per_epoch_have_the_form_of_the_schedule():
    assert plan_steps(12, {0: 2, 1: 2}, max_epochs=2).steps_per_epoch == 6
    plan = plan_steps(12, {0: 2, 2: 4}, accumulate_grad_batches={1: 3}, max_epochs=4)
    assert plan.batches_per_epoch == {0: 6, 1: 6, 2: 3}
    assert plan.steps_per_epoch == {0: 6, 1: 2, 2: 1}


def test_a_plan_for_a_trillion_samples_lists_nothing():
    plan = plan_steps(10**12, 7, accumulate_grad_batches=3, world_size=8, max_epochs=1000, short_window="carry")
    per_rank = 10**12 // 8
    batches = -(-per_rank // 7)
    assert plan.total_steps == len(plan.windows) == 1000 * (batches // 3)
    last = plan.windows[-1]
    assert (last.epoch, last.stop) == (999, batches // 3 * 3)
    assert plan.windows[batches // 3].carried == batches % 3
    assert sum(1 for _ in plan.windows[10**9 : 10**9 + 5]) == 5


def test_more_ranks_than_samples():
    plan = plan_steps(3, 2, world_size=8, max_epochs=1)
    assert (plan.total_steps, plan.samples_repeated, plan.samples_dropped) == (1, 5, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples must be a positive int, got 0"),
        ({"num_samples": 2.5}, "num_samples must be a positive int, got 2.5"),
        ({"batch_size": 0}, "batch_size must be a positive int, got 0"),
        ({"batch_size": "64"}, "batch_size must be a positive int, got '64'"),
        ({"batch_size": {1: 4}}, "batch_size must say its value for epoch 0"),
        ({"batch_size": {0: -4}}, "batch_size[0] must be a positive int, got -4"),
        ({"batch_size": True}, "batch_size must be a positive int, got True"),
        ({"accumulate_grad_batches": {}}, "accumulate_grad_batches must be an int or {epoch: int}"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be a positive int, got 0"),
        (
            {"accumulate_grad_batches": {-1: 2}},
            "an epoch of accumulate_grad_batches must be an int of at least 0",
        ),
        ({"world_size": 0}, "world_size must be a positive int, got 0"),
        ({"max_epochs": None}, "give max_epochs, max_steps or both"),
        ({"max_epochs": -2}, "max_epochs must be an int of at least -1, got -2"),
        ({"max_steps": None}, "max_steps must be an int of at least -1, got None"),
        ({"limit_train_batches": 1.5}, "limit_train_batches must be a number of batches"),
        ({"limit_train_batches": -1}, "limit_train_batches must be a number of batches"),
        ({"limit_train_batches": True}, "limit_train_batches must be a number of batches"),
        ({"limit_train_batches": float("nan")}, "limit_train_batches must be a number of batches"),
        ({"short_window": "flush"}, 'short_window must be "step", "carry" or "zero", got '),
        (
            {"accumulate_grad_batches": 9, "short_window": "carry", "max_epochs": None, "max_steps": 3},
            "max_steps=3 is never reached: 3 batches per epoch fill no window",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    good = {"num_samples": 12, "batch_size": 4, "max_epochs": 1}
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_steps(**good | arguments)


def test_no_batches_is_a_plan_that_says_so():
    plan = plan_steps(33, 64, drop_last=True, max_steps=10)
    assert (plan.batches_per_epoch, plan.total_steps, plan.epochs_completed) == (0, 0, 0)
    assert "Nothing will train" in plan.explain()
    assert len(plan.windows) == 0


def test_numpys_numbers_are_taken():
    plan = plan_steps(np.int64(12), np.int32(2), limit_train_batches=np.int64(3), max_epochs=np.int64(2))
    assert plan == plan_steps(12, 2, limit_train_batches=3, max_epochs=2)
    half = plan_steps(12, 2, limit_train_batches=np.float32(0.5), max_epochs=2)
    assert half == plan_steps(12, 2, limit_train_batches=0.5, max_epochs=2)


def test_a_run_that_ends_for_want_of_batches_says_so():
    said = plan_steps(10, {0: 2, 2: 100}, drop_last=True, max_steps=100).explain()
    assert "epoch 2, which has no batch, ends the run after 2 full epochs: 10 optimizer steps" in said


def test_more_windows_than_len_can_say():
    windows = plan_steps(10**12, 1, max_epochs=10**8).windows
    assert repr(windows) == "<windows of the optimizer steps in range(0, 100000000000000000000)>"
    assert next(iter(windows)) == windows[0]
    with pytest.raises(ValueError, match="epoch must be an int of at least 0"):
        plan_steps(3, 1, max_epochs=1).batches_in_epoch(-1)


def test_max_steps_for_refuses_a_second_stop():
    with pytest.raises(ValueError, match="no max_epochs"):
        max_steps_for(10, 100, 4, max_epochs=3)


def test_random_sampler_with_its_own_length_is_planned_by_that_length():
    sampler = RandomSampler(range(100), replacement=True, num_samples=33)
    loader = DataLoader(range(100), batch_size=8, sampler=sampler)
    assert plan_steps(len(sampler), 8, max_epochs=1).batches_per_epoch == len(list(loader))


@given(
    num_samples=st.integers(2, 60),
    batch_size=st.integers(1, 7),
    k=st.integers(1, 4),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    max_epochs=st.integers(1, 4),
    stop=st.integers(0, 200),
)
def test_what_is_left_of_a_run_is_counted_by_hand(num_samples, batch_size, k, before, after, max_epochs, stop):
    # Stopped at a window's end, then on with other ranks; batches of equal shares, as our samplers deal them.
    plan = plan_steps(num_samples, batch_size, accumulate_grad_batches=k, world_size=before, max_epochs=max_epochs)
    stop %= plan.total_steps + 1
    samples_done = 0
    if stop:
        last = plan.windows[stop - 1]
        full = last.stop == plan.batches_per_epoch
        samples_done = (
            num_samples * (last.epoch + 1) if full else num_samples * last.epoch + last.stop * batch_size * before
        )
    rest = plan_steps(
        num_samples, batch_size, accumulate_grad_batches=k, world_size=after, max_epochs=max_epochs,
        steps_done=stop, samples_done=samples_done,
    )  # fmt: skip
    epoch, position = divmod(samples_done, num_samples)
    steps = stop
    while epoch < max_epochs:
        batches = math.ceil(math.ceil((num_samples - position) / after) / batch_size)
        steps += math.ceil(batches / k)
        epoch, position = epoch + 1, 0
    assert rest.total_steps == steps
    assert [window.optimizer_step for window in rest.windows] == list(range(stop, steps))
    assert rest.epochs_completed == max_epochs
    if before == after:
        assert rest.total_steps == plan.total_steps

    # The progress goes on where it was, and ends at 1.
    shares = [rest.progress(step) for step in range(steps + 1)]
    assert shares == sorted(shares) and shares[-1] == 1
    assert shares[0] == (0 if steps > stop else 1)
    if 0 < stop < steps:
        assert shares[stop] == pytest.approx(samples_done / (num_samples * max_epochs))


def test_a_plan_of_what_is_left_says_so():
    plan = plan_steps(46, 3, accumulate_grad_batches=2, max_epochs=3, steps_done=6, samples_done=46 + 24)
    assert (plan.total_steps, plan.micro_batches, len(plan.windows)) == (18, 8 + 16, 12)
    assert "18 optimizer steps in all.\n6 steps of them were made before." in plan.explain()
    over = plan_steps(46, 3, max_epochs=2, steps_done=40, samples_done=92)
    assert over.total_steps == 40 and "Nothing is left to train" in over.explain()
    with pytest.raises(ValueError, match=r"within an epoch \(24 of 46 samples are done\)"):
        plan_steps(46, 3, max_epochs=3, steps_done=6, samples_done=24, short_window="carry")


# ------------------------------------------------------------------------------------------------- names of arguments


@pytest.mark.parametrize("short_window", ["drop", "spread"])
def test_a_wrong_short_window_is_named(short_window):
    said = f'short_window must be "step", "carry" or "zero", got {short_window!r}'
    for plan in partial(plan_steps, max_epochs=1), partial(max_steps_for, 1):
        with pytest.raises(ValueError, match=re.escape(said)):
            plan(num_samples=12, batch_size=4, short_window=short_window)


def test_a_plan_needs_no_torch():
    code = "import sys; from course_lib.steps import plan_steps; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


# ----------------------------------------------------------------------------------------------- plans of samplers


SAMPLERS = {
    "shuffled": lambda n, size, tail, **at: ShuffledBatchSampler(n, size, tail=tail, **at),
    "two streams": lambda n, size, tail, **at: TwoStreamBatchSampler(
        range(n), range(n, n + 9), size, 2, tail=tail, **at
    ),
    "sharded": lambda n, size, tail, **at: ShardedBatchSampler(BatchSampler(range(n), size, False), tail=tail, **at),
    "of a list": lambda n, size, tail, **at: ShardedBatchSampler([list(range(n)), [0], [1, 2]], tail=tail, **at),
    "uneven": lambda n, size, tail, **at: ShardedBatchSampler(UnevenBatches(n), tail=tail, **at),
    "scheduled": lambda n, size, tail, **at: ScheduledBatchSampler(
        n, SizeSchedule({0: (8, size + 1), 2: (16, size)}), tail=tail, **at
    ),
}  # fmt: skip
dealings = {
    "n": st.integers(1, 60),
    "size": st.integers(1, 9),
    "tail": st.sampled_from(["spread", "drop", "pad"]),
    "world_size": st.integers(1, 5),
}
runs = {
    "k": st.integers(1, 5) | st.dictionaries(st.integers(1, 5), st.integers(1, 9), min_size=1, max_size=2),
    "max_epochs": st.sampled_from([-1, 0, 1, 2, 4]),
    "max_steps": st.sampled_from([-1, 0, 1, 3, 8, 13]),
    "limit": st.sampled_from([1.0, 1.0, 0.7, 0.0, 0, 1, 2, 7]),
    "short_window": st.sampled_from(["step", "carry", "zero"]),
}  # fmt: skip


def dealt(make, world_size, epoch):
    """What the ranks get in an epoch: a list of batches each."""
    ranks = []
    for rank in range(world_size):
        sampler = make(num_replicas=world_size, rank=rank)
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
    return ranks


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("kind", SAMPLERS)
@given(dealing=st.fixed_dictionaries(dealings), run=st.fixed_dictionaries(runs))
def test_the_plan_of_a_sampler_equals_its_own_dealing(kind, dealing, run):
    world_size = dealing.pop("world_size")
    make = partial(SAMPLERS[kind], **dealing)
    if kind == "scheduled":
        run |= {"k": 1, "short_window": "step"}
    if run["max_epochs"] == -1:
        run["max_epochs"] = 4 if run["max_steps"] == -1 or run["short_window"] != "step" else -1

    def largest(epoch):
        return [range(max(map(len, step))) for step in zip(*dealt(make, world_size, epoch), strict=True)]

    def plan(sampler):
        arguments = {name: run[name] for name in ("max_epochs", "max_steps", "short_window")}
        windows = {"accumulate_grad_batches": run["k"], "limit_train_batches": run["limit"]}
        return plan_steps(sampler, world_size=world_size, **arguments, **windows)

    try:
        found = plan(make())
    except ValueError:  # tail="spread" without an index for some rank
        with pytest.raises(ValueError, match='use tail="drop"'):
            [dealt(make, world_size, epoch) for epoch in range(20)]
        return
    try:
        of_rank = make(num_replicas=world_size, rank=0)
    except ValueError as error:  # it looks at all epochs, and the plan at those that the run has
        if 'use tail="drop"' not in str(error):
            raise
        return
    counted = simulate_loop(largest, **run)
    assert list(found.windows) == counted.windows
    assert (found.total_steps, found.epochs_completed) == (len(counted.windows), counted.epochs_completed)
    assert (found.micro_batches, found.micro_batches_unused) == (counted.micro_batches, counted.unused)
    assert found.explain()
    assert plan(of_rank) == found


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "of a list"])
@given(dealing=st.fixed_dictionaries(dealings))
def test_what_a_sampler_drops_and_repeats_is_planned(kind, dealing):
    world_size = dealing.pop("world_size")
    make = partial(SAMPLERS[kind], **dealing)
    try:
        ranks = dealt(make, world_size, 0)
    except ValueError:
        return
    indices = [index for rank in ranks for batch in rank for index in batch if index < dealing["n"]]
    plan = plan_steps(make(), world_size=world_size, max_epochs=1)
    assert plan.samples_dropped == dealing["n"] - len(set(indices))
    assert plan.samples_repeated == len(indices) - len(set(indices))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["shuffled", "two streams", "sharded", "uneven"])
@given(
    dealing=st.fixed_dictionaries(dealings), epoch=st.integers(0, 2), stop=st.integers(0, 30), after=st.integers(1, 5)
)
def test_the_plan_of_what_is_left_equals_what_a_restored_sampler_deals(kind, dealing, epoch, stop, after):
    world_size = dealing.pop("world_size")
    make = partial(SAMPLERS[kind], **dealing)
    try:
        sampler = make(num_replicas=world_size, rank=0)
        sampler.set_epoch(epoch)
        state = sampler.state_dict(batches=stop % (len(sampler) + 1))
        rest = [make(num_replicas=after, rank=rank) for rank in range(after)]
        for restored in rest:
            restored.load_state_dict(state)
        left = len(list(zip(*rest, strict=True)))
        later = [dealt(make, after, number) for number in range(state["epoch"] + 1, 4)]
    except ValueError:
        return
    done = dict(steps_done=3, samples_done=state["epoch"] * dealing["n"] + state["position"])
    plan = plan_steps(make(), world_size=after, max_epochs=4, **done)
    epochs = [left, *(len(ranks[0]) for ranks in later)]
    ran = next((number for number, batches in enumerate(epochs) if not batches), len(epochs))
    assert plan.total_steps == 3 + sum(epochs[:ran])
    shares = [plan.progress(step) for step in range(plan.total_steps + 1)]
    assert shares == sorted(shares) and shares[-1] == 1


def test_a_samplers_own_tail_is_planned():
    # 39 samples on 5 ranks in batches of 4: DistributedSampler deals first, and each rank drops; here a step is 20.
    assert plan_steps(39, 4, world_size=5, drop_last=True, max_epochs=1).total_steps == 2
    plan = plan_steps(ShuffledBatchSampler(39, 4, tail="drop"), world_size=5, max_epochs=1)
    assert (plan.total_steps, plan.samples_dropped) == (1, 19)
    assert max_steps_for(3, ShuffledBatchSampler(39, 4, tail="drop"), world_size=5) == 3
    assert "39 samples in batches of at most 4 make 1 batch per epoch on each of 5 ranks" in plan.explain()


@pytest.mark.thorough
def test_the_plan_of_a_sampler_equals_a_real_trainer_on_two_ranks():
    shapes = [(kind, tail) for kind in SAMPLERS for tail in ("spread", "drop", "pad")]

    def fit_all(rank):
        counted = []
        for kind, tail in shapes:
            model = CountingModule()
            loader = DataLoader(SizedDataset(range(100), first) if kind == "scheduled" else range(100),
                                batch_sampler=SAMPLERS[kind](37, 3, tail))  # fmt: skip
            quiet_trainer(max_epochs=3, accumulate_grad_batches=windows(kind), devices=2, strategy="ddp").fit(
                model, loader
            )
            counted.append(model.samples_per_step)
        return counted

    ranks = [result.value for result in run_ranks(fit_all, 2, timeout=120)]
    for (kind, tail), *counted in zip(shapes, *ranks, strict=True):
        sampler = SAMPLERS[kind](37, 3, tail)
        windows_of = {"world_size": 2, "accumulate_grad_batches": windows(kind)}
        # A Trainer asks for the number of batches in the first epoch, and cuts those that have more.
        limit = plan_steps(sampler, max_epochs=1, **windows_of).batches_per_epoch
        plan = plan_steps(sampler, max_epochs=3, limit_train_batches=limit, **windows_of)
        assert [len(samples) for samples in counted] == [plan.total_steps] * 2, (kind, tail)
        for window, *samples in zip(plan.windows, *counted, strict=True):
            assert max(samples) <= window.per_rank_samples
            if tail != "spread" and "shard" not in kind and kind not in ("of a list", "uneven"):
                assert samples == [window.per_rank_samples] * 2, (kind, tail)


def windows(kind):
    return 1 if kind == "scheduled" else 2


def first(sample, size):
    return sample


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": 4}, "ShuffledBatchSampler says itself how it deals: leave batch_size and drop_last out, got 4"),
        ({"drop_last": True}, "leave batch_size and drop_last out, got None and True"),
        (
            {"world_size": 3},
            "this ShuffledBatchSampler deals to num_replicas=2 ranks wherever it runs, which cannot be",
        ),
        ({"world_size": 0}, "world_size must be a positive int, got 0"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be a positive int, got 0"),
        ({"max_epochs": None}, "nothing ends this run"),
        ({"samples_done": 3, "short_window": "carry"}, "within an epoch (3 of 12 samples are done)"),
    ],
)
def test_what_cannot_be_planned_of_a_sampler_is_named(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan_steps(ShuffledBatchSampler(12, 4, num_replicas=2, rank=0), **{"max_epochs": 1} | arguments)


def test_a_sampler_without_a_step_is_never_done():
    for sampler in ShardedBatchSampler(UnevenBatches(3)), ShuffledBatchSampler(3, 1):
        with pytest.raises(ValueError, match="max_steps=5 is never reached"):
            plan_steps(sampler, accumulate_grad_batches=9, short_window="carry", max_steps=5)
    with pytest.raises(ValueError, match="a schedule of sizes says its windows itself"):
        plan_steps(SAMPLERS["scheduled"](9, 2, "drop"), max_epochs=9, accumulate_grad_batches=2)


def test_planning_leaves_a_sampler_where_it_stands():
    for kind in SAMPLERS:
        sampler = SAMPLERS[kind](37, 3, "pad", num_replicas=2, rank=1)
        sampler.set_epoch(2)
        iterator = iter(sampler)
        before = [next(iterator) for _ in range(2)]
        state = sampler.state_dict()
        plan_steps(sampler, max_epochs=5)
        assert sampler.state_dict() == state and sampler.epoch == 2
        assert [*before, *iterator] == dealt(partial(SAMPLERS[kind], 37, 3, "pad"), 2, 2)[1] == list(sampler)


def test_plans_of_huge_datasets_are_exact_and_epochs_outside_of_a_plan_run_nothing():
    assert plan_steps(2**53 + 1, 1, max_epochs=1).total_steps == 2**53 + 1
    later = plan_steps(100, 10, max_epochs=5, steps_done=25, samples_done=250)
    assert [later.batches_in_epoch(epoch) for epoch in range(6)][3:] == [10, 10, 0] and later.batches_in_epoch(1) == 0
    over = plan_steps(100, 10, max_epochs=2, steps_done=20, samples_done=200)
    assert over.batches_in_epoch(2) == 0
