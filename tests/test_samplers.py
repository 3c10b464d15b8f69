"""The samplers by brute force over random shapes: what every rank yields is written down and counted."""

import copy
import pickle
import random
import sys
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric import Fabric
from lightning.fabric.utilities.data import _update_dataloader
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from course_lib.launch import RankError, run_ranks
from course_lib.resume import ResumableDataLoader
from course_lib.samplers import (
    EpochBatchSampler,
    IndexPermutation,
    ShardedBatchSampler,
    ShuffledBatchSampler,
    TwoStreamBatchSampler,
    count_batches_everywhere,
)
from course_lib.schedules import ScheduledBatchSampler, SizeSchedule
from course_lib.steps import plan_steps
from tests import effort
from tests.operations import operations
from tests.trainer_oracle import CountingModule, quiet_trainer
from tests.uneven_batches import UnevenBatches

pytestmark = pytest.mark.filterwarnings("ignore:.*indices are in both streams")


class Case:
    """A random shape of one of the samplers."""

    def __init__(self, rng, kind):
        self.kind = kind
        self.n, self.size, self.world_size = rng.randint(1, 200), rng.randint(1, 12), rng.randint(1, 9)
        self.tail = rng.choice(["spread", "spread", "drop", "pad"])
        self.seed, self.shuffle = rng.randint(0, 5), rng.random() < 0.9
        self.secondary, self.secondary_size = rng.choice([1, 2, 5, 30, 200]), rng.randint(1, 12)

    def __repr__(self):
        return f"Case({vars(self)})"

    def make(self, rank, world_size=None):
        at = dict(seed=self.seed, tail=self.tail, num_replicas=world_size or self.world_size, rank=rank)
        if self.kind == "shuffled":
            return ShuffledBatchSampler(self.n, self.size, shuffle=self.shuffle, **at)
        if self.kind == "two streams":
            streams = range(self.n), range(1000, 1000 + self.secondary)
            return TwoStreamBatchSampler(*streams, self.size, self.secondary_size, shuffle=self.shuffle, **at)
        if self.kind == "uneven":
            return ShardedBatchSampler(UnevenBatches(self.n), **at)
        wrapped = BatchSampler(RandomSampler(range(self.n)), self.size, drop_last=False)
        return ShardedBatchSampler(wrapped, **at)

    def ranks(self, world_size=None, epoch=0, state=None):
        """Every rank's batches of an epoch, or None where the sampler says that it cannot deal them."""
        batches = []
        try:
            for rank in range(world_size or self.world_size):
                sampler = self.make(rank, world_size)
                if state is None:
                    sampler.set_epoch(epoch)
                else:
                    sampler.load_state_dict(state)
                yielded = list(sampler)
                assert len(sampler) == len(yielded), self
                batches.append(yielded)
        except ValueError as error:
            if self.tail != "spread" or 'tail="drop"' not in str(error):
                raise
            return None
        return batches


KINDS = ["shuffled", "two streams", "sharded", "uneven"]
SHAPES = effort.cases(60, 2_000)
"""Of each kind of sampler, for each property."""


def cases(seed, kind):
    rng = random.Random(f"{seed} {kind}")
    for _ in range(SHAPES):
        yield rng, Case(rng, kind)


def primary(batches):
    return [index for batch in batches for index in batch if index < 1000]


@pytest.mark.parametrize("kind", KINDS)
def test_every_index_once_as_many_batches_on_every_rank_none_too_large_none_empty(kind):
    dealt = 0
    for _, case in cases("once", kind):
        ranks = case.ranks()
        if ranks is None:
            continue
        dealt += 1
        assert len({len(batches) for batches in ranks}) == 1, case
        seen = Counter(primary(chain.from_iterable(ranks)))
        if case.tail == "spread":
            assert seen == Counter(range(case.n)), case
        elif case.tail == "drop":
            assert max(seen.values(), default=1) == 1, case
        else:
            assert set(seen) == set(range(case.n)), case
        largest = {"shuffled": case.size, "two streams": case.size + case.secondary_size, "uneven": 5}
        for batches in ranks:
            for batch in batches:
                assert 0 < len(batch) <= largest.get(case.kind, case.size), case
                assert all(type(index) is int for index in batch)
                if case.n >= case.size and case.kind != "uneven":
                    in_batch = [index for index in batch if index < 1000]
                    assert len(set(in_batch)) == len(in_batch), case
        if case.kind in ("shuffled", "two streams"):
            sizes = {len(primary([batch])) for batches in ranks for batch in batches}
            assert not sizes or max(sizes) - min(sizes) <= (case.tail == "spread"), case
    assert dealt > SHAPES / 2


