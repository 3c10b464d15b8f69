"""What chapter 10 asks second: a run that two ranks share."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import cloudpickle
import torch.distributed as dist
from torch.utils.data import DataLoader

from course_lib.launch import RankError, run_ranks
from course_lib.samplers import ShardedBatchSampler
from rehearse import Rehearsal
from workbook.calls import Allowed
from workbook.ch10_fits import STILL, MakeRun, Record, Uneven, fit
from workbook.ch10_runs.parts import Line, Neighbours, Points
from workbook.exercises import PropertyExercise
from workbook.seeds_and_epochs import HASH, another_hash
from workbook.trainers import quiet_trainer


class _Dealt(NamedTuple):
    epochs: list[list[list[int]]]
    """The batches of this rank."""
    counts: list[int]
    samples: int


def _dealt_to(rank: int, make_run: MakeRun, hashes_differ: bool) -> _Dealt:
    record = Record()
    of_rank = another_hash() if rank and hashes_differ else contextlib.nullcontext()
    with contextlib.suppress(Uneven), of_rank:
        fit(make_run(), record)
    return _Dealt(record.epochs, record.counts, record.samples)


def _dealt(make_run: MakeRun, *, hashes_differ: bool) -> list[_Dealt]:
    results = run_ranks(_dealt_to, args=(make_run, hashes_differ), timeout=120, backend="gloo")
    return [result.value for result in results]


def _missing_and_twice(ranks: list[_Dealt], number: int) -> tuple[int, int]:
    given = Counter(index for rank in ranks for batch in rank.epochs[number] for index in batch)
    return 44 - len(given), sum(times > 1 for times in given.values())


def _judged_on(rank: int, make_run: MakeRun) -> list[str]:
    """What a rehearsal finds on a rank of the run: a Trainer of several ranks cannot be made in Jupyter."""
    # What the ranks are dealt has been counted: a rehearsal cannot see the rank that another process was made with.
    judge = Rehearsal(strict=False, skip={"dealing"})
    fit(make_run(), judge)
    assert judge.report is not None
    return [finding.says for finding in judge.report.findings]


def _travels_by_value(function: Any) -> None:
    module = sys.modules[function.__module__]
    if module.__spec__ is None and module.__name__ != "__main__":  # no file that a rank could import it from
        cloudpickle.register_pickle_by_value(module)


def _fault_of_dealing(make_run: MakeRun) -> str | None:
    _travels_by_value(make_run)
    try:
        ranks = _dealt(make_run, hashes_differ=True)  # as in processes that are no forks of one
    except RankError as error:
        raised = next((report.error for report in error.reports if report.error), error.summary)
        return f"on two ranks it raises {raised[:200]}"
    first = ranks[0]
    if len(first.counts) != 2:
        return "the run has one rank: it should have devices=2 and strategy='ddp'."
    if first.counts[0] != first.counts[1]:
        return (
            f"rank 0 has {first.counts[0]} batches in an epoch and rank 1 has {first.counts[1]}: the one with more "
            "waits for gradients that never come. (The check stopped before that.)"
        )
    if first.samples != 44:
        return f"the dataset has {first.samples} samples, and 44 were asked for: the data stay as they are."
    if len(first.epochs) != 2:
        return f"two epochs were asked for, and the run trains {len(first.epochs)}."
    for number, name in enumerate(("first", "second")):
        batches = [batch for rank in ranks for batch in rank.epochs[number]]
        missing, twice = _missing_and_twice(ranks, number)
        if twice == 44:
            return "both ranks train all 44 samples: nobody shares them out."
        if missing or twice:
            told = f"of the 44 samples, {missing} are trained by no rank in the {name} epoch, and {twice} twice."
            if _missing_and_twice(_dealt(make_run, hashes_differ=False), number) == (0, 0):
                told += f"\n{HASH}"
            return told
        if torn := sum(len({index // 4 for index in batch}) > 1 for batch in batches):
            return f"every sample comes once, and {torn} batches hold samples that are no neighbours."
        if alone := sum(len(batch) == 1 for batch in batches):
            return f"every sample comes once, and {alone} batches hold one sample, which has no neighbour in them."
    first_epoch, second_epoch = ([rank.epochs[number] for rank in ranks] for number in (0, 1))
    second_order = _order(second_epoch)
    if _order(first_epoch) == second_order:
        return "every sample comes once, and both epochs have the same order: Neighbours has another in each."
    if second_order in _turned(_order(first_epoch)) or second_order in _turned(_order(first_epoch[::-1])):
        return f"every sample comes once, and the second epoch has the first one's order {ROLLED}"
    for says in run_ranks(_judged_on, args=(make_run,), timeout=120, backend="gloo")[0].value:
        return f"{STILL} {says}"
    return None


ROLLED = "from another place on, from its end or with the ranks exchanged: Neighbours draws another for each epoch."


def _order(of_ranks: list[list[list[int]]]) -> list[int]:
    """In which the ranks together meet the neighbourhoods, each once."""
    return list(dict.fromkeys(batch[0] // 4 for step in zip(*of_ranks, strict=True) for batch in step))


def _turned(order: list[int]) -> Iterator[list[int]]:
    for walk in (order, order[::-1]):
        for first in range(len(walk)):
            yield walk[first:] + walk[:first]


class _EverySecond(Neighbours):
    """Each rank takes every second batch, and one has more of them."""

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), dist.get_rank() if dist.is_initialized() else 0, None, 2)


class _DealtOnce:
    """Draws and cuts the batches when it is made: each epoch has their first order."""

    def __init__(self) -> None:
        batches = list(Neighbours(44))
        self.batches = [*batches[:-1], batches[-1][:2], batches[-1][2:]]

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batches, dist.get_rank() if dist.is_initialized() else 0, None, 2)


class _Turned(Neighbours):
    """Deals the first epoch's batches again, each from its end."""

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, 0
        batches = list(super().__iter__())
        self.epoch = epoch
        return iter([batch[::-1] if epoch else batch for batch in batches])


