"""The kit against samplers that are right, and against one planted fault at a time: it must name that rule alone."""

import random
import time
import warnings
from functools import cache, partial
from itertools import count, cycle, pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from course_lib.conformance import assert_batch_sampler, check_batch_sampler
from course_lib.conformance.rules import two_swapped
from course_lib.conformance.violations import RULES
from course_lib.samplers import ShardedBatchSampler, ShuffledBatchSampler, TwoStreamBatchSampler
from tests import effort

# ------------------------------------------------------------------------------------------- samplers that are right


@cache
def permutation(n, seed):
    return np.random.default_rng(seed).permutation(n).tolist()


class Contiguous:
    """Each step takes the next indices of one order, each rank a contiguous part of them.

    Beside them, each batch has two of the indices n … n + cycled - 1, if there are such.
    """

    def __init__(self, num_replicas, rank, n=40, batch_size=3, cycled=0, seed=0):
        self.num_replicas, self.rank = num_replicas, rank
        self.n, self.batch_size, self.cycled, self.seed = n, batch_size, cycled, seed
        self.begin(0, 0, 0)
        self.blocks()

    def begin(self, epoch, position, batches_before):
        self.epoch, self.position, self.batches_before, self.yielded = epoch, position, batches_before, 0

    @property
    def sampler(self):
        return self

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.begin(epoch, 0, 0)

    def order(self):
        return self.draw(self.seed, self.epoch)

    def draw(self, *seed):
        return list(permutation(self.n, seed))

    def blocks(self):
        """Where the steps from the position on begin and end; sizes differ by one, the larger ones first."""
        left = self.n - self.position
        steps = -(-left // (self.batch_size * self.num_replicas))
        if left < steps * self.num_replicas:
            raise ValueError(f"cannot deal {left} indices to {self.num_replicas} ranks")
        smaller, larger = divmod(left, steps)
        edges = [self.position + step * smaller + min(step, larger) for step in range(steps + 1)]
        return list(pairwise(edges))

    def part(self, block):
        return block[len(block) * self.rank // self.num_replicas : len(block) * (self.rank + 1) // self.num_replicas]

    def beside(self, number):
        return [self.n + i % self.cycled for i in (2 * number, 2 * number + 1)] if self.cycled else []

    def __len__(self):
        return len(self.blocks())

    def __iter__(self):
        self.yielded = 0
        number = self.batches_before + self.rank
        order = self.order()
        for step, (begin, end) in enumerate(self.blocks()):
            part = self.part(order[begin:end])
            if part:
                self.yielded = step + 1
                yield part + self.beside(number + step * self.num_replicas)

    def state_dict(self, batches=None):
        done, blocks = self.yielded if batches is None else batches, self.blocks()
        if done == len(blocks):
            return self.state(self.epoch + 1, 0, 0)
        return self.state(self.epoch, blocks[done][0], self.batches_before + done * self.num_replicas)

    def state(self, *place):
        return place

    def load_state_dict(self, state):
        self.begin(*state)


class Strided(Contiguous):
    """Of each step's indices, a rank takes every ``num_replicas``-th."""

    def part(self, block):
        return block[self.rank :: self.num_replicas]


class OnePartARank:
    """Each rank takes one contiguous part of the whole order. No len(), no state: the barest sampler."""

    def __init__(self, num_replicas, rank, n=40, batch_size=3):
        self.num_replicas, self.rank, self.n, self.batch_size, self.epoch = num_replicas, rank, n, batch_size, 0
        self.sampler = self

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng([0, self.epoch]).permutation(self.n).tolist()
        longest = -(-self.n // self.num_replicas)
        steps = -(-longest // self.batch_size)
        mine = [int(i) for i in np.array_split(order, self.num_replicas)[self.rank]]
        yield from ([int(i) for i in batch] for batch in np.array_split(mine, steps))


SHAPES = [dict(n=n, batch_size=b) for n in (1, 2, 3, 5, 8, 13, 25) for b in (1, 3, 4)]


def all_of(shape):
    return range(shape["n"])


def rules(report):
    return [violation.rule for violation in report.violations]


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("cycled", [0, 1, 2, 5])
@pytest.mark.parametrize("sampler", [Contiguous, Strided])
def test_nothing_is_found_in_the_references(sampler, cycled):
    if cycled == 1:  # two of one index in a batch are unavoidable, and no violation
        assert [*sampler(1, 0, n=1, batch_size=1, cycled=1)] == [[0, 1, 1]]
    report = check_batch_sampler(sampler, all_of, shapes=[shape | dict(cycled=cycled) for shape in SHAPES])
    assert report.ok, report
    assert all(report.checks.values()), report.checks
    assert report.not_offered == ()


@pytest.mark.thorough
def test_nothing_is_found_in_a_sampler_that_offers_little_and_what_it_lacks_is_said():
    report = check_batch_sampler(OnePartARank, range(40))
    assert report.ok, report
    assert [text.split(":")[0] for text in report.not_offered] == [
        "no len()", "no state_dict and load_state_dict",
        "no state_dict(batches=n), the state after n delivered batches", "no keyword seed of the factory",
    ]  # fmt: skip
    assert "Not judged: rules 3, 7, 9." in str(report)


LIBRARY = {
    "shuffled": (partial(ShuffledBatchSampler, 47, 4), range(47)),
    "two streams": (partial(TwoStreamBatchSampler, range(30), range(100, 107), 4, 3), range(30)),
    "a small secondary": (partial(TwoStreamBatchSampler, range(30), [100, 101], 4, 3), range(30)),
    "whole batches": (partial(ShardedBatchSampler, BatchSampler(RandomSampler(range(47)), 4, False)), range(47)),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", LIBRARY)
def test_nothing_is_found_in_the_samplers_of_this_library(name):
    factory, once = LIBRARY[name]
    assert_batch_sampler(factory, once)


@pytest.mark.thorough
@pytest.mark.parametrize(("tail", "word"), [("drop", "missing"), ("pad", "repeated")])
def test_a_tail_that_is_not_exactly_once_breaks_that_rule_alone(tail, word):
    report = check_batch_sampler(partial(ShuffledBatchSampler, 47, 4, tail=tail), range(47))
    assert rules(report) == [1]
    assert word in report.violations[0].message
    assert_batch_sampler(partial(ShuffledBatchSampler, 47, 4, tail=tail), range(47), skip_rules={1})


# ------------------------------------------------------------------------------------------------- planted faults


class LosesTail(Contiguous):
    def blocks(self):
        full = self.batch_size * self.num_replicas
        return [(begin, begin + full) for begin in range(self.position, self.n - full + 1, full)]


class Pads(Contiguous):
    def order(self):
        return super().order() * 8

    def blocks(self):
        full = self.batch_size * self.num_replicas
        return [(begin, begin + full) for begin in range(self.position, self.n, full)]


class RanksDrawTheirOwn(Contiguous):
    def order(self):
        return self.draw(self.seed, self.epoch, self.rank)


class UnevenCounts(Contiguous):
    """The torch way to share batches out: ``batches[rank::num_replicas]``."""

    def blocks(self):
        full = self.batch_size * self.num_replicas
        return [(begin, min(self.n, begin + full)) for begin in range(self.position, self.n, full)]

    def part(self, block):
        return block[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]

    def __len__(self):
        return sum(bool(self.part(range(begin, end))) for begin, end in self.blocks())


class LengthOfOneRank(Contiguous):
    def __len__(self):
        return -(-self.n // self.batch_size)


class LengthOfTheEpoch(Contiguous):
    def __len__(self):
        return -(-self.n // (self.batch_size * self.num_replicas))


class TorchsGlobalGenerator(Contiguous):
    def order(self):
        return torch.randperm(self.n).tolist()


class NumpysGlobalGenerator(Contiguous):
    def order(self):
        return np.random.permutation(self.n).tolist()  # noqa: NPY002


class PythonsGlobalGenerator(Contiguous):
    def order(self):
        return random.sample(range(self.n), self.n)


class DrawsInIter(Contiguous):
    drawn = 0

    def order(self):
        self.drawn += 1
        return self.draw(self.seed, self.epoch, self.drawn)


class OneGeneratorForAllEpochs(Contiguous):
    def order(self):
        if not hasattr(self, "generator"):
            self.generator = np.random.default_rng(self.seed)
        return self.generator.permutation(self.n).tolist()


class WorldSizeInTheSeed(Contiguous):
    def order(self):
        return self.draw(self.seed, self.epoch, self.num_replicas)


class SharesFixedBeforeShuffling(Contiguous):
    """Exactly once, but each index stays within the share of one rank."""

    def order(self):
        order = np.arange(self.n)
        for rank in range(self.num_replicas):
            share = order[rank :: self.num_replicas]
            share[:] = np.random.default_rng([self.seed, self.epoch, rank]).permutation(share)
        return order.tolist()


class SeedPlusEpoch(Contiguous):
    def order(self):
        return self.draw(self.seed + self.epoch)


class SeedIgnored(Contiguous):
    def order(self):
        return self.draw(self.epoch)


class EveryOrderTwice(Contiguous):
    def order(self):
        return self.draw(self.seed, self.epoch // 2)


class SetEpochIgnored(Contiguous):
    def set_epoch(self, epoch):
        pass


class SetEpochOutOfReach(Contiguous):
    sampler = None


class SetEpochOfAnother(Contiguous):
    @property
    def sampler(self):
        return DistributedSampler(range(self.n), self.num_replicas, self.rank)


class StateOneBehind(Contiguous):
    def state_dict(self, batches=None):
        return super().state_dict(max(0, (self.yielded if batches is None else batches) - 1))


class StateOneAhead(Contiguous):
    def state_dict(self, batches=None):
        done = self.yielded if batches is None else batches
        return super().state_dict(min(len(self), done + 1) if done else 0)


class StateWithoutEpoch(Contiguous):
    def load_state_dict(self, state):
        self.begin(self.epoch, *state[1:])


class StateEndsInNothing(Contiguous):
    """After the last batch, it still stands at the end, and set_epoch does not help."""

    def state_dict(self, batches=None):
        state = super().state_dict(batches)
        return (state[0], self.n - 1, 0) if state[0] > self.epoch else state


class StateSkipsAnEpoch(Contiguous):
    """After the last batch, it stands in the epoch after the next."""

    def state_dict(self, batches=None):
        epoch, *place = super().state_dict(batches)
        return (epoch + 1 if epoch > self.epoch else epoch), *place


class CountsBeforeTheFirstBatch(Contiguous):
    """A state that is taken when the epoch has begun, before its first batch, counts that batch."""

    def __iter__(self):
        self.yielded = 1
        return super().__iter__()


class SetEpochLosesThePosition(Contiguous):
    def set_epoch(self, epoch):
        self.begin(epoch, 0, 0)


class PositionStays(Contiguous):
    """Every epoch after a resume begins where that one did."""

    def set_epoch(self, epoch):
        self.epoch = epoch


class SecondResumeForgetsTheFirst(Contiguous):
    def state_dict(self, batches=None):
        epoch, position, before = super().state_dict(batches)
        return epoch, max(0, position - self.position), before


class NotResetByEpoch(Contiguous):
    """Its count goes on from one epoch to the next: right in the first one only."""

    total = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.total += 1
            yield batch

    def state_dict(self, batches=None):
        if self.total > len(self):
            return self.epoch, self.position, self.batches_before
        return super().state_dict(batches)


class StateCannotBeSaved(Contiguous):
    def state(self, *place):
        return iter(place), lambda: place

    def load_state_dict(self, state):
        self.begin(*state[0])


class CountsWhatWasFetched(Contiguous):
    def state_dict(self, batches=None):
        return super().state_dict()


class RunAheadForgetsTheResume(Contiguous):
    def state_dict(self, batches=None):
        if batches is not None and self.position:
            batches -= 1
        return super().state_dict(batches)


class CopyStartsAnew(Contiguous):
    def __getstate__(self):
        return vars(self) | dict(epoch=0)


class StateInSteps(Contiguous):
    """The position is counted in steps, whose size depends on the world size."""

    def state(self, epoch, position, before):
        return epoch, before // self.num_replicas, before

    def load_state_dict(self, state):
        self.begin(state[0], 0, 0)
        blocks = self.blocks()
        self.begin(state[0], blocks[min(state[1], len(blocks) - 1)][0], state[2])


class RestDealtUnevenly(Contiguous):
    """Resumed on another number of ranks, it shares out whole batches, of which there are not as many for all."""

    foreign = False

    def state(self, *place):
        return self.num_replicas, *place

    def load_state_dict(self, state):
        self.foreign = state[0] != self.num_replicas
        self.begin(*state[1:])

    def blocks(self):
        return UnevenCounts.blocks(self) if self.foreign else super().blocks()

    def part(self, block):
        return UnevenCounts.part(self, block) if self.foreign else super().part(block)


class OneRankRefusesTheRest(RestDealtUnevenly):
    def load_state_dict(self, state):
        if state[0] != self.num_replicas and self.rank == 1:
            raise ValueError("not on this rank")
        self.begin(*state[1:])


class DrawsWithReplacement(Contiguous):
    def beside(self, number):
        first = super().beside(number)[0]
        return [first, first]


class LastBatchTooLarge(Contiguous):
    def blocks(self):
        blocks = super().blocks()
        return [*blocks[:-2], (blocks[-2][0], blocks[-1][1])] if len(blocks) > 1 else blocks


class EachRankCyclesAlone(Contiguous):
    def beside(self, number):
        return super().beside(number // self.num_replicas)


class NotPicklable(Contiguous):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.collate = lambda batch: batch


class OnceOnly(Contiguous):
    def __iter__(self):
        if self.yielded == len(self.blocks()):
            return iter([])
        return super().__iter__()


class OneIteratorAtATime(Contiguous):
    def __iter__(self):
        self.shared = super().__iter__()
        return self

    def __next__(self):
        return next(self.shared)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "shared"}


FAULTS = {
    LosesTail: 1,
    Pads: 1,
    RanksDrawTheirOwn: 1,
    UnevenCounts: 2,
    LengthOfOneRank: 3,
    LengthOfTheEpoch: 3,
    TorchsGlobalGenerator: 4,
    NumpysGlobalGenerator: 4,
    PythonsGlobalGenerator: 4,
    DrawsInIter: 4,
    WorldSizeInTheSeed: 4,
    SharesFixedBeforeShuffling: 4,
    SeedPlusEpoch: 5,
    SeedIgnored: 5,
    EveryOrderTwice: 5,
    SetEpochIgnored: 6,
    SetEpochOutOfReach: 6,
    SetEpochOfAnother: 6,
    StateOneBehind: 7,
    StateOneAhead: 7,
    StateWithoutEpoch: 7,
    StateEndsInNothing: 7,
    StateSkipsAnEpoch: 7,
    CountsBeforeTheFirstBatch: 7,
    SetEpochLosesThePosition: 7,
    PositionStays: 7,
    SecondResumeForgetsTheFirst: 7,
    NotResetByEpoch: 7,
    StateCannotBeSaved: 7,
    CountsWhatWasFetched: 8,
    RunAheadForgetsTheResume: 8,
    CopyStartsAnew: 8,
    StateInSteps: 9,
    RestDealtUnevenly: 9,
    OneRankRefusesTheRest: 9,
    DrawsWithReplacement: 10,
    LastBatchTooLarge: 10,
    EachRankCyclesAlone: 10,
    NotPicklable: 11,
    OnceOnly: 11,
    OneIteratorAtATime: 11,
}


def test_every_rule_has_a_planted_fault():
    assert set(FAULTS.values()) == set(RULES) == set(range(1, 12))


def strided(fault):
    """The same fault in strided dealing; a global, so that pickle finds it."""
    name = f"Strided{fault.__name__}"
    attributes = (
        dict(part=Strided.part, __module__=__name__) if "part" not in vars(fault) else dict(__module__=__name__)
    )
    return globals().setdefault(name, type(name, (fault,), attributes))


@pytest.mark.thorough(but=14)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_breaks_its_rule_and_no_other(fault):
    report = check_batch_sampler(partial(fault, cycled=7), range(40))
    assert rules(report) == [FAULTS[fault]], report


@pytest.mark.thorough(but=6)
@pytest.mark.parametrize("fault", [*FAULTS], ids=lambda fault: fault.__name__)
def test_so_it_does_in_strided_dealing(fault):
    report = check_batch_sampler(partial(strided(fault), cycled=7), range(40))
    assert rules(report) == [FAULTS[fault]], report


@pytest.mark.thorough
def test_faults_are_found_without_a_second_stream_and_by_the_shapes_of_a_list():
    for fault, rule in list(FAULTS.items())[: effort.cases(4, len(FAULTS))]:
        if rule != 10:
            report = check_batch_sampler(fault, all_of, shapes=[dict(n=n, batch_size=3) for n in (7, 22, 23, 24)])
            assert rules(report) == [rule], report


def test_a_generator_that_goes_on_is_found_with_what_follows_from_it():
    # Each new sampler starts it anew, so set_epoch has no effect either.
    assert rules(check_batch_sampler(OneGeneratorForAllEpochs, range(40))) == [4, 6]


# ------------------------------------------------------------------------------------- what does not even yield batches


class Broken(Contiguous):
    def __init__(self, num_replicas, rank, batches):
        super().__init__(num_replicas, rank)
        self.batches = batches

    def __iter__(self):
        return iter(self.batches()) if callable(self.batches) else iter(self.batches)


def into(*buffers):
    """Batches that are written into the buffers in turn."""
    for i, buffer in zip(range(0, 40, 2), cycle(buffers), strict=False):
        buffer[0], buffer[1] = i, i + 1
        yield buffer if isinstance(buffer, list) else buffer[:]  # another object, over the same memory


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([[0, 1], []], "batch 1 is empty"),
        ([[0, 1.0]], "batch 0 holds 1.0, which is no integer"),
        ([[0], ["1"]], "batch 1 holds '1', which is no integer"),
        ([torch.tensor([0.5])], "which is no integer"),
        (range(40), "batch 0 is 0, no list: is this a sampler, and no batch sampler?"),
        (lambda: ([0] for _ in count()), "the epoch has no end: more than 500 batches for 40 indices"),
        (lambda: 1 / 0, "iterating raised ZeroDivisionError: division by zero"),
        (lambda: (1 / (2 - i) and [i] for i in range(5)), "batch 2 raised ZeroDivisionError"),
        (lambda: into([0, 0]), "batch 0 is written over by a later one"),
        (lambda: into([0, 0], [0, 0]), "batch 0 is written over by a later one"),
        (lambda: into(np.zeros(2, int)), "batch 0 is written over by a later one"),
        (lambda: into(torch.zeros(2, dtype=torch.long)), "batch 0 is written over by a later one"),
        (lambda: ([int("x" * (i == 2) + "1")] for i in range(5)), "batch 2 raised ValueError"),
    ],
)
def test_what_yields_no_batches_is_a_violation_and_no_crash(batches, message):
    report = check_batch_sampler(partial(Broken, batches=batches), range(40))
    assert rules(report) == [1]
    assert message in report.violations[0].message
    assert "1 rank, epoch 0, rank 0" in report.violations[0].message


def test_a_factory_that_raises_anything_but_a_value_error_breaks_the_first_rule():
    report = check_batch_sampler(lambda num_replicas: None, range(4))
    assert rules(report) == [1]
    assert "making the sampler raised TypeError" in report.violations[0].message


class StateRaises(Contiguous):
    def load_state_dict(self, state):
        raise KeyError("position")


def test_a_state_that_cannot_be_loaded_is_a_violation_of_the_resume():
    report = check_batch_sampler(StateRaises, range(40))
    assert rules(report) == [7]
    expected = "Rule 7, resume: 1 rank, epoch 0, stopped after 0 batches, rank 0: load_state_dict raised KeyError"
    assert expected in report.violations[0].message


# ------------------------------------------------------------------------------------------------------- refusals


def test_what_is_refused_on_all_ranks_is_noted_and_what_is_refused_on_some_hangs():
    report = check_batch_sampler(Contiguous, range(5), shapes=[dict(n=5, batch_size=1)])
    assert report.ok
    refused = "refused: n=5, batch_size=1, 2 ranks: making the sampler raised ValueError: cannot deal 5 indices"
    assert any(note.startswith(refused) and note.endswith("(and 2 more)") for note in report.notes), report.notes

    def last_rank_refuses(num_replicas, rank):
        if rank == 2:
            raise ValueError("no rank 2 here")
        return Contiguous(num_replicas, rank)

    report = check_batch_sampler(last_rank_refuses, range(40))
    assert rules(report) == [2]
    assert "only some ranks refuse, rank 2 with ValueError: making the sampler raised" in report.violations[0].message


class SameWorldSizeOnly(Contiguous):
    def state(self, *place):
        return self.num_replicas, *place

    def load_state_dict(self, state):
        if state[0] != self.num_replicas:
            raise ValueError(f"the state is for {state[0]} ranks")
        self.begin(*state[1:])


def test_a_resume_that_is_refused_is_noted():
    report = check_batch_sampler(SameWorldSizeOnly, range(40))
    assert report.ok and report.checks[9] == 0
    assert any("refused to resume on another number of ranks" in note for note in report.notes)


def test_nothing_judged_is_no_success():
    with pytest.raises(ValueError, match="nothing was judged, all was refused: 2 ranks: making the sampler raised"):
        check_batch_sampler(partial(Contiguous, n=1), range(1), world_sizes=(2, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(epochs=1), "epochs must be an int of at least 2, got 1"),
        (dict(world_sizes=(0,)), "every world size must be a positive int, got 0"),
        (dict(world_sizes=()), "there is nothing to judge: 0 world sizes, 1 shapes"),
        (dict(shapes=[]), "there is nothing to judge: 5 world sizes, 0 shapes"),
        (dict(exactly_once=[]), r"exactly_once must be .* at least one integer, .* got \[\] for the shape \{\}"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_batch_sampler(**{"factory": Contiguous, "exactly_once": range(40), **arguments})


# ------------------------------------------------------------------------------------------------ what the report says


MESSAGES = {
    LosesTail: " is missing; each of 40 indices should come once.\n"
    "  In a training run: some samples are trained on too often or never, and no error says so.",
    UnevenCounts: "Rule 2, equal counts: 3 ranks, epoch 0, step 4: the ranks have different numbers of batches "
    "(rank 0: 5, rank 1: 5, rank 2: 4).\n  In a training run: the ranks average steps of different epochs",
    LengthOfTheEpoch: "1 rank, epoch 0, stopped after 1 batch, rank 0: len() is 14 after the resume, 13 batches are",
    SeedPlusEpoch: "1 rank, epoch 1: (seed 0, epoch 1) has the order of (seed 1, epoch 0), as the sum seed + epoch",
    SetEpochIgnored: "1 rank, epoch 1: set_epoch has no effect: epochs 0 to 19 have one order.\n"
    "  In a training run: every epoch repeats the order of the first, and nothing says so.",
    SetEpochOutOfReach: "batch_sampler.sampler.set_epoch, the only one that Lightning calls (and accelerate on "
    "several ranks), does not exist",
    StateOneBehind: "stopped after 1 batch, rank 0, step 0: the rest of the epoch is another one: batch 0 is [",
    SetEpochLosesThePosition: "stopped after 1 batch, rank 0, step 0: set_epoch(0) after load_state_dict loses the",
    CountsWhatWasFetched: "stopped after 0 batches, rank 0, step 0: state_dict(batches=0) after 1 were fetched: the",
    StateInSteps: "Rule 9, other world size: 1 rank, epoch 0, stopped after 1 batch, resumed on 2 ranks: 3 indices [",
    EachRankCyclesAlone: "2 ranks, epoch 0, step 0: of the cycled stream, 2 indices [40, 41] had come 2 times, 5",
    NotPicklable: "1 rank, epoch 0, rank 0: pickling the NotPicklable raised ",
    OnceOnly: "iterated a second time: batch 0 is the end, it should be [",
}


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("fault", MESSAGES, ids=lambda fault: fault.__name__)
def test_messages_say_where_what_and_what_it_means(fault):
    (violation,) = check_batch_sampler(partial(fault, cycled=7), range(40)).violations
    assert MESSAGES[fault] in violation.message
    assert "\n  In a training run: " in violation.message


def test_the_counterexample_is_the_smallest():
    shapes = [dict(n=n, batch_size=3) for n in (60, 23, 30, 40)]  # 23 alone loses a tail on one rank
    report = check_batch_sampler(LosesTail, all_of, shapes=shapes, world_sizes=(5, 2, 1))
    example = report.violations[0].counterexample
    assert (example.shape, example.num_replicas, example.epoch) == (dict(n=23, batch_size=3), 1, 0)
    assert len(example.indices) == 2
    report = check_batch_sampler(StateInSteps, all_of, shapes=shapes, world_sizes=(5, 2, 1))
    example = report.violations[0].counterexample
    assert (example.shape["n"], example.num_replicas, example.stop, example.resumed_on) == (23, 1, 1, 2)


@pytest.mark.thorough
def test_the_report_reads_well():
    assert str(check_batch_sampler(Contiguous, range(40))).startswith("No rule is broken (")
    text = str(check_batch_sampler(partial(SeedPlusEpoch, batch_size=3), range(39)))
    assert text.startswith("The sampler breaks rule 5 (")
    text = str(check_batch_sampler(StateOneBehind, range(40)))
    assert "Not judged: rules 8, 9." in text
    assert "- rule 9 was not judged: it rests on rule 7" in text


@pytest.mark.thorough
def test_one_line_of_pytest():
    assert_batch_sampler(Contiguous, range(40))
    with pytest.raises(AssertionError, match=r"The sampler breaks rule 2 .*\n\nRule 2, equal counts: 3 ranks"):
        assert_batch_sampler(UnevenCounts, range(40))


# --------------------------------------------------------------------------------------------- samplers of other people


def test_torchs_distributed_sampler_pads_and_adds_seed_and_epoch():
    def make(num_replicas, rank, seed=0):
        return BatchSampler(DistributedSampler(range(20), num_replicas, rank, seed=seed), 4, drop_last=False)

    report = check_batch_sampler(make, range(20))
    assert rules(report) == [1, 5]
    assert report.violations[0].counterexample.num_replicas == 3  # 20 samples on 1 and 2 ranks need no padding
    report = check_batch_sampler(lambda num_replicas, rank: make(num_replicas, rank), range(20), world_sizes=(1, 2))
    assert report.ok, report
    assert any(text.startswith("no keyword seed of the factory") for text in report.not_offered)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_that_does_not_shuffle_may_pad_and_drop(drop_last):
    def make(num_replicas, rank, n):
        sampler = DistributedSampler(range(n), num_replicas, rank, shuffle=False, drop_last=drop_last)
        return BatchSampler(sampler, 4, drop_last=False)

    shapes = [dict(n=n) for n in (8, 9, 20, 41)]
    assert rules(check_batch_sampler(make, all_of, shapes=shapes)) == [1]
    report = check_batch_sampler(make, all_of, shapes=shapes, skip_rules={1})
    assert report.ok, report
    assert report.skipped == (1,) and "\n\nLeft out by choice: rule 1.\n" in str(report)


class OnlySmallOnes(Contiguous):
    def set_epoch(self, epoch):
        super().set_epoch(epoch if self.n < 20 else 0)


def test_a_large_shape_without_effect_is_found_beside_a_small_one_with_it():
    report = check_batch_sampler(OnlySmallOnes, all_of, shapes=[dict(n=10), dict(n=30)], world_sizes=(1, 2))
    assert rules(report) == [6] and report.violations[0].counterexample.shape == dict(n=30)


class Weighted(Contiguous):
    """Draws with replacement, but by the seed and the epoch alone."""

    def order(self):
        return np.random.default_rng([self.seed, self.epoch]).integers(self.n, size=self.n).tolist()


@pytest.mark.parametrize(
    ("sampler", "left_out"), [(Weighted, {1, 4, 10}), (Weighted, {1, 10}), (Pads, {1}), (LosesTail, {1})]
)
def test_a_rule_can_be_left_out_and_what_rests_on_it_is_too(sampler, left_out):
    kit = partial(check_batch_sampler, sampler, all_of, shapes=[dict(n=n) for n in (8, 10, 25)], world_sizes=(1, 2))
    assert 1 in rules(kit())
    report = kit(skip_rules=left_out)
    assert report.ok, report
    assert {rule for rule, passed in report.checks.items() if not passed} == left_out | {9}
    assert "Not judged: rule 9.\n" in str(report) and "- rule 9 was not judged: it rests on rule" in str(report)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("fault", [*FAULTS], ids=lambda fault: fault.__name__)
def test_every_other_rule_is_judged_as_ever(fault):
    left_out = {1, 9} - {FAULTS[fault]}
    if FAULTS[fault] != 9:  # it rests on rule 1
        assert rules(check_batch_sampler(partial(fault, cycled=7), range(40), skip_rules=left_out)) == [FAULTS[fault]]
    assert check_batch_sampler(partial(fault, cycled=7), range(40), skip_rules=[FAULTS[fault]]).ok


def test_torchs_random_sampler_draws_from_the_global_generator():
    report = check_batch_sampler(
        lambda *_: BatchSampler(RandomSampler(range(20)), 4, False), range(20), world_sizes=[1]
    )
    assert rules(report) == [4]
    assert any(text.startswith("no set_epoch") for text in report.not_offered)


class Plain(Contiguous):
    def order(self):
        return list(range(self.n))


@pytest.mark.thorough
def test_a_sampler_that_does_not_shuffle_is_noted():
    note = "does not shuffle, so rules 5 and 6 asked for no other order: 1 rank"
    report = check_batch_sampler(Plain, range(40))
    assert report.ok and note in report.notes, report

    def in_a_given_order(num_replicas, rank, shuffle):
        return TwoStreamBatchSampler([5, 3, 9, 1], [0], 1, 1, shuffle=shuffle, num_replicas=num_replicas, rank=rank)

    for once, shapes in (([5, 3, 9, 1], [dict(shuffle=False)]), ({5, 3, 9, 1}, [dict(shuffle=False)])):
        report = check_batch_sampler(in_a_given_order, once, shapes=shapes)
        assert report.ok, report


class WholeBatchesShuffled(Contiguous):
    """The same batches in another order: few orders, so that two epochs may be alike by chance."""

    def order(self):
        batches = np.arange(self.n).reshape(-1, self.batch_size)
        return np.random.default_rng([self.seed, self.epoch]).permutation(batches).ravel().tolist()


def test_orders_that_are_alike_by_chance_are_no_violation():
    shapes = [dict(n=n, batch_size=n // 2) for n in range(2, 40, 2)]
    assert_batch_sampler(WholeBatchesShuffled, all_of, shapes=shapes, world_sizes=[1])


class Converted(Contiguous):
    def __init__(self, *args, convert):
        super().__init__(*args)
        self.convert = convert

    def __iter__(self):
        return map(self.convert, super().__iter__())


def as_numpy_integers(batch):
    return [np.int64(i) for i in batch]


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor, iter, as_numpy_integers])
def test_batches_may_be_anything_that_holds_integers(convert):
    assert_batch_sampler(partial(Converted, convert=convert), set(range(40)), world_sizes=(1, 2))


def test_the_callers_generators_and_warnings_stay_as_they_are():
    def warns(num_replicas, rank):
        warnings.warn("odd", stacklevel=1)
        return TorchsGlobalGenerator(num_replicas, rank)

    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_batch_sampler(warns, range(40))
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected  # noqa: NPY002
    assert "the sampler warned: odd" in report.notes


def test_a_small_sampler_is_judged_in_a_moment():
    begin = time.process_time()
    assert check_batch_sampler(Contiguous, range(40)).ok
    assert time.process_time() - begin < 2


def test_a_batch_size_that_nobody_tells_is_not_judged_and_that_is_said():
    report = check_batch_sampler(*LIBRARY["whole batches"], world_sizes=(1, 2))
    assert report.ok
    assert any(text.startswith("no batch_size, of the shape or of the sampler") for text in report.not_offered)


class ShufflesTheWrongWayRound(Contiguous):
    def __init__(self, num_replicas, rank, n=40, batch_size=3, seed=0, shuffle=True):
        self.shuffle = shuffle
        super().__init__(num_replicas, rank, n, batch_size, seed=seed)

    def order(self):
        return [*range(self.n)] if self.shuffle else super().order()


def test_what_shuffle_says_is_what_the_sampler_does():
    report = check_batch_sampler(ShufflesTheWrongWayRound, range(40), shapes=[dict(shuffle=True)], world_sizes=(1, 2))
    assert 6 in rules(report), report
    report = check_batch_sampler(ShufflesTheWrongWayRound, range(40), shapes=[dict(shuffle=False)], world_sizes=(1, 2))
    assert rules(report) == [4]
    assert "shuffle=False, and epoch 1 has another order than epoch 0" in str(report)
    for shuffle in (True, False):
        assert_batch_sampler(partial(ShuffledBatchSampler, 40, 3), range(40), shapes=[dict(shuffle=shuffle)])


class WithoutEpochs(Contiguous):
    set_epoch = None
    sampler = None

    def __init__(self, num_replicas, rank, n=2, seed=0, shuffle=True):
        super().__init__(num_replicas, rank, n, 1, seed=seed)


def test_two_indices_are_swapped_where_some_pair_of_all_is():
    draw = random.Random(0)
    found = 0
    for _ in range(effort.cases(300, 3000)):
        n, steps = draw.randint(1, 7), draw.randint(1, 4)
        here, there = ({i: draw.randrange(steps) for i in draw.sample(range(7), n)} for _ in range(2))
        both = here.keys() & there.keys()
        pairs = {(i, j) for i in both for j in both if here[i] < here[j] and there[i] > there[j]}
        swapped = two_swapped(here, there)
        assert swapped in pairs if pairs else swapped is None
        found += bool(pairs)
    assert found > 50


def test_two_seeds_that_agree_by_chance_are_no_violation_where_there_are_no_epochs():
    assert [*WithoutEpochs(1, 0, seed=0)] == [*WithoutEpochs(1, 0, seed=1)] == [[0], [1]]
    assert_batch_sampler(WithoutEpochs, range(2), world_sizes=[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(exactly_once=40), r"exactly_once must be a collection .* such as range\(40\), .* got 40"),
        (dict(exactly_once=[0.5]), r"exactly_once must be a collection of .* integer.* got \[0.5\]"),
        (dict(exactly_once=[0, 1, 1, 2]), r"exactly_once must be .* each once.* got \[0, 1, 1, 2\]"),
        (dict(exactly_once=lambda shape: None), "exactly_once must be a collection of .* integer.* got None"),
        (dict(world_sizes=4), "world_sizes must be a collection such as a list, got 4"),
        (dict(shapes=dict(n=40)), "shapes must be a collection such as a list, got {'n'"),
        (dict(shapes=[40]), r"every shape must be a dict of the factory's keywords .* got \[40\]"),
        (dict(factory=Contiguous(1, 0)), "factory must make one rank's batch sampler .* got <"),
        (dict(skip_rules=1), "skip_rules must be a collection such as a list, got 1"),
        (dict(skip_rules="1"), "skip_rules must be a collection .* got '1'"),
        (dict(skip_rules={12}), r"skip_rules takes the numbers of RULES, 1 to 11, got \{12\}"),
        (dict(skip_rules=["resume"]), r"skip_rules takes the numbers of RULES, 1 to 11, got \['resume'\]"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_batch_sampler(**{"factory": Contiguous, "exactly_once": range(40), **arguments})


@pytest.mark.parametrize("once", [range(40), iter(range(40)), np.arange(40), torch.arange(40), {*range(40)}])
def test_the_indices_may_come_in_any_collection(once):
    assert_batch_sampler(Contiguous, once, world_sizes=(1, 2))