def test_the_secondary_is_used_equally_often_and_never_twice_in_a_batch():
    for _, case in cases("secondary", "two streams"):
        ranks = case.ranks()
        uses = Counter()
        # In the order in which the steps are made, so that every moment of the epoch is judged.
        for step in zip(*ranks, strict=True):
            for batch in step:
                secondary = [index for index in batch if index >= 1000]
                assert len(secondary) == case.secondary_size, case
                if case.secondary >= case.secondary_size:
                    assert len(set(secondary)) == len(secondary), case
                uses.update(secondary)
                counts = [uses[index] for index in range(1000, 1000 + case.secondary)]
                if case.secondary >= case.secondary_size or case.secondary == 1:
                    assert max(counts) - min(counts) <= 1, case


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("kind", KINDS)
def test_order_is_a_function_of_seed_and_epoch(kind):
    for rng, case in cases("order", kind):
        first = case.ranks(epoch=2)
        torch.manual_seed(rng.random())
        np.random.seed(rng.randint(0, 999))  # noqa: NPY002
        random.seed(rng.random())
        assert case.ranks(epoch=2) == first, case
        if first is None:
            continue
        sampler = case.make(0)
        for epoch in (0, 5, 2):
            sampler.sampler.set_epoch(epoch)
            try:
                len(sampler)
            except ValueError:
                assert kind == "uneven" and epoch != 2  # dealable in one epoch, it may not be in another
                continue
            a, b = iter(sampler), iter(sampler)
            interleaved = list(zip(a, b, strict=True))
            assert all(x == y for x, y in interleaved)
        assert list(sampler) == first[0] == list(pickle.loads(pickle.dumps(sampler)))
        if case.n > 20 and case.shuffle and primary(first[0]):
            assert case.ranks(epoch=3) != first, case
            case.seed += 1
            assert case.ranks(epoch=1) != first, case


def flat(ranks):
    return [index for step in zip(*ranks, strict=True) for batch in step for index in batch if index < 1000]


@pytest.mark.parametrize("kind", ["shuffled", "two streams"])
def test_the_order_of_the_epoch_does_not_depend_on_the_number_of_ranks(kind):
    for _, case in cases("world", kind):
        if case.tail == "spread":
            orders = [flat(ranks) for w in (1, 2, 5) if (ranks := case.ranks(world_size=w)) is not None]
            assert all(order == orders[0] for order in orders), case


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("kind", KINDS)
def test_resume_on_any_number_of_ranks_loses_and_repeats_nothing(kind):
    resumed = 0
    for rng, case in cases("resume", kind):
        epoch = rng.randint(0, 3)
        whole = case.ranks(epoch=epoch)
        if not whole or not whole[0]:
            continue
        stop = rng.randint(0, len(whole[0]))
        states = []
        for rank in range(case.world_size):
            sampler = case.make(rank)
            sampler.set_epoch(epoch)
            iterator = iter(sampler)
            ahead = [next(iterator) for _ in range(rng.randint(stop, len(whole[0])))]
            assert sampler.state_dict(batches=stop) == sampler.state_dict(batches=stop)
            assert ahead[:stop] == whole[rank][:stop]
            states.append(pickle.loads(pickle.dumps(sampler.state_dict(batches=stop))))
        assert all(state == states[0] for state in states), case

        same = case.ranks(state=states[0])
        if stop == len(whole[0]):
            assert states[0]["epoch"] == epoch + 1
            assert same == case.ranks(epoch=epoch + 1), case
            continue
        assert same == [batches[stop:] for batches in whole], (case, stop)
        other = case.ranks(world_size=rng.randint(1, 9), state=states[0])
        if other is None:
            continue
        resumed += 1
        before = primary(batch for batches in whole for batch in batches[:stop])
        seen = Counter(before + primary(chain.from_iterable(other)))
        if case.tail == "spread":
            assert seen == Counter(range(case.n)), (case, stop)
        elif case.tail == "drop":
            assert max(seen.values(), default=1) == 1, (case, stop)
        else:
            assert set(seen) == set(range(case.n)), (case, stop)
    assert resumed > SHAPES / 4


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_resume_on_as_many_ranks_goes_on_with_the_first(kind):
    for rng, case in cases("twice", kind):
        whole = case.ranks()
        if not whole or len(whole[0]) < 3:
            continue
        first, then = sorted(rng.sample(range(1, len(whole[0])), 2))
        state = case.make(0)
        state = state.state_dict(batches=first)
        middle = case.make(0)
        middle.load_state_dict(state)
        again = middle.state_dict(batches=then - first)
        assert case.ranks(state=again) == [batches[then:] for batches in whole], case


def test_set_epoch_keeps_a_restored_position_in_its_epoch_and_cancels_it_in_another():
    sampler = ShuffledBatchSampler(20, 3, num_replicas=2, rank=1)
    sampler.set_epoch(4)
    whole = list(sampler)
    state = sampler.state_dict(batches=2)
    resumed = ShuffledBatchSampler(20, 3, num_replicas=2, rank=1)
    resumed.load_state_dict(state)
    resumed.set_epoch(4)
    assert list(resumed) == whole[2:] and resumed.steps_before == 2 and len(resumed) == len(whole) - 2
    resumed.set_epoch(5)
    assert len(resumed) == len(whole) and resumed.steps_before == 0


