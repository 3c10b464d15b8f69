"""What stays refused where repeating and dropping are by design, the reader's own rule for a batch, and bad input.

Every planted fault is judged under each of the four settings, and so is every sampler that is right, under those that
its design needs.
"""

from functools import partial
from itertools import count, product

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from course_lib.conformance import assert_batch_sampler, check_batch_sampler
from course_lib.conformance.violations import OWN_RULE
from course_lib.samplers import ShardedBatchSampler, ShuffledBatchSampler, TwoStreamBatchSampler
from tests import effort
from tests.test_conformance import FAULTS, Contiguous, LosesTail, Pads, RestDealtUnevenly, Strided, Weighted

SETTINGS = [dict(repeats=repeats, drops=drops) for repeats, drops in product((False, True), repeat=2)]
BOTH = dict(repeats=True, drops=True)


def rules(report):
    return [violation.rule for violation in report.violations]


def all_of(shape):
    return range(shape["n"])


# ------------------------------------------------------------------------------------------- samplers that are right


class Global:
    """All ranks make the same list of batches, and each takes its turn. No state: the barest sampler."""

    def __init__(self, num_replicas, rank, n=40, batch_size=4, seed=0):
        self.num_replicas, self.rank, self.n, self.batch_size, self.seed = num_replicas, rank, n, batch_size, seed
        self.epoch = 0
        self.sampler = self

    def set_epoch(self, epoch):
        self.epoch = epoch

    def generator(self, *more):
        return np.random.default_rng([self.seed, self.epoch, *more])

    def order(self):
        return self.generator().permutation(self.n).tolist()

    def cut(self, order):
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]

    def batches(self):
        return self.cut(self.order())

    def mine(self):
        batches = self.batches()
        return batches[: len(batches) // self.num_replicas * self.num_replicas][self.rank :: self.num_replicas]

    def __len__(self):
        return len(self.mine())

    def __iter__(self):
        return iter(self.mine())


class TorchWeighted(Global):
    def order(self):
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        return torch.multinomial(torch.arange(1.0, self.n + 1), self.n, True, generator=generator).tolist()


class AsManyStepsOnEveryRank(Global):
    """Weighted; an epoch has ten batches a rank, and not as many samples, whatever the number of ranks."""

    def mine(self):
        order = self.generator().integers(self.n, size=10 * self.batch_size * self.num_replicas).tolist()
        return self.cut(order)[self.rank :: self.num_replicas]


class TwoClassesOfTwo(Global):
    """P × K: each batch has two samples each of two of five classes; a class is padded to pairs."""

    def batches(self):
        generator = self.generator()
        pairs = []
        for label in range(5):
            indices = generator.permutation(np.arange(label, self.n, 5)).tolist()
            indices += indices[: len(indices) % 2]
            pairs.append([indices[i : i + 2] for i in range(0, len(indices), 2)])
        batches = []
        while sum(map(bool, pairs)) >= 2:
            fullest = sorted(range(5), key=lambda label: -len(pairs[label]))[:2]
            batches.append([index for label in fullest for index in pairs[label].pop()])
        return [batches[i] for i in generator.permutation(len(batches))]


class RepeatedAugmentation(Global):
    """Each index three times in a row, so that three ranks have the same one, augmented in three ways."""

    def mine(self):
        order = [index for index in self.order() for _ in range(3)]
        order += order[: -len(order) % self.num_replicas]
        return self.cut(order[self.rank :: self.num_replicas][: self.n // self.num_replicas])


class BucketsDropTheirTails(Global):
    """Four buckets by length, one after the other; each drops what fills no step."""

    def mine(self):
        step, generator, mine = self.batch_size * self.num_replicas, self.generator(), []
        for bucket in np.split(np.arange(self.n), 4):
            order = generator.permutation(bucket).tolist()
            steps = [order[i : i + step] for i in range(0, len(order) - step + 1, step)]
            mine += [batches[self.rank * self.batch_size :][: self.batch_size] for batches in steps]
        return mine


class OnePartARankPadded(Global):
    """Each rank takes one contiguous part of the order, which begins again at its end."""

    def part(self):
        order = self.order()
        share = -(-len(order) // self.num_replicas)
        order += order[: share * self.num_replicas - len(order)]
        return order[self.rank * share : (self.rank + 1) * share]

    def mine(self):
        return self.cut(self.part())


class OneWeightedPartARank(OnePartARankPadded):
    order = TorchWeighted.order


class OnePartARankWithoutItsTail(OnePartARankPadded):
    def mine(self):
        return [batch for batch in super().mine() if len(batch) == self.batch_size]


class AQuarterOversampled(Global):
    def order(self):
        often = [*range(self.n), *range(0, self.n, 4), *range(0, self.n, 4)]
        order = [often[i] for i in self.generator().permutation(len(often))]
        return order + order[: -len(order) % (self.batch_size * self.num_replicas)]


class AnotherHalfInEachEpoch(Global):
    def order(self):
        return super().order()[: self.n // 2]


def distributed(num_replicas, rank, n=41, *, drop_last=False, drop_last_batch=False):
    sampler = DistributedSampler(range(n), num_replicas, rank, drop_last=drop_last)
    return BatchSampler(sampler, 4, drop_last_batch)


class WeightedStrided(Strided):
    order = Weighted.order


SIZES = (23, 40, 60)
RIGHT = {  # name: factory, numbers of indices, what its design needs
    "weighted": (Weighted, SIZES, BOTH),
    "weighted, strided": (WeightedStrided, SIZES, BOTH),
    "torch's multinomial": (TorchWeighted, SIZES, BOTH),
    "weighted, one part a rank": (OneWeightedPartARank, SIZES, BOTH),
    "as many steps on every rank": (AsManyStepsOnEveryRank, SIZES, BOTH),
    "P x K": (TwoClassesOfTwo, (60, 83), BOTH),
    "repeated augmentation": (RepeatedAugmentation, SIZES, BOTH),
    "one part a rank, without its tail": (OnePartARankWithoutItsTail, SIZES, BOTH),
    "buckets": (BucketsDropTheirTails, (160,), dict(drops=True)),
    "a subset": (AnotherHalfInEachEpoch, (80, 90), dict(drops=True)),
    "one part a rank": (OnePartARankPadded, SIZES, dict(repeats=True)),
    "oversampled": (AQuarterOversampled, SIZES, dict(repeats=True)),
    "DistributedSampler": (distributed, SIZES, dict(repeats=True)),
    "DistributedSampler, drop_last": (partial(distributed, drop_last=True), SIZES, dict(drops=True)),
    "DistributedSampler, two tails": (partial(distributed, drop_last_batch=True), SIZES, BOTH),
}


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_by_its_design_passes(name):
    factory, sizes, needed = RIGHT[name]
    for setting in (needed, BOTH)[: effort.cases(1, 2)]:
        assert_batch_sampler(factory, all_of, shapes=[dict(n=n) for n in sizes[: effort.cases(2, 3)]], **setting)


TAILS = {"spread": dict(), "drop": dict(drops=True), "pad": dict(repeats=True)}


def whole_batches(num_replicas, rank, n, **options):
    batches = BatchSampler(RandomSampler(range(n)), 4, False)
    return ShardedBatchSampler(batches, num_replicas=num_replicas, rank=rank, **options)


LIBRARY = {
    "shuffled": lambda num_replicas, rank, n, **options: ShuffledBatchSampler(
        n, 3, num_replicas=num_replicas, rank=rank, **options
    ),
    "two streams": lambda num_replicas, rank, n, **options: TwoStreamBatchSampler(
        range(n), range(100, 107), 3, 2, num_replicas=num_replicas, rank=rank, **options
    ),
    "whole batches": whole_batches,
    "split batches": partial(whole_batches, split=True),
}


@pytest.mark.thorough
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_passes_with_every_tail(name, tail):
    make = partial(LIBRARY[name], tail=tail)
    worlds = (1, 2, 3) if name == "split batches" else (1, 2, 3, 5)  # batches of four cannot be split for five
    shapes = [dict(n=23), dict(n=40)][: effort.cases(1, 2)]
    for setting in (TAILS[tail], BOTH)[: effort.cases(1, 2)]:
        assert_batch_sampler(make, all_of, shapes=shapes, world_sizes=worlds[: effort.cases(3, 4)], **setting)


# ------------------------------------------------------------------------------------------------- planted faults


def planted(name, base, **body):
    """A sampler with one fault; a global, so that pickle finds it."""
    name = f"{name}{base.__name__}"
    return globals().setdefault(name, type(name, (base,), body | dict(__module__=__name__)))


def first_part(self, block):
    return block[: len(block) // self.num_replicas]


def part_of_local_rank(self, block):
    local = self.rank % max(1, self.num_replicas - 1)
    return block[len(block) * local // self.num_replicas : len(block) * (local + 1) // self.num_replicas]


def overlapping_part(self, block):
    begin = max(0, len(block) * self.rank // self.num_replicas - 1)
    return block[begin : len(block) * (self.rank + 1) // self.num_replicas]


def own_permutation(self):
    return self.draw(self.seed, self.epoch, self.rank)


def own_draws(self):
    return np.random.default_rng([self.seed, self.epoch, self.rank]).integers(self.n, size=self.n).tolist()


def draws_of_the_world(self):
    return np.random.default_rng([self.seed, self.epoch, self.num_replicas]).integers(self.n, size=self.n).tolist()


def one_step_too_few(self):
    blocks = Contiguous.blocks(self)
    return [*blocks[:-2], (blocks[-2][0], blocks[-1][1])] if len(blocks) > 1 else blocks


def nothing(self):
    return iter([])


def nothing_from_the_second_epoch_on(self):
    return Contiguous.__iter__(self) if self.epoch == 0 else iter([])


def length_where_not_empty(self):
    return Contiguous.__len__(self) if self.epoch == 0 else 0


def nothing_on_three_ranks(self):
    return Contiguous.__iter__(self) if self.num_replicas < 3 else iter([])


def length_below_three_ranks(self):
    return Contiguous.__len__(self) if self.num_replicas < 3 else 0


def dealt_again(self):
    return iter([*Contiguous.__iter__(self)][self.rank :: self.num_replicas][: len(self)])


def length_dealt_again(self):
    return Contiguous.__len__(self) // self.num_replicas


def as_rank_0_after_another_world_size(self):
    rank = self.rank
    self.rank = 0 if getattr(self, "foreign", False) else rank
    try:
        yield from Contiguous.__iter__(self)
    finally:
        self.rank = rank


STATELESS = dict(state_dict=None, load_state_dict=None)
ELSEWHERE = dict(state=RestDealtUnevenly.state, load_state_dict=RestDealtUnevenly.load_state_dict)
ON_ALL = (Contiguous, Strided, Weighted, WeightedStrided)
BLOCKS = {  # name: bases, body, the rule under both settings
    "RankIgnored": (ON_ALL, dict(part=first_part), 1),
    "LocalRank": (ON_ALL, dict(part=part_of_local_rank), 1),
    "Overlap": ((Contiguous, Weighted), dict(part=overlapping_part), 4),
    "OwnPermutation": ((Contiguous, Strided), dict(order=own_permutation), 4),
    "OwnDraws": ((Weighted, WeightedStrided), dict(order=own_draws), 4),
    "WorldSizeInTheSeed": ((Weighted, WeightedStrided), dict(order=draws_of_the_world), 4),
    "LastBatchTooLarge": ((Contiguous, Weighted), dict(blocks=one_step_too_few), 10),
    "Nothing": (ON_ALL, dict(__iter__=nothing, __len__=lambda self: 0) | STATELESS, 1),
    "NothingLater": (
        (Contiguous, Weighted), dict(__iter__=nothing_from_the_second_epoch_on, __len__=length_where_not_empty), 1,
    ),
    "NothingOnThreeRanks": (
        (Contiguous, Weighted), dict(__iter__=nothing_on_three_ranks, __len__=length_below_three_ranks), 1,
    ),
    "DealtTwice": (ON_ALL, dict(__iter__=dealt_again, __len__=length_dealt_again) | STATELESS, 1),
    "OneRankAfterAResume": (
        (Contiguous, Weighted), dict(__iter__=as_rank_0_after_another_world_size) | ELSEWHERE, 9,
    ),
}  # fmt: skip


class TheSameOnAllRanks(Global):
    def mine(self):
        return self.batches()


class TheSameWeightedOnAllRanks(TorchWeighted):
    mine = TheSameOnAllRanks.mine


class TheSameTwoClasses(TwoClassesOfTwo):
    mine = TheSameOnAllRanks.mine


class OwnTwoClasses(TwoClassesOfTwo):
    def generator(self, *more):
        return super().generator(self.rank, *more)


class AsManyStepsOfItsOwn(Global):
    def mine(self):
        generator = self.generator(self.rank)
        return [generator.integers(self.n, size=4).tolist() for _ in range(10)]


class AsManyStepsOfTwoRanks(Global):
    def mine(self):
        generator = self.generator(self.rank // 2)
        return [generator.integers(self.n, size=4).tolist() for _ in range(10)]


class ABatchTwice(Global):
    def mine(self):
        first, second, *rest = super().mine()
        return [first, second, second, *rest]


PLANTED = {
    **{
        f"{name}, {base.__name__}": (planted(name, base, **body), rule)
        for name, (bases, body, rule) in BLOCKS.items()
        for base in bases
    },
    "the same": (TheSameOnAllRanks, 1),
    "the same, weighted": (TheSameWeightedOnAllRanks, 1),
    "the same, P x K": (TheSameTwoClasses, 1),
    "own order, P x K": (OwnTwoClasses, 4),
    "own order, as many steps": (AsManyStepsOfItsOwn, 4),
    "the same on two ranks, as many steps": (AsManyStepsOfTwoRanks, 1),
    "a batch twice": (ABatchTwice, 4),
}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", PLANTED)
def test_by_design_or_not_the_fault_is_refused(name):
    fault, rule = PLANTED[name]
    shapes = [dict(n=60 if "P x K" in name else 40)]
    report = check_batch_sampler(fault, all_of, shapes=shapes, **BOTH)
    assert rule in rules(report), report
    for setting in SETTINGS[: effort.cases(1, 3)]:
        assert not check_batch_sampler(fault, all_of, shapes=shapes, **setting).ok, setting


OF_THE_RANKS = [name for name, (_, rule) in PLANTED.items() if rule in (1, 4) and name != "a batch twice"]


@pytest.mark.parametrize("name", OF_THE_RANKS[:: effort.cases(3, 1)])
def test_one_number_of_ranks_is_compared_with_one_rank(name):
    fault, rule = PLANTED[name]
    shapes = [dict(n=60 if "P x K" in name else 40)]
    assert rule in rules(check_batch_sampler(fault, all_of, shapes=shapes, world_sizes=[4], **BOTH))


ALLOWED = {LosesTail: "drops", Pads: "repeats"}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [*FAULTS][:: effort.cases(12, 1)], ids=lambda fault: fault.__name__)
def test_every_other_rule_is_judged_as_ever(fault):
    for setting in SETTINGS[1:]:
        report = check_batch_sampler(partial(fault, cycled=7), range(40), **setting)
        assert report.ok == bool(fault in ALLOWED and setting[ALLOWED[fault]]), (setting, report)


MESSAGES = {
    "the same": "2 ranks, rank 1, step 0: ranks 0 and 1 are dealt the same batches, in step 0 4 indices [",
    "Nothing, Weighted": "1 rank, epoch 0: no rank has a batch, and the epoch has 40 indices.\n  In a training run",
    "DealtTwice, Contiguous": "together, and on 1 rank there are 40: the epoch seems to be dealt twice.\n  In a",
    "LastBatchTooLarge, Weighted": "more than its batch_size of 3: [",
    "OwnDraws, Weighted": "the order depends on the number of ranks: index ",
    "Overlap, Contiguous": "the ranks do not share one order: by step 0 they have had index ",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_say_what_is_wrong_and_what_it_means(name):
    assert MESSAGES[name] in str(check_batch_sampler(PLANTED[name][0], range(40), **BOTH))


def test_what_fills_no_step_may_be_dropped_wholly_and_nothing_judged_is_no_success():
    def make(num_replicas, rank, n):
        return ShuffledBatchSampler(n, 4, tail="drop", num_replicas=num_replicas, rank=rank)

    report = check_batch_sampler(make, all_of, shapes=[dict(n=11)], drops=True)
    assert report.ok, report
    assert any(note.startswith("drops all indices, as they fill no step: n=11, 3 ranks") for note in report.notes)
    with pytest.raises(ValueError, match="nothing was judged, no epoch has a batch: let a shape fill a step of all"):
        check_batch_sampler(make, all_of, shapes=[dict(n=3)], drops=True)


def test_a_batch_size_that_nobody_tells_is_not_judged_and_that_is_said():
    report = check_batch_sampler(whole_batches, all_of, shapes=[dict(n=23)], world_sizes=(1, 2))
    assert report.ok
    assert any(text.startswith("no batch_size, as an argument or as an attribute") for text in report.not_offered)


class ShufflesTheWrongWayRound(Contiguous):
    def __init__(self, num_replicas, rank, n=40, batch_size=3, seed=0, shuffle=True):
        self.shuffle = shuffle
        super().__init__(num_replicas, rank, n, batch_size, seed=seed)

    def order(self):
        return [*range(self.n)] if self.shuffle else super().order()


@pytest.mark.thorough
def test_what_shuffle_says_is_what_the_sampler_does():
    report = check_batch_sampler(ShufflesTheWrongWayRound, range(40), world_sizes=(1, 2))
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


def test_two_seeds_that_agree_by_chance_are_no_violation_where_there_are_no_epochs():
    assert [*WithoutEpochs(1, 0, seed=0)] == [*WithoutEpochs(1, 0, seed=1)] == [[0], [1]]
    assert_batch_sampler(WithoutEpochs, range(2), world_sizes=[1])


# -------------------------------------------------------------------------------------------- the reader's own rule


def two_classes_of_two(batch):
    classes = sorted(index % 5 for index in batch)
    assert classes[0] == classes[1] != classes[2] == classes[3], f"the classes are {classes}"


class OneBatchOfThreeClasses(TwoClassesOfTwo):
    def batches(self):
        batches = super().batches()
        batches[3][0] = (batches[3][0] + 1) % self.n
        return batches


def test_a_rule_for_a_batch_holds_or_shows_its_smallest_counterexample():
    shapes = [dict(n=83), dict(n=60)]
    options = dict(shapes=shapes, world_sizes=(1, 2), batch_rule=two_classes_of_two, **BOTH)
    kit = partial(check_batch_sampler, exactly_once=all_of, **options)
    report = kit(TwoClassesOfTwo)
    assert report.ok and report.checks[OWN_RULE] > 0, report
    report = kit(OneBatchOfThreeClasses)
    assert rules(report) == [OWN_RULE]
    (violation,) = report.violations
    assert violation.counterexample.shape == dict(n=60)
    assert (violation.counterexample.num_replicas, violation.counterexample.step) == (1, 3)
    assert violation.counterexample.indices == tuple(OneBatchOfThreeClasses(1, 0, n=60).batches()[3])
    start = "Rule 12, your batch_rule: n=60, 1 rank, epoch 0, rank 0, step 3: the classes are ["
    assert str(violation).startswith(start) and "; the batch is [" in str(violation)
    with pytest.raises(AssertionError, match="Rule 12, your batch_rule: n=60, 1 rank"):
        assert_batch_sampler(OneBatchOfThreeClasses, all_of, **options)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, None),
        (True, None),
        (np.True_, None),
        (False, "it returned False"),
        (np.False_, "it returned False"),
        ("too many of class 3", "too many of class 3"),
        ("", "it returned an empty string"),
        (AssertionError(), "its assertion failed"),
        (ValueError("class 7 is unknown"), "batch_rule raised ValueError: class 7 is unknown"),
    ],
)
def test_a_rule_answers_in_any_of_these_ways(answer, why):
    def rule(batch):
        assert type(batch) is list
        if isinstance(answer, Exception):
            raise answer
        batch.clear()  # the list is the rule's own
        return answer

    report = check_batch_sampler(Contiguous, range(40), world_sizes=(1, 2), batch_rule=rule)
    assert rules(report) == ([] if why is None else [OWN_RULE])
    if why:
        assert f": {why}; the batch is [" in report.violations[0].message


class AnotherClassAfterAResume(Contiguous):
    """Whole pairs 2i, 2i + 1, but not where it goes on with another number of ranks."""

    def order(self):
        return [2 * pair + i for pair in self.draw(self.seed, self.epoch) if pair < self.n // 2 for i in (0, 1)]


def test_a_rule_is_asked_about_batches_after_a_resume_on_other_ranks():
    def whole_pairs(batch):
        return len({index // 2 for index in batch}) * 2 == len(batch)

    whole = partial(AnotherClassAfterAResume, batch_size=4)
    for num_replicas in (1, 2):
        assert_batch_sampler(whole, range(40), world_sizes=[num_replicas], batch_rule=whole_pairs)
    report = check_batch_sampler(whole, range(40), world_sizes=(1, 2), batch_rule=whole_pairs)
    assert rules(report) == [OWN_RULE]
    assert report.violations[0].counterexample.resumed_on is not None


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("P x K", "batch_rule must be a function of one batch, a list of indices, as lambda .*, got 'P x K'"),
        (
            lambda: True,
            "batch_rule is called with one argument, a batch's list .* cannot be <lambda>\\(\\)",
        ),
        (lambda batch, labels: True, "cannot be <lambda>\\(batch, labels\\)"),
        (lambda batch: 3, "batch_rule must return True or None where it holds, .* got 3 for the batch \\["),
        (lambda batch: [], "batch_rule must return True or None where it holds, .* got \\[\\] for the batch \\["),
    ],
)
def test_a_bad_rule_gets_a_sentence(rule, message):
    for judge in (check_batch_sampler, assert_batch_sampler):
        with pytest.raises(ValueError, match=message):
            judge(Contiguous, range(40), batch_rule=rule)


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(exactly_once=40), r"exactly_once must be a collection of integers such as range\(40\), .* got 40"),
        (dict(exactly_once=[0.5]), r"exactly_once must be a collection of integers .* got \[0.5\]"),
        (dict(exactly_once=[0, 1, 1, 2]), "exactly_once must name every index once, got 1 more than once"),
        (dict(exactly_once=lambda shape: None), "exactly_once must be a collection of integers .* got None"),
        (dict(world_sizes=4), r"world_sizes must be a collection of numbers of ranks such as \(1, 2, 3\), got 4"),
        (dict(shapes=dict(n=40)), r"shapes must be a list of dicts such as \[dict\(n=20\), dict\(n=50\)\], got {'n'"),
        (dict(shapes=[40]), "every shape must be a dict of the factory's keywords, got 40"),
        (dict(factory=Contiguous(1, 0)), "factory must be a callable that makes one rank's batch sampler .* got <"),
        (dict(repeats="weighted"), "repeats must be True or False, got 'weighted'"),
        (dict(drops=1), "drops must be True or False, got 1"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_batch_sampler(**{"factory": Contiguous, "exactly_once": range(40), **arguments})


@pytest.mark.parametrize("once", [range(40), iter(range(40)), np.arange(40), torch.arange(40), {*range(40)}])
def test_the_indices_may_come_in_any_collection(once):
    assert_batch_sampler(Contiguous, once, world_sizes=(1, 2))


def test_a_factory_that_returns_nothing_is_told_what_to_look_for():
    report = check_batch_sampler(lambda num_replicas, rank: None, range(40))
    assert rules(report) == [1]
    assert "the factory returned None, no sampler: does it end with a return?" in report.violations[0].message


class Endless(Global):
    """Some ranks or epochs never end; len() says what somebody had in mind."""

    def __iter__(self):
        return super().__iter__() if self.epoch == 0 else ([i % self.n] for i in count())


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_epoch_without_an_end_is_told_under_every_setting(setting):
    report = check_batch_sampler(Endless, range(40), world_sizes=(1, 2), **setting)
    assert 1 in rules(report)
    assert "epoch 1, rank 0: the epoch has no end: more than 500 batches for 40 indices" in str(report)


class LongByDesign(Weighted):
    """Its epoch is 15 times the dataset."""

    def __init__(self, num_replicas, rank, n=40, batch_size=1, seed=0):
        self.dataset = n
        super().__init__(num_replicas, rank, 15 * n, batch_size, seed=seed)

    def order(self):
        return [index % self.dataset for index in super().order()]


def test_a_long_epoch_whose_length_is_told_is_read_to_its_end():
    assert_batch_sampler(partial(LongByDesign, n=9), range(9), world_sizes=(1, 2), **BOTH)
