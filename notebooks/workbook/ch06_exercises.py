"""What chapter 06 asks: to deal an order by hand, and to repair a sampler; a wrapper: `ch06_wrapper_exercise`."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler

from course_lib.conformance import check_batch_sampler
from course_lib.launch import run_ranks
from workbook.ch06_two_ranks import fit
from workbook.ch06_wrapper_exercise import lost_and_again, one_order_for_all_ranks, seed_of
from workbook.exercises import Exercise, PropertyExercise
from workbook.seeds_and_epochs import (
    EPOCHS,
    FACTORS,
    HASH,
    WRITTEN_ALIKE,
    another_hash,
    global_states,
    pairs_of_one_number,
)

SEARCHED = 200

shard_by_hand = Exercise(
    "shard by hand",
    solution=[[3, 4], [7, 8], [11, 12]],
    misconceptions={
        "These are rank 0's batches. Rank 1 takes the second part of each step.": [[0, 1, 2], [5, 6], [9, 10]],
        "The parts have the right sizes, but rank 1 takes every second one, not the last three.": (
            [[7, 8], [9, 10], [11, 12]]
        ),
        "Write each batch as a list of its own.": [3, 4, 7, 8, 11, 12],
        "The order begins with 0 here, not with 1.": [[4, 5], [8, 9], [12, 13]],
        "Rank 1 has the second half here. Deal step by step: a step's indices are neighbours, shared by the ranks.": (
            [[7, 8, 9], [10, 11, 12]]
        ),
        "This is how DistributedSampler deals, every second index to rank 1. Here a part is a run of neighbours.": (
            [[1, 3, 5], [7, 9, 11]]
        ),
        "These are full batches in turn, and 12 is left: either nobody trains on it, or rank 0 has a third batch and "
        "never gets to the end of its step. Cut 13 into as many parts as three steps of two ranks need.": (
            [[3, 4, 5], [9, 10, 11]]
        ),
        "Some indices come again at the end of the epoch: this pads. Here every index is dealt once.": (
            [[3, 4, 5], [9, 10, 11], [2, 3, 4]]
        ),
        "The part of 3 goes to rank 1 here. tensor_split and array_split make the *first* parts the larger ones.": (
            [[2, 3, 4], [7, 8], [11, 12]]
        ),
        "The larger part comes last here. tensor_split and array_split make the *first* parts the larger ones.": (
            [[2, 3], [6, 7], [10, 11, 12]]
        ),
        "All parts have two samples here, and nobody trains on 12. Of six parts of 13, the first has three.": (
            [[2, 3], [6, 7], [10, 11]]
        ),
    },
)


class _Dealt(BatchSampler):
    """A right sampler of few lines, and what the faults below are made of."""

    def __init__(
        self, num_samples: int, batch_size: int, num_replicas: int, rank: int, seed: int = 0, sampler: Any = None
    ) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self.num_replicas, self.rank, self.seed, self.epoch = num_replicas, rank, seed, 0

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_samples)

    def parts(self) -> list[NDArray[np.int64]]:
        steps = -(-self.num_samples // (self.batch_size * self.num_replicas))
        return np.array_split(self.order(), steps * self.num_replicas)

    def __len__(self) -> int:
        return len(self.parts()[self.rank :: self.num_replicas])

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in self.parts()[self.rank :: self.num_replicas]])


class _DrawsGlobally(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return torch.randperm(self.num_samples).numpy()


class _SeedsGlobally(_Dealt):
    def order(self) -> NDArray[np.int64]:
        torch.manual_seed(int(np.random.SeedSequence([self.seed, self.epoch]).generate_state(1)[0]))
        return torch.randperm(self.num_samples).numpy()


class _AddsEpochToSeed(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng(self.seed + self.epoch).permutation(self.num_samples)


class _RankInSeed(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, self.epoch, self.rank]).permutation(self.num_samples)


class _LosesTail(_Dealt):
    def parts(self) -> list[NDArray[np.int64]]:
        steps = self.num_samples // (self.batch_size * self.num_replicas)
        full = self.order()[: steps * self.num_replicas * self.batch_size]
        return np.split(full, steps * self.num_replicas) if steps else []


class _TakesTurns(_Dealt):
    def parts(self) -> list[NDArray[np.int64]]:
        return np.split(self.order(), range(self.batch_size, self.num_samples, self.batch_size))


class _FewerSteps(_Dealt):
    def __init__(self, num_samples: int, batch_size: int, *ranks: int, **options: Any) -> None:
        super().__init__(num_samples, 0, *ranks, **options)
        del self.batch_size  # the kit finds what goes beyond such an attribute by itself
        self.largest = batch_size

    def parts(self) -> list[NDArray[np.int64]]:
        steps = max(1, self.num_samples // (self.largest * self.num_replicas))
        return np.array_split(self.order(), steps * self.num_replicas)


class _MultipliesSeedByEpoch(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed + 1) * (self.epoch + 1)).permutation(self.num_samples)


class _TenEpochsApart(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng(10 * self.seed + self.epoch).permutation(self.num_samples)


class _ThousandSeedsApart(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng(self.seed + 1000 * self.epoch).permutation(self.num_samples)


class _RollsOneOrder(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return np.roll(np.random.default_rng(self.seed).permutation(self.num_samples), self.epoch)


class _SeedsGloballyByEpoch(_Dealt):
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        torch.manual_seed(seed_of(self.seed, epoch))


class _ShufflesWithinBatches(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng(self.seed).permutation(self.num_samples)

    def parts(self) -> list[NDArray[np.int64]]:
        generator = np.random.default_rng([self.seed, self.epoch])
        return [generator.permutation(part) for part in super().parts()]


class _IntoOneList(_Dealt):
    def __iter__(self) -> Iterator[list[int]]:
        given: list[int] = []
        for batch in super().__iter__():
            given[:] = batch
            yield given


class _OneEpochForAll(_Dealt):
    epoch_of_all = 0

    def set_epoch(self, epoch: int) -> None:
        type(self).epoch_of_all = epoch

    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, self.epoch_of_all]).permutation(self.num_samples)


class _CountsFloor(_Dealt):
    def __len__(self) -> int:
        return self.num_samples // (self.batch_size * self.num_replicas)


class _IgnoresEpoch(_Dealt):
    def set_epoch(self, epoch: int) -> None:
        pass


class _Plain:
    """The right batches in a class that a Trainer cannot re-create."""

    def __init__(self, num_samples: int, batch_size: int, num_replicas: int, rank: int, seed: int = 0) -> None:
        self.dealt = _Dealt(num_samples, batch_size, num_replicas, rank, seed)

    @property
    def sampler(self) -> Any:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.dealt.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dealt)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.dealt)


class _NotReached(_Plain):
    sampler = None  # type: ignore[assignment]


class _NoArgument(_Plain, BatchSampler):  # type: ignore[override]
    def __init__(self, num_samples: int, batch_size: int, num_replicas: int, rank: int, seed: int = 0) -> None:
        super().__init__(num_samples, batch_size, num_replicas, rank, seed)


class _UsesTheirSampler(_Dealt):
    def __init__(
        self, num_samples: int, batch_size: int, num_replicas: int, rank: int, seed: int = 0, sampler: Any = None
    ) -> None:
        super().__init__(num_samples, batch_size, num_replicas, rank, seed)
        self.theirs = sampler

    def order(self) -> NDArray[np.int64]:
        return super().order() if self.theirs is None else np.array(list(self.theirs))


def _fault_of_sampler(make: Any) -> str | None:
    """The first rule that the kit finds broken, then what a Trainer does with it; ``make`` is the reader's class."""

    def factory(num_replicas: int, rank: int, n: int, seed: int = 0) -> Any:
        return make(n, 3, num_replicas, rank, seed=seed)

    shapes = [{"n": n} for n in (6, 12, 14, 25)]
    report = check_batch_sampler(factory, lambda shape: range(shape["n"]), shapes=shapes, world_sizes=(1, 2, 3))
    if not report.ok:
        rules = ", ".join(str(violation.rule) for violation in report.violations)
        return f"broken: {rules}. First:\n{report.violations[0]}"
    fault = _fault_of_generators(make) or _fault_of_orders(make) or _fault_of_sizes(make)
    if fault:
        return f"the kit finds nothing, but {fault}"
    fault = _fault_in_a_trainer(make)
    if fault is None:
        print(f"{sum(report.checks.values()):,} checks of the kit passed, and a Trainer's default flags on two ranks.")
    return fault