def test_state_follows_the_batches_that_were_yielded():
    sampler = ShuffledBatchSampler(20, 3)
    iterator = iter(sampler)
    for count in range(1, 8):
        next(iterator)
        assert sampler.state_dict() == sampler.state_dict(batches=count)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("tail", ["spread", "drop", "pad"])
@given(n=st.integers(1, 60), size=st.integers(1, 7), world_size=st.integers(1, 5))
def test_loss_weights_make_the_average_over_ranks_the_mean_over_samples(tail, n, size, world_size):
    values = np.random.default_rng(n).normal(size=n)
    for make in (
        lambda rank: ShuffledBatchSampler(n, size, tail=tail, num_replicas=world_size, rank=rank),
        lambda rank: TwoStreamBatchSampler(
            range(n), [1000, 1001], size, 1, tail=tail, num_replicas=world_size, rank=rank
        ),
    ):
        try:
            samplers = [make(rank) for rank in range(world_size)]
        except ValueError:
            continue
        for number, step in enumerate(zip(*samplers, strict=True)):
            indices = [[i for i in batch if i < 1000] for batch in step]
            means = [
                values[part].mean() * s.loss_weight(number) if part else 0.0
                for part, s in zip(indices, samplers, strict=True)
            ]
            assert np.mean(means) == pytest.approx(values[[*chain.from_iterable(indices)]].mean())


@given(st.integers(1, 3000), st.integers(0, 10**6), st.booleans())
def test_index_permutation_is_a_bijection(n, seed, by_rounds):
    permutation = IndexPermutation(n, seed)
    if by_rounds:
        permutation._table = None
    assert sorted(permutation) == list(range(n))
    assert permutation[n - 1] == permutation[-1] == list(permutation)[-1]
    with pytest.raises(IndexError):
        permutation[n]


@pytest.mark.parametrize("n", [2**16 + 1, 10**6, 2**32 + 5, 10**12, 2**62])
def test_large_permutations_stay_in_range_and_do_not_collide(n):
    permutation = IndexPermutation(n, 7)
    positions = np.unique(
        np.concatenate([np.arange(20_000), n - 1 - np.arange(20_000), np.linspace(0, n - 1, 20_000).astype(np.int64)])
    )
    positions = positions[(positions >= 0) & (positions < n)]
    indices = permutation(positions)
    assert indices.min() >= 0 and indices.max() < n
    assert len(np.unique(indices)) == len(positions)


