"""Batches that follow a schedule: against steps counted by hand, the conformance kit, and two real ranks."""

import json
import math
import pickle
import random
import sys
from collections import Counter
from itertools import accumulate, chain, islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Subset

from course_lib.conformance import assert_batch_sampler
from course_lib.launch import run_ranks
from course_lib.resume import ResumableDataLoader
from course_lib.samplers import ShuffledBatchSampler
from course_lib.schedules import ScheduledBatchSampler, SizedDataset, SizeSchedule
from course_lib.schedules.sized import SizedIndex
from tests.trainer_oracle import CountingModule, quiet_trainer

STEPWISE = SizeSchedule({0: (16, 16), 16: (32, 8), 32: (64, 4)}, unit="samples")


def random_schedule(rng, n, *world_sizes, smallest=1):
    unit = rng.choice(["epochs", "optimizer_steps", "samples"])
    latest = {"epochs": 3, "optimizer_steps": 25, "samples": 3 * n + 3}[unit]
    starts = [0, *sorted(rng.sample(range(1, latest), rng.randint(0, 2)))]
    effective = rng.choice([None, None, 6 * math.lcm(*world_sizes)])
    batch_sizes = range(smallest, 4 if effective else 9)
    return SizeSchedule(
        [(start, 2**i if rng.random() < 0.5 else (2**i, 3), rng.choice(batch_sizes)) for i, start in enumerate(starts)],
        unit=unit,
        effective_batch_size=effective,
        accumulate_grad_batches=1 if effective else rng.choice([1, 1, 2, 3]),
    )


def by_hand(n, schedule, world_size, tail="spread", epochs=3):
    """Of each epoch, the steps one after the other: size, indices over all ranks, and the update that each is for."""
    updates = 0
    for epoch in range(epochs):
        steps, position = [], 0
        while position < n:
            time = {"epochs": epoch, "optimizer_steps": updates, "samples": epoch * n + position}[schedule.unit]
            stage = [stage for stage in schedule.stages if stage.start <= time][-1]
            full = stage.batch_size * world_size
            window = schedule.micro_batches
            if schedule.effective_batch_size:
                window = schedule.effective_batch_size // full
            before = len(steps)
            for _ in range(window):
                left = n - position
                total = full
                if tail == "drop" and left < full:
                    position = n
                elif tail == "spread" and left <= full:
                    total = left
                elif tail == "spread" and left % world_size and stage.batch_size > 1:
                    total = full - world_size + left % world_size
                if position >= n:
                    break
                steps.append((stage.size, total, updates))
                position += total
            updates += len(steps) > before
        yield steps