def _fault_of_generators(make: Any) -> str | None:
    sampler = make(14, 3, 1, 0)
    for what, use in {"set_epoch": lambda: sampler.set_epoch(1), "iterating": lambda: list(sampler)}.items():
        before = global_states()
        use()
        if global_states() != before:
            return (
                f"{what} seeds the global generators: whatever else draws from them, dropout and augmentation, draws "
                "the same numbers in every run. Give the order a generator of its own."
            )
    return None


def _fault_of_orders(make: Any) -> str | None:
    """The seeds and epochs up to 11 have orders of their own, none another one's that was turned round."""
    here = _order_of(make, 3, 7)
    with another_hash():
        if _order_of(make, 3, 7) != here:
            return f"another process would have another order for the same (seed, epoch).\n{HASH}"
    if _order_of(make, 3, 9, 7) != here:
        return "set_epoch(9) and then set_epoch(7) do not give the order of epoch 7, to which a resume may go back."
    one, other = (make(25, 3, 1, 0, seed=3) for _ in range(2))
    one.set_epoch(7)
    if _indices(other) == here:
        return "set_epoch of one sampler moves another one as well: an attribute of the class belongs to all of them."
    of_order: dict[str, tuple[int, int]] = {}
    together = Counter[tuple[int, ...]]()
    for seed in range(12):
        of_circle, of_batches = dict[str, int](), dict[frozenset[Any], int]()
        for epoch in range(12):
            batches = _batches_of(make, seed, epoch)
            together.update(pair for batch in batches for pair in combinations(sorted(batch), 2))
            order = [index for batch in batches for index in batch]
            begin = order.index(0)
            other = of_order.setdefault(str(order), (seed, epoch))
            if other != (seed, epoch):
                return _one_order((seed, epoch), other)
            circle = order[begin:] + order[:begin]
            backwards = circle[:1] + circle[:0:-1]
            turned = of_circle.setdefault(str(min(circle, backwards)), epoch)
            if turned != epoch:
                return (
                    f"the order of epoch {epoch} is that of epoch {turned}, begun elsewhere or from its end: the same "
                    "samples meet in nearly the same batches. Draw a new order in each epoch."
                )
            if (first := of_batches.setdefault(frozenset(map(frozenset, batches)), epoch)) != epoch:
                return (
                    f"the batches of epoch {epoch} are those of epoch {first}, in another order or shuffled within: "
                    "the same samples meet again. Draw the whole order anew in each epoch."
                )
    pair, epochs = together.most_common(1)[0]
    if epochs > 48:  # of 144; by a permutation of 25 samples it is about 11, and the most of all 300 pairs about 22
        return (
            f"the samples {pair[0]} and {pair[1]} share a batch in {epochs} of 144 epochs: blocks of samples keep "
            "together, and the same ones meet again. Permute the samples."
        )
    of_factors = [(factor, 0) for factor in FACTORS] + [(0, factor) for factor in sorted(EPOCHS)]
    for pair in of_factors + WRITTEN_ALIKE:
        if (other := of_order.setdefault(str(_order_of(make, *pair)), pair)) != pair:
            return _one_order(pair, other)
    answer = type(make(25, 3, 1, 0, seed=0)).__iter__
    for one, other in pairs_of_one_number(partial(_order_of, make), answer):
        if _order_of(make, *one) == _order_of(make, *other):
            return _one_order(one, other)
    return None