def test_large_permutations_look_random():
    # Against what independent uniform draws give: the bounds are five standard deviations.
    n, count = 10**6, 40_000
    orders = np.array([IndexPermutation(n, seed)(np.arange(count)) for seed in range(20)])
    buckets = np.array([np.bincount(order * 100 // n, minlength=100) for order in orders])
    chi = ((buckets - count / 100) ** 2 / (count / 100)).sum(axis=1)
    assert abs(chi.mean() - 99) < 5 * np.sqrt(2 * 99 / 20)
    for lag in (1, 2, 64, 1024):
        correlations = [np.corrcoef(order[:-lag], order[lag:])[0, 1] for order in orders]
        assert np.abs(correlations).max() < 5 / np.sqrt(count)
    assert np.abs(np.corrcoef(orders)[np.triu_indices(20, 1)]).max() < 5 / np.sqrt(count)
    steps = np.diff(orders, axis=1) > 0
    assert abs(steps.mean() - 0.5) < 5 * np.sqrt(1 / 12 / (20 * count))


def test_a_trillion_samples_are_a_matter_of_arithmetic():
    sampler = ShuffledBatchSampler(10**12, 64, num_replicas=8, rank=3)
    assert len(next(iter(sampler))) == 64
    last = len(sampler) - 1
    state = sampler.state_dict(batches=last)
    end = ShuffledBatchSampler(10**12, 64, num_replicas=8, rank=3)
    end.load_state_dict(state)
    assert len(list(end)) == 1


def indices_of(samplers):
    return [index for sampler in samplers for batch in sampler for index in batch]


def test_torchs_own_sharding_is_the_peer_where_nothing_has_to_be_padded():
    ours = [ShuffledBatchSampler(24, 4, shuffle=False, num_replicas=2, rank=rank) for rank in range(2)]
    theirs = [BatchSampler(DistributedSampler(range(24), 2, rank, shuffle=False), 4, False) for rank in range(2)]
    assert sorted(indices_of(ours)) == sorted(indices_of(theirs)) == list(range(24))
    assert [len(s) for s in ours] == [len(s) for s in theirs]


def test_a_wrapped_sampler_with_generators_of_its_own_yields_the_same_on_all_ranks():
    def make(rank):
        generator = torch.Generator().manual_seed(rank)
        wrapped = BatchSampler(RandomSampler(range(21), generator=generator), 4, drop_last=False)
        return ShardedBatchSampler(wrapped, num_replicas=2, rank=rank)

    samplers = [make(rank) for rank in range(2)]
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        assert sorted(indices_of(samplers)) == list(range(21))


class DrawsFrom:
    """A batch sampler of somebody else, and where its generator comes from."""

    def __init__(self, make, *, holds="", keeps=False):
        self.make, self.keeps = make, keeps
        if holds:
            setattr(self, holds, make())

    def __iter__(self):
        generator = getattr(self, "generator", None) or self.make()
        if self.keeps:
            self.generator = generator
        order = generator.permutation(21).tolist()
        return (order[i : i + 4] for i in range(0, 21, 4))


def test_what_no_generator_within_reach_decides_is_refused():
    elsewhere = np.random.default_rng(1)
    refused = {
        "made anew": lambda: DrawsFrom(np.random.default_rng),
        "of a closure": lambda: DrawsFrom(lambda: elsewhere),
        "made at first": lambda: DrawsFrom(np.random.default_rng, keeps=True),
        "inside": lambda: BatchSampler(Drawn(DrawsFrom(np.random.default_rng)), 2, False),
    }
    for make in refused.values():
        for look in (list, len, lambda sampler: sampler.state_dict(batches=1)):
            with pytest.raises(ValueError, match="yields other batches when it is read twice from the same seeds"):
                look(ShardedBatchSampler(make(), num_replicas=2, rank=0))
    of_a_number = DrawsFrom(lambda: np.random.default_rng(7))
    held = (DrawsFrom(make, holds="generator") for make in (np.random.default_rng, np.random.RandomState))
    for wrapped in (of_a_number, *held):
        ranks = [ShardedBatchSampler(copy.copy(wrapped), num_replicas=2, rank=rank) for rank in range(2)]
        assert sorted(indices_of(ranks)) == list(range(21))


class Drawn(Sampler):
    """The indices of a batch sampler, one after the other."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return chain.from_iterable(self.batches)


def test_wrapping_leaves_the_global_generators_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    list(ShardedBatchSampler(UnevenBatches(20)))
    assert torch.equal(torch.rand(2), expected)


# ------------------------------------------------------------------------------------------------- a changed epoch


class CountsReads:
    """A batch sampler of somebody else that counts how often it is read; its batches are of one size."""

    reads = 0

    def __init__(self, n, size):
        self.n, self.size = n, size

    def __iter__(self):
        CountsReads.reads += 1
        order = torch.randperm(self.n).tolist()
        return (order[i : i + self.size] for i in range(0, self.n, self.size))


@pytest.fixture
def wrapped(monkeypatch):
    monkeypatch.setattr(CountsReads, "reads", 0)
    return CountsReads(40, 3)


def test_the_wrapped_sampler_is_read_once_for_an_epoch_however_many_states_are_taken(wrapped):
    sampler = ShardedBatchSampler(wrapped, num_replicas=2, rank=1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, _ in enumerate(sampler, start=1):
            assert sampler.state_dict() == sampler.state_dict(batches=number)
            assert number <= len(sampler)
        list(sampler)
        assert wrapped.reads == 2 + epoch  # twice in the first epoch


def test_a_state_costs_no_more_in_a_long_epoch_than_in_a_short_one():
    def of_each_state(n):
        sampler = ShardedBatchSampler(CountsReads(n, 3), num_replicas=2, rank=0)
        batches = iter(sampler)
        counts = []
        for _ in range(5):
            next(batches)
            counts.append(operations(sampler.state_dict))
        return counts

    assert max(of_each_state(30_000)) <= 1.1 * max(of_each_state(60))


def test_a_changed_wrapped_sampler_counts_from_the_next_epoch_on(wrapped):
    sampler = ShardedBatchSampler(wrapped, num_replicas=2, rank=0)

    def fresh(epoch):
        made = ShardedBatchSampler(sampler.batch_sampler, num_replicas=2, rank=0)
        made.set_epoch(epoch)
        return list(made)

    before, state = list(sampler), sampler.state_dict(batches=2)
    wrapped.size = 5
    assert len(sampler) == len(before) and list(sampler) == before
    sampler.set_epoch(0)  # as a trainer says of the first epoch, when it has asked for the length before
    assert len(sampler) == 4 and list(sampler) == fresh(0)
    wrapped.size = 3
    sampler.load_state_dict(state)
    assert list(sampler) == fresh(0)[2:]
    sampler.batch_sampler = BatchSampler(SequentialSampler(range(10)), 2, drop_last=False)
    sampler.set_epoch(1)
    assert list(sampler) == [[0, 1], [4, 5], [8]]
    sampler.batch_sampler = [[7], [8]]
    sampler.set_epoch(2)
    assert list(sampler) == [[7]]
    sampler.batch_sampler += [[9], [3]]
    assert len(sampler) == 1
    sampler.set_epoch(3)
    assert list(sampler) == [[7], [9]]


def test_ranks_that_come_later_get_a_plan_of_their_own(wrapped):
    sampler = ShardedBatchSampler(wrapped, num_replicas=1, rank=0)
    alone = list(sampler)
    sampler.num_replicas = 2
    assert list(sampler) == list(ShardedBatchSampler(wrapped, num_replicas=2, rank=0)) != alone


# ------------------------------------------------------------------------------------------------- with accelerate


class AcceleratesShard:
    """What ``BatchSamplerShard`` of accelerate 1.15 yields with ``even_batches=True``, from batches of one size.

    accelerate itself is no dependency of the tests.
    """

    def __init__(self, batch_sampler, rank, world_size=2):
        self.batch_sampler, self.rank, self.world_size = batch_sampler, rank, world_size
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __iter__(self):
        batches = list(self.batch_sampler)
        assert self.batch_size is None or {len(batch) for batch in batches} == {self.batch_size}
        if len(batches) % self.world_size and not self.drop_last:
            batches += batches[: self.world_size - len(batches) % self.world_size]
        steps = len(batches) // self.world_size
        return (batches[step * self.world_size + self.rank] for step in range(steps))


def make_an_accelerator():
    """accelerate's own question whether there is an ``Accelerator`` is answered with yes, in this process."""
    sys.modules["accelerate.state"] = SimpleNamespace(is_initialized=lambda: True)


def two_streams(**arguments):
    return TwoStreamBatchSampler(range(37), range(1000, 1008), 4, 2, **arguments)


def of_two_accelerated_ranks(make):
    """Each rank's batches in the epochs 0 and 1, read through a loader that ``prepare()`` leaves alone."""

    def read(rank):
        make_an_accelerator()
        told = []
        for epoch in range(2):
            sampler = make(rank)
            sampler.sampler.set_epoch(epoch)
            loader = ResumableDataLoader(range(1008), batch_sampler=sampler)
            assert loader._is_accelerate_prepared
            assert len(loader) == len(sampler)
            told.append([batch.tolist() for batch in loader])
        return told

    return list(zip(*(result.value for result in run_ranks(read)), strict=True))


def test_accelerate_leaves_a_resumable_loader_alone_which_deals_each_sample_once():
    def wrapped(rank):
        return ShardedBatchSampler(ShuffledBatchSampler(37, 4, num_replicas=1, rank=0))

    for make in (lambda rank: two_streams(), wrapped):
        for ranks in of_two_accelerated_ranks(make):
            assert Counter(primary(chain.from_iterable(ranks))) == Counter(range(37))
            assert {len(batches) for batches in ranks} == {5}


def test_with_accelerate_nothing_is_dealt_twice_without_a_word():
    refused = {
        "of the group": lambda rank: ShuffledBatchSampler(37, 4),
        "as told": lambda rank: two_streams(tail="pad", num_replicas=2, rank=rank),
        "wrapped": lambda rank: ShardedBatchSampler(UnevenBatches(37)),
        "for one process": lambda rank: ShuffledBatchSampler(37, 4, num_replicas=1, rank=0),
    }

    def read(rank):
        # What would be lost, where there is no Accelerator to see.
        twice = list(AcceleratesShard(ShuffledBatchSampler(37, 4, tail="pad"), rank))
        make_an_accelerator()
        told = {}
        for name, make in refused.items():
            for ask in (list, len):
                with pytest.raises(ValueError, match=r"accelerator\.prepare") as error:
                    ask(make(rank))
                told[name, ask.__name__] = str(error.value)
        return twice, told

    (first, told), (second, _) = (result.value for result in run_ranks(read))
    assert len({index for batch in first + second for index in batch}) < 37 * 0.7
    for message in told.values():
        assert "has dealt them already" in message and "through a course_lib.resume.ResumableDataLoader" in message


def test_one_process_with_an_accelerator_needs_no_word(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(is_initialized=lambda: True))
    sampler = ShuffledBatchSampler(37, 4)
    assert sorted(index for batch in sampler for index in batch) == list(range(37))
    assert len(sampler) == 10


# ------------------------------------------------------------------------------------------------- real ranks


def test_two_real_ranks_read_their_number_from_the_group():
    def batches(rank):
        sampler = TwoStreamBatchSampler(range(13), range(100, 107), 2, 3)
        alone = TwoStreamBatchSampler(range(13), range(100, 107), 2, 3, num_replicas=2, rank=rank)
        return list(sampler), list(alone), sampler.state_dict(batches=2)

    (a, a2, state_a), (b, b2, state_b) = (r.value for r in run_ranks(batches))
    assert (a, b) == (a2, b2)
    assert sorted(primary(a + b))[:13] == list(range(13))
    assert state_a == state_b


def test_unequal_counts_are_an_error_before_they_are_a_hang():
    def count(rank, equal):
        return count_batches_everywhere(range(3 if equal else 3 + rank))

    assert [r.value for r in run_ranks(count, args=(True,))] == [3, 3]
    with pytest.raises(RankError, match="rank 0: 3, rank 1: 4"):
        run_ranks(count, args=(False,))
    assert count_batches_everywhere(range(5)) == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShuffledBatchSampler(0, 2), "num_samples must be a positive int, got 0"),
        (lambda: ShuffledBatchSampler(5, 0), "batch_size must be a positive int, got 0"),
        (lambda: ShuffledBatchSampler(5, 2, tail="keep"), "tail must be"),
        (lambda: ShuffledBatchSampler(5, 2, seed=-1), "seed must be an int of at least 0, got -1"),
        (lambda: ShuffledBatchSampler(5, 2, num_replicas=2, rank=2), "rank must be from 0 to 1"),
        (lambda: list(ShuffledBatchSampler(5, 2, rank=1)), "rank must be from 0 to 0"),
        (lambda: ShuffledBatchSampler(5, 1, num_replicas=2), 'use tail="drop" or tail="pad"'),
        (lambda: ShuffledBatchSampler(5, 2).set_epoch(-1), "epoch must be an int of at least 0, got -1"),
        (lambda: TwoStreamBatchSampler([], [1], 1, 1), "primary_indices must be a sequence of at least one index"),
        (lambda: TwoStreamBatchSampler([1], [], 1, 1), "secondary_indices must be a sequence of at least one index"),
        (lambda: TwoStreamBatchSampler([-1], [2], 1, 1), "primary_indices must hold integers of at least 0"),
        (lambda: TwoStreamBatchSampler([0.5], [2], 1, 1), "primary_indices must hold integers"),
        (lambda: TwoStreamBatchSampler(["a"], [2], 1, 1), r"must hold integers of at least 0, got \['a'\]"),
        (lambda: ShardedBatchSampler(3), "batch_sampler must be iterable"),
        (
            lambda: ShardedBatchSampler(BatchSampler(DistributedSampler(range(9), 2, 0), 2, False)),
            "shards already",
        ),
        (lambda: list(ShardedBatchSampler([[1], []])), "yields an empty batch"),
        (lambda: list(ShardedBatchSampler([[1], [2], [3]], num_replicas=2)), "without an empty batch"),
        (lambda: ShuffledBatchSampler(5, 2).state_dict(batches=9), "batches must be at most the 3"),
        (lambda: ShuffledBatchSampler(5, 2).loss_weight(3), "batch must be below the 3"),
        (lambda: IndexPermutation(2**62 + 1), "n must be at most 2\\*\\*62"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_state_of_another_dataset_or_seed_is_refused():
    state = ShuffledBatchSampler(20, 3).state_dict()
    for other, name in ((ShuffledBatchSampler(21, 3), "num_samples"), (ShuffledBatchSampler(20, 3, seed=1), "seed")):
        with pytest.raises(ValueError, match=f"the state was taken with {name}="):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="this is no state of a TwoStreamBatchSampler"):
        TwoStreamBatchSampler([0], [1], 1, 1).load_state_dict(state)
    far = ShuffledBatchSampler(20, 3)
    far.load_state_dict(state | {"position": 21})
    with pytest.raises(ValueError, match="stands at position 21 of an epoch of 20"):
        list(far)


class Weighted(Sampler):
    """Draws by weights that it keeps, as a curriculum moves them."""

    def __init__(self, weights):
        self.weights = weights

    def __iter__(self):
        order = torch.multinomial(torch.tensor(self.weights), len(self.weights)).tolist()
        return (order[i : i + 2] for i in range(0, len(order), 2))


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (BatchSampler(RandomSampler(range(20)), 2, False), BatchSampler(RandomSampler(range(24)), 2, False)),
        (BatchSampler(SequentialSampler(range(20)), 2, False), BatchSampler(RandomSampler(range(20)), 2, False)),
        (Weighted([1.0] * 9), Weighted([1.0] * 8 + [0.01])),
        ([[0, 1], [2, 3], [4]], [[2, 3], [0, 1], [4]]),
        (BatchSampler(RandomSampler(range(20)), 2, False), BatchSampler(RandomSampler(range(20)), 3, False)),
    ],
)
def test_a_position_in_another_order_of_a_wrapped_sampler_is_refused(then, now):
    before, sampler = (ShardedBatchSampler(one, num_replicas=1, rank=0) for one in (then, now))
    sampler.load_state_dict(before.state_dict(batches=1))
    with pytest.raises(ValueError, match="stands at index 2 of an epoch of other batches"):
        iter(sampler)
    sampler.load_state_dict(before.state_dict(batches=len(before)))
    assert sampler.epoch == 1 and len(list(sampler)) == len(sampler), "it stands at the beginning of an epoch"