def ranks_of(n, schedule, world_size, epoch=0, **arguments):
    samplers = [
        ScheduledBatchSampler(n, schedule, num_replicas=world_size, rank=rank, **arguments)
        for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


# ------------------------------------------------------------------------------------------------- the sampler


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_sample_once_and_one_size_a_step_as_counted_by_hand(world_size):
    # 100 schedules a world size, 3 epochs of each: 800 schedules.
    rng = random.Random(f"schedules {world_size}")
    judged = 0
    while judged < 100:
        n = rng.randint(world_size, 120)
        schedule = random_schedule(rng, n, world_size)
        try:
            epochs = [
                [list(sampler) for sampler in ranks_of(n, schedule, world_size, epoch, seed=judged)]
                for epoch in range(3)
            ]
        except ValueError as error:
            if "without an empty batch" not in str(error):
                raise
            continue
        judged += 1
        for ranks, steps in zip(epochs, by_hand(n, schedule, world_size), strict=True):
            assert Counter(index for batches in ranks for batch in batches for index in batch) == Counter(range(n))
            assert {len(batches) for batches in ranks} == {len(steps)}
            for of_ranks, (size, total, _) in zip(zip(*ranks, strict=True), steps, strict=True):
                assert {index.size for batch in of_ranks for index in batch} == {size}
                sizes = [len(batch) for batch in of_ranks]
                assert sum(sizes) == total and max(sizes) - min(sizes) <= 1 and min(sizes) > 0


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_the_other_tails_have_full_batches_alone(tail):
    rng = random.Random(f"tails {tail}")
    for _ in range(100):
        n, world_size = rng.randint(1, 90), rng.randint(1, 5)
        schedule = random_schedule(rng, n, world_size)
        for epoch, steps in enumerate(by_hand(n, schedule, world_size, tail)):
            ranks = [list(sampler) for sampler in ranks_of(n, schedule, world_size, epoch, tail=tail)]
            for batches in ranks:
                got = [(batch[0].size, len(batch) * world_size) for batch in batches]
                assert got == [(size, total) for size, total, _ in steps]
            seen = Counter(index for batches in ranks for batch in batches for index in batch)
            drawn = sum(total for _, total, _ in steps)
            assert seen.total() == drawn and max(seen.values(), default=0) <= -(-drawn // n)
            if tail == "pad":
                assert set(seen) == set(range(n))


@pytest.mark.thorough
def test_the_conformance_kit_finds_nothing():
    schedules = [
        SizeSchedule({0: (8, 4), 1: (16, 1)}),
        SizeSchedule({0: (8, 5), 4: (16, 2), 7: ((32, 48), 3)}, unit="optimizer_steps"),
        SizeSchedule({0: (8, 5), 11: (16, 2), 37: (32, 3)}, unit="samples", accumulate_grad_batches=3),
    ]

    def make(num_replicas, rank, n, schedule, seed=0):
        return ScheduledBatchSampler(n, schedule, seed=seed, num_replicas=num_replicas, rank=rank)

    shapes = [dict(n=n, schedule=schedule) for n in (3, 20, 31) for schedule in schedules]
    assert_batch_sampler(make, lambda shape: range(shape["n"]), shapes=shapes, world_sizes=(1, 2, 3, 8))


def test_the_order_is_that_of_a_shuffled_batch_sampler():
    plain = ShuffledBatchSampler(48, 16, seed=3)
    scheduled = ScheduledBatchSampler(48, STEPWISE, seed=3)
    for sampler in (plain, scheduled):
        sampler.set_epoch(2)
    assert [i for batch in scheduled for i in batch] == [i for batch in plain for i in batch]
    assert [len(batch) for batch in ScheduledBatchSampler(48, STEPWISE)] == [16, 8, 8, 4, 4, 4, 4]
    assert next(iter(ScheduledBatchSampler(48, STEPWISE, shuffle=False))) == list(range(16))


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_a_resume_has_the_rest_of_the_epoch_and_the_epochs_behind_it(rng):
    n, before, after = rng.randint(4, 60), rng.randint(1, 4), rng.randint(1, 4)
    schedule, epoch = random_schedule(rng, n, before, after, smallest=2), rng.randint(0, 2)
    try:
        samplers = ranks_of(n, schedule, before, epoch)
        whole = [list(sampler) for sampler in samplers]
        stop = rng.randint(0, len(whole[0]) - 1)
        states = [json.loads(json.dumps(sampler.state_dict(batches=stop))) for sampler in samplers]
        assert all(state == states[0] for state in states)
        resumed = [ScheduledBatchSampler(n, schedule, num_replicas=after, rank=rank) for rank in range(after)]
        for sampler in resumed:
            sampler.load_state_dict(states[0])
        rest = [list(sampler) for sampler in resumed]
    except ValueError as error:
        if "without an empty batch" not in str(error):
            raise
        return
    seen = [batches[:stop] for batches in whole] + rest
    assert Counter(index for batches in seen for batch in batches for index in batch) == Counter(range(n))
    assert len({tuple((batch[0].size, len(resumed)) for batch in batches) for batches in rest}) == 1
    if before == after:
        for rank in range(before):
            assert sized(rest[rank]) == sized(whole[rank][stop:])
            ends = [end for end in accumulate(samplers[rank].window_sizes()) if end > stop]
            assert [stop + end for end in accumulate(resumed[rank].window_sizes())] == ends
            for later in (epoch + 1, epoch + 2):
                resumed[rank].set_epoch(later)
                samplers[rank].set_epoch(later)
                assert sized(resumed[rank]) == sized(samplers[rank])


def sized(batches):
    return [[(int(index), index.size) for index in batch] for batch in batches]


def test_a_run_that_goes_on_with_more_ranks_keeps_its_count_of_updates():
    schedule = SizeSchedule({0: (8, 4), 10: (16, 2)}, unit="optimizer_steps")
    alone = ScheduledBatchSampler(32, schedule)  # 8 updates an epoch
    resumed = ScheduledBatchSampler(32, schedule, num_replicas=2, rank=0)
    resumed.load_state_dict(alone.state_dict(batches=6))
    assert [batch[0].size for batch in resumed] == [8]  # update 7, of the 8 samples that are left
    resumed.set_epoch(1)
    assert [batch[0].size for batch in resumed] == [8, 8, 8, 16, 16]
    assert resumed.state_dict(batches=2)["optimizer_steps"] == 9
    resumed.set_epoch(0)  # another run's epoch: counted from its start
    assert len(resumed) == 4


def test_a_state_that_was_not_moved_is_handed_on_as_it_was():
    schedule = SizeSchedule({0: (8, 1)}, accumulate_grad_batches=4)
    alone = ScheduledBatchSampler(16, schedule)
    state = alone.state_dict(batches=3)
    elsewhere = ScheduledBatchSampler(16, schedule, num_replicas=4, rank=0)
    elsewhere.load_state_dict(state)
    assert elsewhere.state_dict(batches=0) == state
    back = ScheduledBatchSampler(16, schedule)
    back.load_state_dict(elsewhere.state_dict(batches=0))
    assert back.window_sizes() == [1, 4, 4, 4]


def test_windows_after_a_resume_on_other_ranks_are_those_that_a_trainer_counts():
    schedule = SizeSchedule({0: (8, 4), 3: (16, 2)}, unit="samples", accumulate_grad_batches=2)
    state = ScheduledBatchSampler(32, schedule).state_dict(batches=1)
    resumed = ScheduledBatchSampler(32, schedule, num_replicas=2, rank=0)
    resumed.load_state_dict(state)
    assert 0 not in resumed.window_sizes() and sum(resumed.window_sizes()) == len(resumed)
    assert resumed.window_sizes()[0] == 1  # the second batch of a window of two


def test_going_back_beyond_what_was_restored_is_another_run():
    schedule = SizeSchedule({0: (8, 4), 10: (16, 2)}, unit="optimizer_steps")
    sampler = ScheduledBatchSampler(32, schedule)
    sampler.load_state_dict(ScheduledBatchSampler(32, schedule).state_dict() | {"epoch": 5, "optimizer_steps": 99})
    assert next(iter(sampler))[0].size == 16
    sampler.set_epoch(0)
    assert [batch[0].size for batch in sampler] == [8] * 8
    sampler.set_epoch(1)
    assert [batch[0].size for batch in sampler] == [8] * 2 + [16] * 12


def test_an_iterator_goes_on_with_its_epoch_whatever_becomes_of_the_sampler():
    sampler = ScheduledBatchSampler(48, STEPWISE)
    sampler.load_state_dict(sampler.state_dict(batches=3))
    want = sized(sampler)
    begun = iter(sampler)
    first = [next(begun)]
    sampler.set_epoch(1)
    iter(sampler)  # another iteration, as for a look at the next epoch
    assert sized(chain(first, begun)) == want


@pytest.mark.parametrize("lacking", ["epoch", "position", "steps", "optimizer_steps", "window_batches"])
def test_a_state_that_lacks_something_is_refused_and_changes_nothing(lacking):
    sampler = ScheduledBatchSampler(48, STEPWISE)
    state = sampler.state_dict(batches=3)
    want = sampler.state_dict(batches=0)
    with pytest.raises(
        ValueError, match=f"it has no '{lacking}'|{lacking} of a state must be an int of at least 0, got None"
    ):
        sampler.load_state_dict({name: value for name, value in state.items() if name != lacking})
    assert sampler.state_dict(batches=0) == want


@pytest.mark.thorough
@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_windows_of_an_own_loop_have_one_size(rng):
    n, world_size = rng.randint(8, 90), rng.randint(1, 3)
    schedule = random_schedule(rng, n, world_size, smallest=2)
    for epoch, steps in enumerate(by_hand(n, schedule, world_size)):
        (sampler, *_) = ranks_of(n, schedule, world_size, epoch)
        batches = iter(sampler)
        windows = [list(islice(batches, k)) for k in sampler.window_sizes()]
        assert next(batches, None) is None
        assert [len(window) for window in windows] == list(Counter(update for *_, update in steps).values())
        assert all(len({batch[0].size for batch in window}) == 1 for window in windows)
        total = sum(sampler.loss_weight(i) for i in range(len(sampler)))
        assert world_size > 1 or total == len(sampler)


def test_a_billion_samples_are_dealt_as_fast_as_ten():
    schedule = SizeSchedule({0: (8, 3), 10**12: (16, 2)}, unit="samples", accumulate_grad_batches=2)
    sampler = ScheduledBatchSampler(10**10, schedule, num_replicas=4, rank=3)
    sampler.set_epoch(250)
    assert len(sampler) == 10**10 // 8
    assert schedule.plan(10**10, world_size=4, max_epochs=10**6).epochs_completed == 10**6
    sampler = ScheduledBatchSampler(10**10, SizeSchedule({0: (8, 3), 10**12: (16, 2)}, unit="optimizer_steps"))
    sampler.set_epoch(250)
    assert next(iter(sampler))[0].size == 8
    sampler.set_epoch(400)
    assert next(iter(sampler))[0].size == 16


def test_a_resume_with_another_schedule_is_refused():
    state = ScheduledBatchSampler(48, STEPWISE).state_dict(batches=2)
    other = SizeSchedule({0: (16, 16), 16: (32, 4)}, unit="samples")
    with pytest.raises(ValueError, match=r"was taken with schedule=.*16: \(32, 8\).*this sampler has .*16: \(32, 4\)"):
        ScheduledBatchSampler(48, other).load_state_dict(state)


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(ValueError, match=r'deal the 5 samples to 2 ranks.*use tail="drop" or tail="pad"$'):
        ScheduledBatchSampler(5, SizeSchedule({0: (8, 1)}), num_replicas=2, rank=0)
    schedule = SizeSchedule({0: (8, 1), 1: (16, 2)}, unit="optimizer_steps")
    assert [len(batch) for batch in ScheduledBatchSampler(5, schedule, num_replicas=2, rank=1)] == [1, 2]
    with pytest.raises(ValueError, match="must be a SizeSchedule, got 16"):
        ScheduledBatchSampler(5, 16)
    with pytest.raises(ValueError, match="batch must be below the 7"):
        ScheduledBatchSampler(48, STEPWISE).loss_weight(7)


def test_accelerate_leaves_the_resumable_loader_alone_and_is_told_no_without_it():
    def read(rank):
        sys.modules["accelerate.state"] = SimpleNamespace(is_initialized=lambda: True)
        for arguments in ({}, dict(num_replicas=2, rank=rank), dict(num_replicas=1, rank=0, tail="pad")):
            for ask in (list, len):
                with pytest.raises(ValueError, match=r"accelerator\.prepare.* has dealt .*ResumableDataLoader"):
                    ask(ScheduledBatchSampler(48, STEPWISE, **arguments))
        loader = ResumableDataLoader(SizedDataset(range(48), half), batch_sampler=ScheduledBatchSampler(48, STEPWISE))
        return [samples.tolist() for samples, _ in loader]

    ranks = [result.value for result in run_ranks(read)]
    assert ranks == [[list(map(int, batch)) for batch in s] for s in ranks_of(48, STEPWISE, 2)]


# ------------------------------------------------------------------------------------------ the index and the dataset


def half(sample, size):
    return sample, size


def test_an_index_with_a_size_is_the_index():
    index = SizedIndex(12, (32, 48))
    copy = pickle.loads(pickle.dumps(index))
    assert index == copy == 12 and copy.size == (32, 48) and repr(copy) == "12@32x48"
    assert f"{index}" == str(index) == "12"
    assert range(20)[index] == 12 and {12: "a"}[index] == "a" and type(index + 1) is int


def test_a_dataset_renders_at_the_size_asked_also_in_workers_that_live_on():
    dataset = SizedDataset(range(100, 148), half)
    assert len(dataset) == 48 and dataset[SizedIndex(3, 16)] == (103, 16)
    schedule = SizeSchedule({0: (16, 16), 1: (32, 8)})
    loader = ResumableDataLoader(
        dataset, batch_sampler=ScheduledBatchSampler(48, schedule), num_workers=1, persistent_workers=True
    )
    for epoch, size in enumerate([16, 32, 32]):
        loader.set_epoch(epoch)
        samples, sizes = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert sorted(samples.tolist()) == list(range(100, 148)) and set(sizes.tolist()) == {size}


def test_an_index_without_a_size_is_an_error():
    dataset = SizedDataset(range(10), half)
    with pytest.raises(ValueError, match=r"index 4 does not say at which size.*Subset"):
        dataset[4]
    with pytest.raises(ValueError, match="outermost"):
        Subset(dataset, [1, 2])[SizedIndex(0, 8)]
    with pytest.raises(ValueError, match="does not say"):
        dataset[torch.tensor(4)]  # which has a .size, of another kind
    assert SizedDataset(Subset(range(10), [5, 6]), half)[SizedIndex(1, 8)] == (6, 8)


# ------------------------------------------------------------------------------------------------- real ranks


def test_on_two_real_ranks_a_plain_loader_under_default_flags_too():
    # 37 samples do not divide by the ranks; the Trainer makes the batch sampler again, as it does by default.
    schedule = SizeSchedule({0: (8, 4), 13: (16, 2)}, unit="samples")

    def read(rank):
        sampler = ScheduledBatchSampler(37, schedule)
        sampler.set_epoch(1)
        bare = sized(sampler)

        class Keeps(CountingModule):
            def training_step(self, batch):
                self.seen.append([tuple(pair) for pair in batch.tolist()])
                return super().training_step(batch[:, 0])

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        dataset = SizedDataset(range(37), lambda sample, size: torch.tensor([sample, size]))
        loader = fabric.setup_dataloaders(DataLoader(dataset, batch_sampler=ScheduledBatchSampler(37, schedule)))
        seen = [[[tuple(pair) for pair in batch.tolist()] for batch in loader]]
        for resumable in (False, True):
            model = Keeps()
            model.seen = []
            of_trainer = ScheduledBatchSampler(37, schedule)
            make = ResumableDataLoader if resumable else DataLoader
            trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=1)
            trainer.fit(model, make(dataset, batch_sampler=of_trainer))
            seen.append(model.seen)
        return bare, seen

    results = [result.value for result in run_ranks(read)]
    expected = [sized(sampler) for sampler in ranks_of(37, schedule, 2, epoch=1)]
    assert [bare for bare, _ in results] == expected
    expected = [sized(sampler) for sampler in ranks_of(37, schedule, 2, epoch=0)]
    for rank, (_, (of_fabric, plain, resumable)) in enumerate(results):
        assert of_fabric == plain == resumable == expected[rank]