def _order_of(make: Any, seed: int, *epochs: int) -> list[int]:
    """Of the last of the epochs, which are set one after the other."""
    return [index for batch in _batches_of(make, seed, *epochs) for index in batch]


def _batches_of(make: Any, seed: int, *epochs: int) -> list[list[int]]:
    sampler = make(25, 3, 1, 0, seed=seed)
    for epoch in epochs:
        sampler.set_epoch(epoch)
    return [[int(index) for index in batch] for batch in sampler]


def _indices(sampler: Any) -> list[int]:
    return [int(index) for batch in sampler for index in batch]


def _one_order(pair: tuple[int, int], other: tuple[int, int]) -> str:
    if pair[1] == other[1]:
        return f"epoch {pair[1]} has the same order with the seeds {other[0]} and {pair[0]}: it has to go by the seed."
    return (
        f"(seed {pair[0]}, epoch {pair[1]}) and (seed {other[0]}, epoch {other[1]}) have one order: the numbers are "
        "mixed by arithmetic, and meet. Give both to the generator: default_rng([seed, epoch])."
    )


def _fault_of_sizes(make: Any) -> str | None:
    drawn = random.Random(0)
    for _ in range(SEARCHED):
        batch_size, replicas = drawn.randint(1, 5), drawn.randint(1, 4)
        num_samples = drawn.randint(batch_size * replicas, 40)
        if -(-num_samples // (batch_size * replicas)) * replicas > num_samples:
            continue  # a batch would be empty, and an answer may refuse that
        where = f"{num_samples} samples in batches of {batch_size} on {replicas} ranks"
        ranks = [[list(batch) for batch in make(num_samples, batch_size, replicas, rank)] for rank in range(replicas)]
        sizes = {len(batch) for batches in ranks for batch in batches}
        if not sizes <= set(range(1, batch_size + 1)):
            return f"of {where}, a batch has {max(sizes)} samples: at most {batch_size} are asked for, at least 1."
        lost, again = lost_and_again(ranks, num_samples)
        if lost or again or len({len(batches) for batches in ranks}) > 1:
            return f"of {where}, {lost} are lost and {again} come again; batches: {[*map(len, ranks)]}."
    return None


def _fault_in_a_trainer(make: Any) -> str | None:
    module = sys.modules[make.__module__]
    if module.__spec__ is None and module.__name__ != "__main__":  # no file that a rank could import it from
        cloudpickle.register_pickle_by_value(module)

    def train(rank: int) -> Any:
        try:
            return fit(lambda: make(14, 3, 2, rank), 14, epochs=2)
        except TypeError as error:
            return str(error).strip()

    for rank, result in enumerate(run_ranks(train)):
        if isinstance(result.value, str):
            return (
                f"the kit finds nothing, but under a Trainer's default flags it raises\nTypeError: {result.value}\n"
                "The Trainer re-creates your object. Rung 4 has the two things that it asks for."
            )
        for epoch, trained in enumerate(result.value):
            sampler = make(14, 3, 2, rank)
            sampler.set_epoch(epoch)
            yielded = [[int(index) for index in batch] for batch in sampler]
            if yielded != trained:
                return (
                    f"under a Trainer's default flags, rank {rank} trains in epoch {epoch} on {trained}, but the "
                    f"sampler itself yields {yielded}.\nThe Trainer hands a sampler of its own to your class, "
                    "which already deals to the ranks: ignore it."
                )
    return None


repair_a_sampler = PropertyExercise(
    "repair a sampler",
    _fault_of_sampler,
    {
        "are missing; each of 14 indices should come once": _LosesTail,
        "Both at once: the ranks seem not to draw one order": _RankInSeed,
        "the ranks have different numbers of batches (rank 0: 3, rank 1: 2)": _TakesTurns,
        "broken: 3. First:": _CountsFloor,
        "the order depends on the global generators": _DrawsGlobally,
        "iterating seeds the global generators": _SeedsGlobally,
        "as the sum seed + epoch makes it": _AddsEpochToSeed,
        "(seed 1, epoch 0) and (seed 0, epoch 1) have one order": _MultipliesSeedByEpoch,
        "(seed 1, epoch 0) and (seed 0, epoch 10) have one order": _TenEpochsApart,
        "(seed 1000, epoch 0) and (seed 0, epoch 1) have one order": _ThousandSeedsApart,
        "is that of epoch 0, begun elsewhere": _RollsOneOrder,
        "in another order or shuffled within": _ShufflesWithinBatches,
        "is written over by a later one": _IntoOneList,
        "an attribute of the class belongs to all of them": _OneEpochForAll,
        "set_epoch seeds the global generators": _SeedsGloballyByEpoch,
        "are asked for, at least 1": _FewerSteps,
        "set_epoch has no effect": _IgnoresEpoch,
        "the only one that Lightning calls (and accelerate on several ranks), does not exist": _NotReached,
        "because it doesn't subclass PyTorch's `BatchSampler`": _Plain,
        "does not have an argument called `sampler": _NoArgument,
        "which already deals to the ranks: ignore it": _UsesTheirSampler,
    },
    seconds=300,  # it starts ranks
)


EXERCISES = (shard_by_hand, repair_a_sampler, one_order_for_all_ranks)