@pytest.mark.parametrize("number", [3, np.int64(3)])
def test_single_indices_are_no_batches(number):
    with pytest.raises(ValueError, match=r"must yield batches \(lists of indices\), got the index .*BatchSampler"):
        list(ShardedBatchSampler([number]))


def test_streams_that_overlap_are_said():
    with pytest.warns(UserWarning, match="2 indices are in both streams"):
        TwoStreamBatchSampler([0, 1, 2], [1, 2, 3], 1, 1)


def test_sequential_batches_shard_in_their_order():
    wrapped = BatchSampler(SequentialSampler(range(10)), 2, drop_last=False)
    assert list(ShardedBatchSampler(wrapped, num_replicas=2, rank=0)) == [[0, 1], [4, 5], [8]]
    assert list(ShardedBatchSampler(wrapped, num_replicas=2, rank=1, tail="pad")) == [[2, 3], [6, 7], [0, 1]]


def test_a_step_that_lacks_indices_has_them_from_the_step_before():
    wrapped = [[0, 1, 2], [3, 4, 5], [6]]
    ranks = [ShardedBatchSampler(wrapped, num_replicas=2, rank=rank) for rank in range(2)]
    assert [list(rank) for rank in ranks] == [[[0, 1], [5]], [[2, 3, 4], [6]]]
    assert [rank.loss_weight(0) for rank in ranks] == [2 * 2 / 5, 3 * 2 / 5]
    with pytest.raises(ValueError, match="cannot share 1 indices out to 2 ranks"):
        list(ShardedBatchSampler([[0], [1], [2]], num_replicas=2, rank=0))