class _Rolled(Neighbours):
    """Deals the first epoch's order, from another place on."""

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, 0
        batches = list(super().__iter__())
        self.epoch = epoch
        return iter(batches[epoch:] + batches[:epoch])


def _two_ranks(
    make_batches: Callable[[], Any] | None,
    deal: bool = False,
    devices: int = 2,
    max_epochs: int = 2,
    samples: int = 44,
    batch_size: int = 4,
) -> MakeRun:
    def make_run() -> Any:
        several = {"devices": 2, "strategy": "ddp"} if devices == 2 else {"devices": 1}
        trainer = quiet_trainer(max_epochs=max_epochs, accelerator="cpu", use_distributed_sampler=deal, **several)
        if make_batches is None:
            return trainer, Line(), DataLoader(Points(44), batch_size, shuffle=True)
        return trainer, Line(), DataLoader(Points(samples), batch_sampler=make_batches())

    return make_run


two_ranks = PropertyExercise(
    "two ranks",
    _fault_of_dealing,
    {
        "both ranks train all 44 samples": _two_ranks(lambda: Neighbours(44)),
        "on two ranks it raises TypeError": _two_ranks(lambda: Neighbours(44), deal=True),
        "batches hold samples that are no neighbours": _two_ranks(None, deal=True),
        "rank 0 has 6 batches in an epoch and rank 1 has 5": _two_ranks(lambda: _EverySecond(44)),
        "4 are trained by no rank in the first epoch, and 0 twice": _two_ranks(
            lambda: ShardedBatchSampler(Neighbours(44), tail="drop")
        ),
        "0 are trained by no rank in the first epoch, and 4 twice": _two_ranks(
            lambda: ShardedBatchSampler(Neighbours(44), tail="pad")
        ),
        "two epochs were asked for, and the run trains 1": _two_ranks(
            lambda: ShardedBatchSampler(Neighbours(44)), max_epochs=1
        ),
        "the dataset has 45 samples, and 44 were asked for": _two_ranks(
            lambda: ShardedBatchSampler(Neighbours(44)), samples=45
        ),
        "both epochs have the same order": _two_ranks(_DealtOnce),
        "both epochs have the same order: ": _two_ranks(lambda: ShardedBatchSampler(_Turned(44))),
        ROLLED: _two_ranks(lambda: ShardedBatchSampler(_Rolled(44))),
        "44 batches hold one sample": _two_ranks(None, deal=True, batch_size=1),
        "on two ranks it raises IndexError": _two_ranks(lambda: ShardedBatchSampler(Neighbours(48))),
        "the run has one rank": _two_ranks(lambda: Neighbours(44), devices=1),
    },
    allowed=Allowed(draw=True),  # the weights of a model
    seconds=300,  # it trains
)
