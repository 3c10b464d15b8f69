"""What chapter 06 asks: to deal an order by hand, to repair a sampler, and to repair a wrapper."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, RandomSampler

from course_lib._generators import generators_put_back
from course_lib.conformance import check_batch_sampler
from course_lib.launch import run_ranks
from workbook.ch06_two_ranks import fit
from workbook.exercises import Exercise, PropertyExercise

shard_by_hand = Exercise(
    "shard by hand",
    solution=[[3, 4], [7, 8], [11, 12]],
    misconceptions={
        "These are rank 0's batches. Rank 1 takes the second part of each step.": [[0, 1, 2], [5, 6], [9, 10]],
        "The parts have the right sizes, but rank 1 takes every second one, not the last three.": (
            [[7, 8], [9, 10], [11, 12]]
        ),
        "Write each batch as a list of its own.": [3, 4, 7, 8, 11, 12],
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
    before = _global_states()
    list(make(14, 3, 1, 0))
    if _global_states() != before:
        return (
            "the kit finds nothing, but iterating seeds the global generators: whatever else draws from them, dropout "
            "and augmentation, draws the same numbers in every run. Give the order a generator of its own."
        )
    fault = _fault_in_a_trainer(make)
    if fault is None:
        print(f"{sum(report.checks.values()):,} checks of the kit passed, and a Trainer's default flags on two ranks.")
    return fault


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
            if list(sampler) != trained:
                return (
                    f"under a Trainer's default flags, rank {rank} trains in epoch {epoch} on {trained}, but the "
                    f"sampler itself yields {list(sampler)}.\nThe Trainer hands a sampler of its own to your class, "
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
        "set_epoch has no effect": _IgnoresEpoch,
        "the only one that Lightning calls (and accelerate on several ranks), does not exist": _NotReached,
        "because it doesn't subclass PyTorch's `BatchSampler`": _Plain,
        "does not have an argument called `sampler": _NoArgument,
        "which already deals to the ranks: ignore it": _UsesTheirSampler,
    },
    seconds=300,  # it starts ranks
)


def _global_states() -> tuple[Any, Any, Any]:
    """Those of torch's, Python's and NumPy's global generators."""
    numpys = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), str(numpys)


Shard = Callable[..., list[list[int]]]


def _part_of(shard: Shard, num_samples: int, num_replicas: int, rank: int, epoch: int, launched: int) -> Any:
    """What one rank gets; its launcher has seeded the global generator with ``launched``."""
    torch.manual_seed(launched)
    batch_sampler = BatchSampler(RandomSampler(range(num_samples)), 2, drop_last=False)
    batches = shard(batch_sampler, num_replicas, rank, epoch=epoch)
    return [[int(index) for index in batch] for batch in batches]


def _parts_of(shard: Shard, num_samples: int, num_replicas: int) -> list[Any]:
    """What each rank gets, where launchers seed each rank by its number."""
    return [_part_of(shard, num_samples, num_replicas, rank, 0, launched=1000 + rank) for rank in range(num_replicas)]


def _fault_of_shard(shard: Any) -> str | None:
    """What is wrong unless the ranks see every index, in one order for each epoch, and in as many batches each."""
    with generators_put_back():
        return _first_fault_of_shard(shard)


def _first_fault_of_shard(shard: Shard) -> str | None:
    for num_samples, num_replicas in ((8, 2), (20, 2), (24, 3)):
        ranks = _parts_of(shard, num_samples, num_replicas)
        lost, again = _lost_and_again(ranks, num_samples)
        if lost or again:
            told = f"of {num_samples} indices on {num_replicas} ranks, {lost} are lost and {again} come again.\n"
            return told + _why_lost(shard)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    shard(BatchSampler(RandomSampler(range(30)), 2, drop_last=False), 2, 0, epoch=0)
    if not torch.equal(before, torch.get_rng_state()):
        return (
            "every index comes once, and torch's global generator is not as you found it: what draws from it next, "
            "dropout and augmentation, draws the same numbers on all ranks. Put it back with torch.random.fork_rng()."
        )
    orders = [_part_of(shard, 30, 1, 0, epoch, launched=5) for epoch in range(3)]
    if orders[0] == orders[1] == orders[2]:
        return "nothing is lost, and all epochs have one order: the epoch belongs in the seed."
    for num_samples, num_replicas in ((14, 2), (20, 3)):
        ranks = _parts_of(shard, num_samples, num_replicas)
        lost, _ = _lost_and_again(ranks, num_samples)
        where = f"of {num_samples} indices in batches of 2 on {num_replicas} ranks"
        if lost:
            return (
                f"{where}, {lost} are lost: the batches that do not divide are dropped. Repeat the first ones instead."
            )
        counts = [len(batches) for batches in ranks]
        if len(set(counts)) > 1:
            told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
            return f"{where}, the ranks have unequal numbers of batches ({told}): the run hangs."
    return None


def _lost_and_again(ranks: list[Any], num_samples: int) -> tuple[int, int]:
    seen = Counter(index for batches in ranks for batch in batches for index in batch)
    return num_samples - len(seen), sum(seen.values()) - len(seen)


def _why_lost(shard: Shard) -> str:
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    others = _global_states()[1:]
    first, second = (_part_of(shard, 8, 2, 0, 0, launched) for launched in (1, 2))
    if others != _global_states()[1:]:
        return "This seeds Python's or NumPy's generator, but RandomSampler draws from torch's."
    if first == second and _part_of(shard, 8, 2, 1, 0, launched=1) == first:
        return "All ranks take the same batches: each needs its own share of them."
    if first == second:
        return "The order is seeded, but the ranks do not cut the same one: seed from the epoch, and not from the rank."
    return "Each rank shuffles with its own generator, so they cut different orders: give all ranks one order."


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _in_turn(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    return list(batch_sampler)[rank::num_replicas]


def _by_the_global_seed(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    torch.manual_seed(epoch)
    return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _by_pythons_seed(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    random.seed(epoch)
    return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _the_first_share(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed_of(epoch))
        return list(batch_sampler)[::num_replicas]


def _by_the_ranks_seed(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed_of(epoch, rank))
        return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _by_a_fixed_seed(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _in_uneven_turns(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed_of(epoch))
        return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _in_chunks(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed_of(epoch))
        batches = list(batch_sampler)
    share = len(batches) // num_replicas
    return batches[rank * share : (rank + 1) * share]


one_order_for_all_ranks = PropertyExercise(
    "shard",
    _fault_of_shard,
    {
        "Each rank shuffles with its own generator": _in_turn,
        "RandomSampler draws from torch's": _by_pythons_seed,
        "seed from the epoch, and not from the rank": _by_the_ranks_seed,
        "All ranks take the same batches": _the_first_share,
        "torch's global generator is not as you found it": _by_the_global_seed,
        "all epochs have one order": _by_a_fixed_seed,
        "the batches that do not divide are dropped": _in_chunks,
        "the ranks have unequal numbers of batches (rank 0: 4, rank 1: 3)": _in_uneven_turns,
    },
)

EXERCISES = (shard_by_hand, repair_a_sampler, one_order_for_all_ranks)