def test_a_sampler_that_deals_itself_is_not_dealt_again():
    for inner in (ShuffledBatchSampler(40, 4), TwoStreamBatchSampler(range(40), range(9), 3, 1)):
        with pytest.raises(ValueError, match=f"{type(inner).__name__} deals its batches to the ranks itself"):
            ShardedBatchSampler(inner)
    whole = ShuffledBatchSampler(40, 4, num_replicas=1, rank=0)
    ranks = [list(ShardedBatchSampler(whole, num_replicas=2, rank=rank)) for rank in range(2)]
    assert sorted(chain(*chain(*ranks))) == list(range(40))


def test_an_iterator_which_is_empty_after_one_epoch_is_refused():
    batches = ([index] for index in range(4))
    for sampler in (batches, iter([[0]]), BatchSampler(iter(range(4)), 2, False)):
        with pytest.raises(ValueError, match=r"yields other batches when it is read twice .*give no iterator, which"):
            list(ShardedBatchSampler(sampler))


# ------------------------------------------------------------------------------------------ samplers of a reader's own


class Blocks(EpochBatchSampler):
    """Takes neither ``sampler`` nor keywords, and has an attribute and an order of its own."""

    def __init__(self, blocks, size=2, /):
        super().__init__(tail="drop", seed=3)
        self.blocks, self.size = blocks, size
        self.names = [f"block {number}" for number in range(blocks)]

    def _batches(self, position, batches_before, world_size, rank):
        order = IndexPermutation(self.blocks, (self.seed, 0, self.epoch)) if self.shuffle else range(self.blocks)
        for step in range(self._steps_left(position, world_size)):
            begin = order[self._position_after(position, step, world_size) + rank] * self.size
            yield list(range(begin, begin + self.size))

    def _steps_left(self, position, world_size):
        return (self.blocks - position) // world_size

    def _position_after(self, position, steps, world_size):
        return position + steps * world_size

    def _check(self, position, world_size):
        pass

    def _identity(self):
        return {"blocks": self.blocks, "size": self.size}


class Evens(ShuffledBatchSampler):
    def __init__(self, stop):
        super().__init__(stop // 2, 2, seed=5)

    def _batches(self, *at):
        for batch in super()._batches(*at):
            yield [2 * index for index in batch]


class Weighted(TwoStreamBatchSampler):
    def __init__(self, common, rare=(1, 3, 5), *, share=1, note="", **others):
        super().__init__(common, rare, 3, share, **others)
        self.note = note


class OneOfTheirs(ShardedBatchSampler):
    def __init__(self, wrapped):
        super().__init__(wrapped)


OWN = {
    "own dealing, positional": lambda: Blocks(10, 4),
    "own dealing, a default": lambda: Blocks(10),
    "positional alone": lambda: Evens(40),
    "keywords and defaults": lambda: Weighted(range(20, 40), share=2, note="mine", seed=4),
    "a wrapper": lambda: OneOfTheirs(BatchSampler(range(37), 4, drop_last=False)),
    "a wrapper of what shuffles": lambda: OneOfTheirs(BatchSampler(RandomSampler(range(37)), 4, drop_last=False)),
}


def by_rank(make, epoch):
    """What the ranks of two are dealt, by the sampler alone."""
    found = []
    for rank in range(2):
        sampler = make()
        sampler.num_replicas, sampler.rank = 2, rank
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def trained_batches(sampler, beside=None, **flags):
    """The batches that a Trainer trains on, in two epochs, and the sampler that they came from.

    With a loader ``beside`` it, the Trainer trains on both in turn.
    """

    class Collects(CountingModule):
        def training_step(self, batch):
            trained.append(batch["own"].tolist())
            return super().training_step(batch["own"])

    trained = []
    trainer = quiet_trainer(**dict(max_epochs=2) | flags)
    loaders = {"own": DataLoader(range(100), batch_sampler=sampler)}
    if beside is not None:
        loaders["beside"] = beside
    trainer.fit(Collects(), CombinedLoader(loaders, "min_size"))
    return trained, trainer.train_dataloader["own"].batch_sampler


def made_again_by_lightning(sampler):
    loader = DataLoader(range(100), batch_sampler=sampler)
    return _update_dataloader(loader, DistributedSampler(range(100), 2, 0)).batch_sampler


def test_what_was_set_on_a_sampler_comes_along_when_lightning_makes_it_again():
    sampler = Blocks(10, 4)
    sampler.size, sampler.shuffle = 2, False
    sampler.load_state_dict(sampler.state_dict(batches=3))
    assert list(made_again_by_lightning(sampler)) == list(sampler) == [[i, i + 1] for i in range(6, 20, 2)]


@pytest.mark.thorough
def test_a_readers_own_sampler_is_made_again_by_a_trainer_and_by_fabric_on_two_ranks():
    def fit_all(rank):
        found = {}
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        for name, make in OWN.items():
            trained, made = trained_batches(make(), devices=2, strategy="ddp")
            loader = fabric.setup_dataloaders(DataLoader(range(100), batch_sampler=make()))
            in_fabric = [batch.tolist() for _ in range(2) for batch in loader]
            extra = {name: value for name, value in vars(made).items() if name in ("names", "note")}
            found[name] = trained, in_fabric, extra
        return found

    ranks = [result.value for result in run_ranks(fit_all, 2, timeout=120)]
    for name, make in OWN.items():
        first, second = by_rank(make, 0), by_rank(make, 1)
        for rank in range(2):
            trained, in_fabric, extra = ranks[rank][name]
            assert trained == in_fabric == first[rank] + second[rank], (name, rank)
            assert extra == {key: value for key, value in vars(make()).items() if key in ("names", "note")}


@pytest.mark.parametrize("name", [name for name in OWN if "wrapper" not in name])
def test_overfit_batches_gives_a_readers_own_sampler_one_order(name):
    # Lightning hands its SequentialSampler to all loaders, where one of them shuffles.
    beside = DataLoader(range(100), 2, shuffle=True)
    trained, made = trained_batches(OWN[name](), beside, overfit_batches=3)
    assert not made.shuffle and trained[:3] == trained[3:] and len(trained) == 6
    assert OWN[name]().shuffle


def test_overfit_batches_refuses_a_readers_own_sampler_that_cannot_have_one_order():
    with pytest.raises(
        ValueError, match=r"overfit_batches wants the same batches .* OneOfTheirs cannot make of BatchSampler"
    ):
        trained_batches(OWN["a wrapper"](), DataLoader(range(100), 2, shuffle=True), overfit_batches=3)


@pytest.mark.parametrize("name", OWN)
def test_a_readers_own_sampler_is_copied_and_pickled_and_made_again_from_the_copy(name):
    sampler = OWN[name]()
    for alike in copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler)):
        alike.set_epoch(1)
        sampler.set_epoch(1)
        assert list(alike) == list(sampler)
        attributes = [{key for key in vars(each) if not key.startswith("_")} for each in (alike, sampler)]
        assert attributes[0] == attributes[1]
        again = made_again_by_lightning(alike)
        assert again is not alike and type(again) is type(sampler) and list(again) == list(sampler)


def test_indices_that_are_more_than_a_number_are_refused():
    sized = ScheduledBatchSampler(8, SizeSchedule({0: (16, 4)}), num_replicas=1, rank=0, shuffle=False)
    for batches, told in ((sized, "0@16 of SizedIndex"), ([[0.5]], "0.5 of float"), ([[("cat", 0)]], "of tuple")):
        with pytest.raises(ValueError, match=f"must yield plain ints, got .*{told}"):
            list(ShardedBatchSampler(batches, num_replicas=1, rank=0))
    assert list(ShardedBatchSampler([[np.int64(1), torch.tensor(0)]], num_replicas=1, rank=0)) == [[1, 0]]


def test_a_plan_takes_numpys_numbers_of_ranks():
    for world_size in (np.int8(8), np.int32(8)):
        for samples in (100, 10**10):
            sampler = ShuffledBatchSampler(samples, 16)
            plans = (plan_steps(sampler, world_size=ranks, max_epochs=1) for ranks in (world_size, 8))
            assert next(plans).total_steps == next(plans).total_steps
